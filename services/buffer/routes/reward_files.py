"""Stores and serves files of reward functions."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path

from services.buffer.api import wire
from services.buffer.routes.common import LARGEST_CONFIG
from services.buffer.runs.tokens import permit
from services.buffer.service import ServiceDep
from services.buffer.storage import reward_files
from services.common.guard import GuardedRoute

STORE = permit("run", largest_body=LARGEST_CONFIG)

FileDigest = Annotated[str, Path(pattern=r"^[0-9a-f]{64}$", description="SHA-256 of the file")]

router = APIRouter(route_class=GuardedRoute, prefix="/v1/reward-files", tags=["reward functions"])


@router.put("/{digest}", dependencies=STORE)
def store_reward_file(service: ServiceDep, digest: FileDigest, upload: wire.RewardFile) -> None:
    """Stores a file of reward functions, of at most 1 MiB, which `task.reward` names by its digest.

    Storing it again changes nothing. The verifier runs it in confined processes, and nothing else
    does.
    """
    with service.sessions.begin() as session:
        reward_files.store_reward_file(session, digest, upload.text)


@router.get("/{digest}", dependencies=permit("read", "collector", of_no_run=True))
def get_reward_file(service: ServiceDep, digest: FileDigest) -> wire.RewardFile:
    """Returns a file of reward functions."""
    with service.sessions() as session:
        return reward_files.read_reward_file(session, digest)
