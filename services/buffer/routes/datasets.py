"""Stores datasets, lists them, and serves their prompts."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path, Request
from starlette.concurrency import run_in_threadpool

from services.buffer.api import wire
from services.buffer.routes.common import Cursor, Limit
from services.buffer.runs.tokens import permit
from services.buffer.service import ServiceDep
from services.buffer.storage import datasets
from services.common.guard import GuardedRoute, parse_body

LARGEST_UPLOAD = 16 << 20
"""Largest body in bytes of a part of a dataset."""
READ, UPLOAD = permit("read"), permit("run", "pipeline", largest_body=LARGEST_UPLOAD)


def _upload_schema() -> dict[str, Any]:
    """Returns the schema of an upload for /docs, because the route reads the body itself."""
    schema = wire.DatasetUpload.model_json_schema()
    schema["properties"]["prompts"]["items"] = wire.PromptItem.model_json_schema()
    schema.pop("$defs")
    return schema


UPLOAD_BODY = {
    "requestBody": {"required": True, "content": {"application/json": {"schema": _upload_schema()}}}
}

DatasetName = Annotated[str, Path(pattern=wire.DATASET_NAME)]

router = APIRouter(route_class=GuardedRoute, prefix="/v1/datasets", tags=["datasets"])


@router.post("/{dataset}", dependencies=UPLOAD, openapi_extra=UPLOAD_BODY)
async def upload_prompts(
    service: ServiceDep, request: Request, dataset: DatasetName
) -> wire.DatasetState:
    """Appends prompts to a dataset. Prompts that it has are kept as they are.

    Answers 409 if the dataset has another digest than the upload, or if a run uses it and the
    upload would add to it.
    """
    upload = await parse_body(request, wire.DatasetUpload)

    def store() -> wire.DatasetState:
        with service.sessions.begin() as session:
            return datasets.upload_prompts(session, dataset, upload)

    return await run_in_threadpool(store)


@router.get("", dependencies=READ)
def list_datasets(
    service: ServiceDep, cursor: Cursor = None, limit: Limit = 100
) -> wire.Page[wire.DatasetState]:
    """Lists the datasets by name: those that were uploaded, and those of runs."""
    with service.sessions() as session:
        return datasets.list_datasets(session, cursor, limit)


@router.get("/{dataset}", dependencies=READ)
def get_dataset(service: ServiceDep, dataset: DatasetName) -> wire.DatasetState:
    """Returns a dataset without its prompts; one that does not exist has 0 prompts."""
    with service.sessions() as session:
        return datasets.get_dataset(session, dataset)


@router.get("/{dataset}/prompts", dependencies=READ)
def list_prompts(
    service: ServiceDep, dataset: DatasetName, cursor: Cursor = None, limit: Limit = 100
) -> wire.Page[wire.PromptItem]:
    """Lists the prompts of a dataset in their order."""
    with service.sessions() as session:
        return datasets.list_prompts(session, dataset, cursor, limit)
