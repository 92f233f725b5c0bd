"""Creates, lists and locks runs, and reads their configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from bapo_core.config import ConfigError, RunConfig, config_from
from bapo_core.reward_files import stored_digest
from bapo_core.selection import check_data_rules
from services.buffer.api import wire
from services.buffer.steps.samplers import copy_prior
from services.buffer.storage.datasets import dataset_size
from services.buffer.storage.pages import after_cursor, page_of
from services.buffer.storage.tables import RewardFile, Run
from services.common.problems import Problem, bad_request, conflict, not_found

SUPERSEDED = "urn:bapo:superseded"
"""Problem type that makes a process of an older attempt stop."""


def get_run(session: Session, name: str) -> Run:
    """Returns the run of this name; raises 404 if there is none."""
    run = session.scalar(select(Run).where(Run.name == name))
    if run is None:
        raise not_found(f"run {name!r}; `bapo runs` lists them")
    return run


def lock_run(session: Session, name: str, attempt: int) -> Run:
    """Locks a run until the transaction ends, for a process of its current attempt.

    Raises 404 if there is no such run, and 409 if `attempt` is not its current one.
    """
    run = lock_any_attempt(session, name)
    check_attempt(run, attempt)
    return run


def lock_any_attempt(session: Session, name: str) -> Run:
    """Locks a run until the transaction ends; raises 404 if there is no such run."""
    run = session.scalar(
        select(Run)
        .where(Run.name == name)
        .with_for_update()
        .execution_options(populate_existing=True)
    )
    if run is None:
        raise not_found(f"run {name!r}; `bapo runs` lists them")
    return run


def check_attempt(run: Run, attempt: int) -> None:
    """Raises 409 unless `attempt`, the fencing number of the caller, is the run's current one."""
    if run.status == "stopped":
        detail = f"run {run.name!r} was stopped{describe_stop(run)}; {how_to_continue(run)}"
        raise conflict(detail, SUPERSEDED)
    if attempt != run.attempt or run.status == "deleting":
        raise conflict(
            f"attempt {attempt} of run {run.name!r} was superseded by attempt {run.attempt}; "
            "this process must stop",
            SUPERSEDED,
        )


def describe_stop(run: Run) -> str:
    """Returns who stopped a run and why, as ` by …: …`; nothing if it was not recorded."""
    if run.stopped_by is None:
        return ""
    reason = f": {run.stop_reason}" if run.stop_reason else ""
    return f" by {run.stopped_by}{reason}"


def how_to_continue(run: Run) -> str:
    """Returns what a person does to continue a run that was stopped or has failed."""
    if run.workflow is None:
        return "continue it with `bapo run --resume`"
    return "continue it by starting its pipeline again with the same run and configuration"


def run_state(run: Run) -> wire.RunState:
    """Builds the answer that describes a run."""
    # The stored configuration is sent as it is; see `wire.StoredConfig`.
    return wire.RunState.model_construct(
        name=run.name,
        status=run.status,
        config=run.values,  # type: ignore[arg-type]
        changes=run.changes,
        train_dataset=run.train_dataset,
        test_datasets=run.test_datasets,
        current_step=run.current_step,
        attempt=run.attempt,
        attempt_began_at=run.attempt_began_at,
        created_at=run.created_at,
        workflow=run.workflow,
        stopped=_stop_of(run),
        forked_from=run.forked_from,
    )


def _stop_of(run: Run) -> wire.Stop | None:
    if run.stopped_by is None or run.stopped_at is None:
        return None
    return wire.Stop(by=run.stopped_by, reason=run.stop_reason, at=run.stopped_at)


def create_run(session: Session, request: wire.RunCreate) -> Run:
    """Creates a run; returns the existing one if it was created with the same arguments.

    Raises 422 if the configuration is invalid or its data rules cannot be used, 400 if its reward
    file is not stored, if a dataset is empty, if there are fewer training prompts than a step may
    draw, or if `sampler.prior_run` has no results for them, and 409 if a run of this name exists
    with other arguments.
    """
    try:
        config = config_from(request.config, where="config")
        check_data_rules(config)
    except ConfigError as error:
        raise Problem(422, "Invalid configuration", str(error)) from error
    _check_reward_file(session, config)
    _check_test_datasets(config, request.test_datasets)
    for dataset in (request.train_dataset, *request.test_datasets.values()):
        if dataset_size(session, dataset) == 0:
            raise bad_request(f"dataset {dataset!r} has no prompts; upload them first")
    prompts = dataset_size(session, request.train_dataset)
    if prompts < config.prompts_needed:
        raise bad_request(
            f"dataset {request.train_dataset!r} has {prompts} prompts, but "
            f"{config.explain_prompts_needed()}; lower one of these keys, or use a larger dataset"
        )
    values: dict[str, Any] = {
        "name": request.name,
        "config_json": config.model_dump(mode="json"),
        "train_dataset": request.train_dataset,
        "test_datasets": request.test_datasets,
    }
    created = session.scalar(
        insert(Run)
        .values(**values, workflow=request.workflow)
        .on_conflict_do_nothing(index_elements=["name"])
        .returning(Run.id)
    )
    run = get_run(session, request.name)
    if created is not None:
        copy_prior(run)
    differing = [
        key.removesuffix("_json") for key, value in values.items() if getattr(run, key) != value
    ]
    if differing:
        raise conflict(
            f"run {request.name!r} exists with another {' and '.join(differing)}; resume it with "
            "the configuration it was created with, or choose another name"
        )
    return run


def _check_reward_file(session: Session, config: RunConfig) -> None:
    """Raises 400 unless the file of the reward functions is stored."""
    functions = config.task.functions
    if functions is None:
        return
    try:
        digest = stored_digest(functions)
    except ConfigError as error:
        raise bad_request(f"config: {error}") from error
    if session.get(RewardFile, digest) is None:
        raise bad_request(
            f"config: task.reward names {functions.file} with the digest {digest}, which is not "
            "stored; store the file with PUT /v1/reward-files/DIGEST first"
        )


def _check_test_datasets(config: RunConfig, datasets: Mapping[str, str]) -> None:
    """Raises 400 unless each evaluation set of the configuration has a dataset of its own."""
    names = set(config.evaluation_sets)
    if datasets.keys() != names:
        raise bad_request(
            f"test_datasets names the sets {', '.join(sorted(datasets)) or 'none'}, but the "
            f"evaluation sets of the configuration are {', '.join(sorted(names))}; give a dataset "
            "for each of these"
        )
    if len(set(datasets.values())) < len(datasets):
        raise bad_request(
            "test_datasets has the same dataset for two sets, whose results could not be told "
            "apart; upload the prompts under a second name"
        )


def list_runs(
    session: Session,
    status: str | None,
    search: str | None,
    cursor: str | None,
    limit: int,
    only: str | None = None,
    parent: str | None = None,
) -> wire.Page[wire.RunState]:
    """Returns a page of runs, newest first, by status and by part of the name.

    only: name of the one run to return, if it is among them. parent: name of the run whose forks
    alone are returned.
    """
    statement = select(Run)
    if only is not None:
        statement = statement.where(Run.name == only)
    if parent is not None:
        named = select(Run.id).where(Run.name == parent).scalar_subquery()
        statement = statement.where(Run.parent_id == named)
    if status is not None:
        statement = statement.where(Run.status == status)
    if search is not None:
        statement = statement.where(Run.name.contains(search, autoescape=True))
    rows = session.scalars(
        after_cursor(statement, (-Run.id.expression,), "newest", cursor, limit)
    ).all()
    return page_of(rows, limit, "newest", lambda row: (-row.id,), run_state)
