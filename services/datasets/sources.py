"""Opens a data set by its address: a local file, or one of S3 or of the Hugging Face hub."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bapo_core.config import RunConfig
from bapo_core.errors import BapoError
from services.buffer.api.client import BufferClient
from services.common.objectstore import S3_SCHEME, ObjectStore
from services.datasets.files import Row, read_rows
from services.datasets.hub import pin_revision, read_hub
from services.datasets.uploaded import DATASET
from services.model.resolve import object_store_of_environment
from services.model.stored import HUB


def _refuse_buffer() -> BufferClient:
    raise BapoError("dataset:NAME needs a buffer service; set BAPO_BUFFER_URL and BAPO_TOKEN")


@dataclass(frozen=True, slots=True)
class DataSources:
    """Services that hold data sets. Each is connected only when an address needs it."""

    cache: Path | None = None
    """Directory that keeps the rows of the hub; None fetches them every time."""
    open_store: Callable[[], ObjectStore] = object_store_of_environment
    connect: Callable[[], BufferClient] = _refuse_buffer


def open_rows(
    address: str,
    columns: Sequence[str],
    limit: int | None,
    sources: DataSources,
    *,
    others: bool = False,
) -> Iterator[Row]:
    """Yields the rows of a file, of an object of S3, or of a data set of the hub.

    columns: columns that the caller needs. limit: most rows that the caller needs. others: whether
    the rows have the other columns, too.

    Raises `BapoError` when there is no such data set, and `ValueError` for one that cannot be read
    or that lacks a column.
    """
    if address.startswith(HUB):
        yield from read_hub(pin_revision(address), columns, limit, sources.cache, others=others)
    elif address.startswith(S3_SCHEME):
        data = sources.open_store().read_address(address)
        yield from read_rows(io.BytesIO(data), address, columns, others=others)
    else:
        try:
            with Path(address).open("rb") as file:
                yield from read_rows(file, address, columns, others=others)
        except OSError as error:
            raise BapoError(
                f"{address}: {error.strerror}; give the path of a file, hf://organisation/name, "
                "s3://bucket/key or dataset:NAME"
            ) from error


def is_local(address: str) -> bool:
    """Returns whether an address is a file of this machine."""
    return not address.startswith((HUB, S3_SCHEME, DATASET))


def pin_address(address: str) -> str:
    """Returns the address of a data set, with a commit if it is one of the hub.

    Raises `BapoError` when the hub cannot be reached, or has no such data set or revision.
    """
    return pin_revision(address) if address.startswith(HUB) else address


def pin_revisions(config: RunConfig) -> RunConfig:
    """Returns the configuration with the commits of its data sets of the hub.

    Raises `BapoError` as `pin_address` does.
    """
    addresses = {"train_path": config.task.train_path, "test_path": config.task.test_path}
    pinned = {key: address and pin_address(address) for key, address in addresses.items()}
    sets = {
        name: settings.model_copy(update={"path": settings.path and pin_address(settings.path)})
        for name, settings in config.evaluation.sets.items()
    }
    return config.model_copy(
        update={
            "task": config.task.model_copy(update=pinned),
            "evaluation": config.evaluation.model_copy(update={"sets": sets}),
        }
    )


TRAIN_PATH = "task.train_path"


def address_key(config: RunConfig, evaluation_set: str) -> str:
    """Returns the key of the configuration that holds the address of an evaluation set."""
    return f"evaluation.sets.{evaluation_set}.path" if config.evaluation.sets else "task.test_path"


def data_addresses(config: RunConfig) -> dict[str, str | None]:
    """Returns the addresses of a run's data sets by their keys; None for generated prompts."""
    sets = {
        address_key(config, name): settings.path
        for name, settings in config.evaluation_sets.items()
    }
    return {TRAIN_PATH: config.task.train_path, **sets}
