"""Loads or generates the prompts of a run, and names them by their content."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from bapo_core.config import RunConfig
from bapo_core.config.evaluation import TEST_SET, EvaluationSet
from bapo_core.errors import BapoError
from bapo_core.selection import check_selection
from bapo_core.tasks import ImageTask, Payload, SyntheticTask, Task, get_task, is_solved
from bapo_core.tasks.base import (
    DEMONSTRATION,
    compose_demonstration,
    explain_reference,
)
from services.buffer.api import wire
from services.buffer.api.client import BufferClient
from services.common.errors import task_errors
from services.datasets.dataset import Dataset, name_dataset
from services.datasets.files import RowError
from services.datasets.images import Images, digests_of_prompts, image_digests
from services.datasets.sources import (
    TRAIN_PATH,
    DataSources,
    address_key,
    data_addresses,
    is_local,
    open_rows,
)
from services.datasets.uploaded import DATASET, read_uploaded
from services.model.vision import images_of
from services.verifier.api.wire import LARGEST_PAYLOAD

NO_SERVICES = DataSources()


class RunDatasets(NamedTuple):
    """The prompts of a run."""

    train: Dataset
    test: dict[str, Dataset]
    """Held-out prompts of each evaluation set, by its name."""

    @property
    def test_names(self) -> dict[str, str]:
        """The name of the dataset of each evaluation set."""
        return {name: dataset.name for name, dataset in self.test.items()}

    def run_request(self, config: RunConfig) -> wire.RunCreate:
        """Returns the request that creates a run with these datasets."""
        return wire.RunCreate(
            name=config.name,
            config=config.model_dump(mode="json"),
            train_dataset=self.train.name,
            test_datasets=self.test_names,
        )

    @property
    def all(self) -> list[Dataset]:
        """All datasets, which a run needs in the buffer service."""
        return [self.train, *self.test.values()]


def load_datasets(config: RunConfig, sources: DataSources = NO_SERVICES) -> RunDatasets:
    """Returns the training prompts of a run, and the held-out prompts of its evaluation sets.

    Raises `BapoError` when a data set cannot be read, when training prompts are held out, or when
    there are fewer training prompts than a step may draw.
    """
    check_selection(config)
    task = get_task(config.task.name, **config.task.arguments)
    if config.evaluation.sets:
        test = load_evaluation_sets(config, sources)
        train = _load_training_prompts(config, sources, test)
    else:
        train, only = _load_both(config, sources)
        test = {TEST_SET: only}
    if config.demonstrations.enabled:
        train = with_demonstrations(task, train, config.task.solved_at)
    for name, dataset in test.items():
        held_out = {prompt.uid for prompt in dataset.prompts}
        overlap = [prompt.uid for prompt in train.prompts if prompt.uid in held_out]
        if overlap:
            raise BapoError(
                f"{len(overlap)} training prompts are held-out prompts too (the first: "
                f"{overlap[0]}); remove them from one of {TRAIN_PATH} and "
                f"{address_key(config, name)}"
            )
    check_number(config, train)
    return RunDatasets(train, test)


def check_number(config: RunConfig, train: Dataset) -> None:
    """Raises `BapoError` if there are fewer training prompts than a step may draw."""
    if len(train.prompts) < config.prompts_needed:
        left_out = f" ({train.too_long} were left out as too long)" if train.too_long else ""
        raise BapoError(
            f"there are {len(train.prompts)} training prompts{left_out}, but "
            f"{config.explain_prompts_needed()}; lower one of these keys, or provide more "
            "prompts"
        )


def load_evaluation_sets(
    config: RunConfig, sources: DataSources = NO_SERVICES
) -> dict[str, Dataset]:
    """Returns the held-out prompts of each set of `evaluation.sets`, by its name.

    Raises `BapoError`, which names the set, when its prompts can be neither read nor generated.
    """
    return {
        name: _load_set(config, settings, sources)
        for name, settings in config.evaluation_sets.items()
    }


def _load_set(config: RunConfig, settings: EvaluationSet, sources: DataSources) -> Dataset:
    try:
        task = get_task(config.task.name, **settings.options)
        if settings.path is not None:
            columns, limit = _without_demonstration(settings.columns), settings.prompts
            return read_dataset(task, settings.path, sources, columns, limit, split=settings.name)
        if not isinstance(task, SyntheticTask):
            raise BapoError(f"task {task.name} cannot generate prompts; set the path of the set")
        _, problems = _generate_split(task, config.task.data_seed, train=0, test=settings.prompts)
        return _build_generated(task, problems, settings.name, sources)
    except BapoError as error:
        raise BapoError(f"evaluation.sets.{settings.name}: {error}") from error


def with_demonstrations(task: Task, dataset: Dataset, solved_at: float | None) -> Dataset:
    """Returns the prompts with the demonstrations that the verifier accepts as correct.

    They are a column of the data, or composed by the task. Prompts may lack one. They are trusted
    input, so they are verified here and without a deadline. solved_at: `task.solved_at`. Raises
    `BapoError` if no prompt has one that is accepted.
    """
    payloads: list[Payload] = []
    given = accepted = 0
    example = ""
    for prompt in dataset.prompts:
        payload = {key: value for key, value in prompt.payload.items() if key != DEMONSTRATION}
        text = prompt.payload.get(DEMONSTRATION) or compose_demonstration(task, payload)
        if text:
            given += 1
            verdict = task.verify(payload, text)
            if is_solved(verdict.reward, verdict.status, solved_at):
                accepted += 1
                payload[DEMONSTRATION] = text
            else:
                reason = f"{verdict.status} {verdict.detail}".strip()
                if solved_at is not None:
                    reason = f"reward {verdict.reward:g}, below task.solved_at={solved_at:g}"
                example = example or f"{prompt.uid}: {reason}"
        payloads.append(payload)
    if not accepted:
        reason = f"none is accepted ({example})" if given else "there are none"
        raise BapoError(
            "the demonstrations section needs correct responses to training prompts, but "
            f"{reason}; map a column of {TRAIN_PATH} to `{DEMONSTRATION}` in task.columns, or "
            "remove the section"
        )
    changed = _build_dataset(task, payloads, "train", dataset.images or Images(lambda _: b"", None))
    return replace(
        dataset,
        name=changed.name,
        prompts=changed.prompts,
        images=changed.images,
        demonstrated=accepted,
    )


def _without_demonstration(columns: Mapping[str, str]) -> dict[str, str]:
    """Returns the names of columns without that of demonstrations, which held-out prompts lack."""
    return {column: name for column, name in columns.items() if column != DEMONSTRATION}


def _load_training_prompts(
    config: RunConfig, sources: DataSources, held_out: Mapping[str, Dataset]
) -> Dataset:
    """Returns the training prompts; generated ones are in no evaluation set."""
    settings = config.task
    task = get_task(settings.name, **settings.arguments)
    if settings.train_path is not None:
        address, columns, limit = settings.train_path, settings.columns, settings.train_prompts
        demonstrated = config.demonstrations.enabled
        return read_dataset(
            task, address, sources, columns, limit, split="train", demonstrated=demonstrated
        )
    if not isinstance(task, SyntheticTask):
        raise BapoError(f"task {settings.name} cannot generate prompts; set task.train_path")
    uids = {prompt.uid for dataset in held_out.values() for prompt in dataset.prompts}
    try:
        drawn = task.generate(settings.data_seed, settings.train_prompts + len(uids))
    except ValueError as error:
        raise BapoError(str(error)) from error
    images = _make_images(sources)
    payloads = _prepare_generated(task, drawn, images)
    kept = [payload for payload in payloads if task.uid(payload) not in uids]
    return _build_dataset(task, kept[: settings.train_prompts], "train", images)


def _generate_split(
    task: SyntheticTask, seed: int, *, train: int, test: int
) -> tuple[list[Payload], list[Payload]]:
    try:
        return task.generate_split(seed, train=train, test=test)
    except ValueError as error:
        raise BapoError(str(error)) from error


def _load_both(config: RunConfig, sources: DataSources) -> tuple[Dataset, Dataset]:
    settings = config.task
    task = get_task(settings.name, **settings.arguments)
    if (settings.train_path is None) != (settings.test_path is None):
        missing = "test_path" if settings.test_path is None else "train_path"
        raise BapoError(
            f"task.{missing} is not set; set both addresses, or neither to generate the prompts"
        )
    if settings.train_path is not None and settings.test_path is not None:
        columns = settings.columns
        return (
            read_dataset(
                task,
                settings.train_path,
                sources,
                columns,
                settings.train_prompts,
                split="train",
                demonstrated=config.demonstrations.enabled,
            ),
            read_dataset(
                task,
                settings.test_path,
                sources,
                _without_demonstration(columns),
                settings.test_prompts,
                split="test",
            ),
        )
    if not isinstance(task, SyntheticTask):
        raise BapoError(
            f"task {settings.name} cannot generate prompts; set task.train_path and task.test_path"
        )
    train, test = _generate_split(
        task, settings.data_seed, train=settings.train_prompts, test=settings.test_prompts
    )
    return _build_generated(task, train, "train", sources), _build_generated(
        task, test, "test", sources
    )


def _build_generated(
    task: Task, problems: Sequence[Payload], split: str, sources: DataSources
) -> Dataset:
    """Returns the dataset of generated problems, whose images become references."""
    images = _make_images(sources)
    return _build_dataset(task, _prepare_generated(task, problems, images), split, images)


def _prepare_generated(task: Task, problems: Sequence[Payload], images: Images) -> list[Payload]:
    """Returns generated problems, whose images become references.

    Raises `BapoError` for one that cannot be stored.
    """
    payloads: list[Payload] = [images.take_row(task, problem) for problem in problems]
    try:
        for payload in payloads:
            _check_payload(payload)
    except ValueError as error:
        raise BapoError(f"task {task.name} generates a problem that is refused: {error}") from error
    return payloads


def read_dataset(
    task: Task,
    address: str,
    sources: DataSources,
    columns: Mapping[str, str],
    limit: int | None = None,
    *,
    split: str = "",
    demonstrated: bool = False,
) -> Dataset:
    """Reads the prompts of a data set.

    columns: name of a column for each of the task's columns that is named otherwise, and for any
    column if the task takes all of them; those of uploaded prompts are the task's already. limit:
    most rows to read. split: part of the dataset's name. demonstrated: whether the column
    `demonstration` is read as well; it may be mapped, and is left out of a task that composes
    demonstrations itself unless it is.

    The first of equal problems is kept. Raises `BapoError`, which names the row, for a data set
    that cannot be read.
    """
    others = getattr(task, "takes_all_columns", False)
    column_names = _name_columns(task, columns, demonstrated=demonstrated, others=others)
    if address.startswith(DATASET):
        uploaded = read_uploaded(address, task, sources.connect())
        reached = limit if limit is not None and len(uploaded) >= limit else None
        return replace(
            _build_dataset(task, uploaded[:limit], split, _make_images(sources)),
            address=address,
            limit=reached,
            unreadable=_find_unreadable(task, enumerate(uploaded[:limit], start=1)),
        )
    images = _make_images(sources, address)
    problems: dict[str, Payload] = {}
    numbers: dict[str, int] = {}
    left_out = repeated = contradicting = number = 0
    try:
        rows = open_rows(address, list(column_names.values()), limit, sources, others=others)
        for number, row in enumerate(islice(rows, limit), start=1):
            values = {column: row[name] for column, name in column_names.items()}
            if others:
                values = {**_leave_out(row, column_names.values()), **values}
            text = values.pop(DEMONSTRATION, None)
            with _name_row(number):
                problem = _parse_row(task, values, images)
                if problem is None:
                    left_out += 1
                    continue
                if text is not None:
                    problem = {**problem, DEMONSTRATION: _check_demonstration(text)}
                uid = _uid_of(task, problem)
            kept = problems.setdefault(uid, problem)
            numbers.setdefault(uid, number)
            repeated += kept is not problem
            contradicting += kept != problem
    except RowError as error:
        raise BapoError(f"{address}, {error}") from error
    except ValueError as error:
        raise BapoError(f"{address}: {error}") from error
    if not problems:
        raise BapoError(f"{address}: has no row with an answer; give a data set that has problems")
    dataset = _build_dataset(task, list(problems.values()), split, images)
    return replace(
        dataset,
        address=address,
        left_out=left_out,
        repeated=repeated,
        contradicting=contradicting,
        limit=limit if number == limit else None,
        unreadable=_find_unreadable(task, zip(numbers.values(), problems.values(), strict=True)),
    )


def _name_columns(
    task: Task, columns: Mapping[str, str], *, demonstrated: bool, others: bool
) -> dict[str, str]:
    """Returns the name in the data of each column that is read by name.

    others: whether the task takes the other columns, too. Raises `BapoError` for a column that the
    task does not have.
    """
    with task_errors(task.name, "columns"):
        known = list(task.columns)
    if demonstrated and (DEMONSTRATION in columns or not hasattr(task, "demonstrate")):
        known.append(DEMONSTRATION)
    unknown = sorted(set(columns) - set(known))
    if others:
        known += unknown
    elif unknown:
        raise BapoError(
            f"task.columns: task {task.name} has no column {', '.join(unknown)}; its columns are "
            f"{', '.join(known)}"
        )
    return {column: columns.get(column, column) for column in known}


def _leave_out(row: Mapping[str, Any], columns: Collection[str]) -> dict[str, Any]:
    return {column: value for column, value in row.items() if column not in columns}


def _find_unreadable(task: Task, rows: Iterable[tuple[int, Payload]]) -> list[tuple[int, str]]:
    """Returns (number of the row, reason) for each reference answer that the task cannot read."""
    reasons = ((number, explain_reference(task, payload)) for number, payload in rows)
    return [(number, reason) for number, reason in reasons if reason is not None]


def _make_images(sources: DataSources, address: str = "") -> Images:
    """Returns an empty `Images` for a data set, whose rows may name files if it is a file."""
    local = bool(address) and is_local(address)
    directory = Path(address).parent if local else None
    return Images(lambda digest: sources.connect().image(digest), directory)


@contextmanager
def _name_row(number: int) -> Iterator[None]:
    """Turns what is wrong with a row of a data set into a `RowError`, which has its number."""
    try:
        yield
    except (BapoError, ValueError) as error:
        raise RowError(number, str(error)) from error


def _parse_row(task: Task, row: Mapping[str, Any], images: Images) -> Payload | None:
    values = images.take_row(task, row)
    with task_errors(task.name, "parse_row", refusal=ValueError):
        problem = task.parse_row(values)
    _check_payload(problem)
    return problem


def _check_demonstration(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{DEMONSTRATION} is {value!r:.80}; make it the text of a response")
    _check_text(value)
    return value


def _check_payload(problem: Payload | None) -> None:
    """Raises `ValueError` for a problem that the database or the verifier cannot take."""
    _check_text(problem)
    if len(json.dumps(problem)) > LARGEST_PAYLOAD:
        raise ValueError(f"the problem is longer than {LARGEST_PAYLOAD} bytes; shorten it")


def _check_text(value: Any) -> None:
    """Raises `ValueError` for text that the database cannot store."""
    if isinstance(value, str):
        if "\0" in value:
            raise ValueError(f"{value!r:.80} holds a NUL character; remove it")
        value.encode()
    elif isinstance(value, Mapping):
        for item in value.values():
            _check_text(item)
    elif isinstance(value, list):
        for item in value:
            _check_text(item)


def _build_dataset(task: Task, payloads: Sequence[Payload], split: str, images: Images) -> Dataset:
    prompts = []
    for number, payload in enumerate(payloads, start=1):
        try:
            uid = _uid_of(task, payload)
        except BapoError as error:
            raise BapoError(f"prompt {number}: {error}") from error
        prompts.append(wire.PromptItem(uid=uid, task=task.name, payload=_to_json(payload)))
    if isinstance(task, ImageTask):
        _check_images(task, payloads)
    name = name_dataset(task.name, split, prompts)
    return Dataset(name, prompts, images=images if isinstance(task, ImageTask) else None)


def _uid_of(task: Task, payload: Payload) -> str:
    with task_errors(task.name, "uid"):
        return task.uid(payload)


def _check_images(task: ImageTask, payloads: Sequence[Payload]) -> None:
    """Raises `BapoError` unless every prompt shows its images in the order of the payload."""
    for payload in payloads:
        with task_errors(task.name, f"render of prompt {task.uid(payload)!r}"):
            messages = task.render(payload)
        shown = [image["digest"] for image in images_of(messages)]
        if shown != image_digests(payload):
            raise BapoError(
                f"task {task.name}: prompt {task.uid(payload)!r} does not show the images of its "
                'payload["images"] in their order; correct `render` or `parse_row` of the task'
            )


def _to_json(payload: Payload) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(json.dumps(dict(payload)))
    return plain


def store_dataset(
    client: BufferClient,
    dataset: Dataset,
    *,
    name: str | None = None,
    digest: str | None = None,
    source: str | None = None,
) -> None:
    """Stores the images of a dataset that are not stored yet, and then its prompts.

    name: another name than that of the dataset. digest, source: as in `upload_dataset`.

    Raises `BapoError` for prompts of `dataset:NAME` whose images are not stored, and as
    `upload_dataset` does.
    """
    if dataset.images is not None:
        taken = set(dataset.images.digests)
        for missing in client.missing_images(digests_of_prompts(dataset.prompts)):
            if missing not in taken:
                raise BapoError(
                    f"dataset {name or dataset.name}: image {missing[:12]} of its prompts is not "
                    "stored; run `bapo dataset upload` for the dataset again"
                )
            client.upload_image(missing, dataset.images.get(missing))
    client.upload_dataset(name or dataset.name, dataset.prompts, digest=digest, source=source)


def keep_prompts(config: RunConfig, run: wire.RunState, datasets: RunDatasets) -> RunConfig:
    """Returns the configuration with which a run that exists goes on: with its own task's data.

    Its data sets may have moved, or have other revisions, as long as the prompts are the same.
    Raises `BapoError` when they are not, because the results would be a mixture of two.
    """
    now, before = data_addresses(config), data_addresses(run.config)
    names = {TRAIN_PATH: datasets.train.name} | _by_address_key(config, datasets.test_names)
    recorded = {TRAIN_PATH: run.train_dataset} | _by_address_key(run.config, run.test_datasets)
    if names.keys() != recorded.keys():
        raise BapoError(
            f"run {run.name!r} was created with the evaluation sets "
            f"{', '.join(sorted(run.test_datasets))}, and the configuration has "
            f"{', '.join(sorted(datasets.test))} now; give the former sets, or choose another run "
            "name"
        )
    for key, name in names.items():
        if name != recorded[key]:
            raise BapoError(
                f"{key}: run {run.name!r} was created with other prompts ({recorded[key]} of "
                f"{before[key] or 'generated ones'}) than {now[key] or 'the task generates'} has "
                f"now ({name}); give the former data or revision, or choose another run name"
            )
    task = run.config.task.model_copy(
        update={
            "name": config.task.name,
            "options": config.task.options,
            "reward": config.task.reward,
        }
    )
    sets = {
        name: settings.model_copy(update={"path": run.config.evaluation.sets[name].path})
        for name, settings in config.evaluation.sets.items()
    }
    evaluation = config.evaluation.model_copy(update={"sets": sets})
    return config.model_copy(update={"task": task, "evaluation": evaluation})


def _by_address_key(config: RunConfig, values: Mapping[str, str]) -> dict[str, str]:
    """Returns the values of evaluation sets by the configuration's key of the set's address."""
    return {address_key(config, name): value for name, value in values.items()}
