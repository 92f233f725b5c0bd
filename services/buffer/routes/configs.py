"""Stored configurations."""

from __future__ import annotations

from fastapi import APIRouter

from services.buffer.api import wire
from services.buffer.routes.common import LARGEST_CONFIG, Cursor, Limit, RunName
from services.buffer.runs import stored_configs
from services.buffer.runs.tokens import permit
from services.buffer.service import ServiceDep
from services.common.guard import GuardedRoute

READ, STORE = permit("read"), permit("run", largest_body=LARGEST_CONFIG)

router = APIRouter(route_class=GuardedRoute, prefix="/v1/configs", tags=["configurations"])


@router.put("/{name}", dependencies=STORE)
def store_config(service: ServiceDep, name: RunName, upload: wire.ConfigUpload) -> wire.NamedConfig:
    """Stores a configuration by name, in place of any other of this name.

    Pipelines can be started with it (`stored_config`). A run keeps the configuration that it was
    created with.
    """
    with service.sessions.begin() as session:
        row = stored_configs.store_config(session, name, upload.text)
        return stored_configs.named_config(row)


@router.get("", dependencies=READ)
def list_configs(
    service: ServiceDep, cursor: Cursor = None, limit: Limit = 100
) -> wire.Page[wire.NamedConfig]:
    """Lists the stored configurations by name."""
    with service.sessions() as session:
        return stored_configs.list_configs(session, cursor, limit)


@router.get("/{name}", dependencies=READ)
def get_config(service: ServiceDep, name: RunName) -> wire.NamedConfig:
    """Returns a stored configuration."""
    with service.sessions() as session:
        return stored_configs.named_config(stored_configs.get_config(session, name))
