"""Stores datasets, lists them, and serves their prompts."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Path

from services.buffer.api import wire
from services.buffer.routes.common import Cursor, Limit
from services.buffer.runs.tokens import require_scope
from services.buffer.service import ServiceDep
from services.buffer.storage import datasets

READ, RUN = [Depends(require_scope("read"))], [Depends(require_scope("run"))]

DatasetName = Annotated[str, Path(pattern=wire.DATASET_NAME)]

router = APIRouter(prefix="/v1/datasets", tags=["datasets"])


@router.post("/{dataset}", dependencies=RUN)
def upload_prompts(
    service: ServiceDep, dataset: DatasetName, upload: wire.DatasetUpload
) -> wire.DatasetState:
    """Appends prompts to a dataset. Prompts that it has are kept as they are.

    Answers 409 if the dataset has another digest than the upload, or if a run uses it and the
    upload would add to it.
    """
    with service.sessions.begin() as session:
        return datasets.upload_prompts(session, dataset, upload)


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
