"""Stores datasets that are uploaded in parts, lists them, and reads their prompts in order."""

from __future__ import annotations

from typing import Any

from sqlalchemy import cast, func, select
from sqlalchemy.dialects.postgresql import JSONB, JSONPATH, insert
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from services.buffer.api import wire
from services.buffer.storage.pages import after_cursor, page_of
from services.buffer.storage.tables import Dataset, PromptRow, Run
from services.common.problems import conflict


def upload_prompts(session: Session, name: str, upload: wire.DatasetUpload) -> wire.DatasetState:
    """Inserts the prompts that the dataset lacks.

    Raises 409 if the dataset has another digest, if another prompt has one of the positions, or if
    the dataset would change and is in use by a run.
    """
    created = insert(Dataset).values(name=name, size=0, digest=upload.digest, source=upload.source)
    session.execute(created.on_conflict_do_nothing())
    dataset = session.get_one(Dataset, name, with_for_update=True)
    if dataset.digest != upload.digest:
        present = f"the digest {dataset.digest[:12]}" if dataset.digest else "no recorded digest"
        raise conflict(
            f"dataset {name!r} holds other prompts, with {present}; choose another dataset name"
        )
    rows = [
        {
            "dataset": name,
            "position": upload.first_position + index,
            "uid": item.uid,
            "task": item.task,
            "payload": item.payload,
        }
        for index, item in enumerate(upload.prompts)
    ]
    try:
        added = _insert_new(session, rows)
    except IntegrityError as error:
        raise conflict(
            f"dataset {name!r} has another prompt at one of the positions "
            f"{upload.first_position}..{upload.first_position + len(rows) - 1}; upload the same "
            "prompts in the same order, or use another dataset name"
        ) from error
    held_out = func.jsonb_path_query_array(Run.test_datasets, cast("$.*", JSONPATH), type_=JSONB)
    uses_dataset = (Run.train_dataset == name) | held_out.contains([name])
    run_name = session.scalar(select(Run.name).where(uses_dataset).limit(1)) if added else None
    if run_name is not None:
        raise conflict(
            f"dataset {name!r} is used by run {run_name!r}, whose prompts must not change; use "
            "another dataset name"
        )
    dataset.size += added
    return get_dataset(session, name)


def _insert_new(session: Session, rows: list[dict[str, Any]]) -> int:
    if not rows:
        return 0
    statement = insert(PromptRow).on_conflict_do_nothing(index_elements=["dataset", "uid"])
    return len(session.scalars(statement.returning(PromptRow.id), rows).all())


def dataset_size(session: Session, name: str) -> int:
    """Returns the number of prompts of a dataset; 0 if there is no dataset of this name."""
    dataset = session.get(Dataset, name)
    return 0 if dataset is None else dataset.size


_FIRST_TASK = (
    select(PromptRow.task)
    .where(PromptRow.dataset == Dataset.name, PromptRow.position == 0)
    .scalar_subquery()
)


def get_dataset(session: Session, name: str) -> wire.DatasetState:
    """Returns a dataset without its prompts; it has none if it does not exist."""
    row = session.execute(select(Dataset, _FIRST_TASK).where(Dataset.name == name)).one_or_none()
    return wire.DatasetState(dataset=name, prompts=0) if row is None else _state(*row)


def list_datasets(session: Session, cursor: str | None, limit: int) -> wire.Page[wire.DatasetState]:
    """Returns a page of datasets, by name."""
    rows = session.execute(
        after_cursor(
            select(Dataset, _FIRST_TASK), (Dataset.name.expression,), "name", cursor, limit
        )
    ).all()
    return page_of(rows, limit, "name", lambda row: (row[0].name,), lambda row: _state(*row))


def list_prompts(
    session: Session, name: str, cursor: str | None, limit: int
) -> wire.Page[wire.PromptItem]:
    """Returns a page of the prompts of a dataset, in their order."""
    statement = select(PromptRow).where(PromptRow.dataset == name)
    rows = session.scalars(
        after_cursor(statement, (PromptRow.position.expression,), "position", cursor, limit)
    ).all()
    return page_of(rows, limit, "position", lambda row: (row.position,), _item)


def _state(dataset: Dataset, task: str | None) -> wire.DatasetState:
    return wire.DatasetState(
        dataset=dataset.name,
        prompts=dataset.size,
        task=task,
        digest=dataset.digest,
        source=dataset.source,
    )


def _item(row: PromptRow) -> wire.PromptItem:
    return wire.PromptItem(uid=row.uid, task=row.task, payload=row.payload)
