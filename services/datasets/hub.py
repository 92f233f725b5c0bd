"""Streams data sets of the Hugging Face hub, through the `datasets` library.

An address is `hf://organisation/name[@revision][:split]`. A data set with several configurations
needs the name of one, as `:configuration/split`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import lru_cache
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

from bapo_core.errors import BapoError
from services.common.errors import first_line
from services.common.files import write_private
from services.datasets.files import Row, RowError, check_columns, read_rows, shorten_float32
from services.model.stored import COMMIT, HUB

_ADDRESS = re.compile(
    r"hf://(?P<repository>[^@:/]+(/[^@:/]+)?)(@(?P<revision>[^:]+))?"
    r"(:((?P<configuration>[^/]+)/)?(?P<split>[^/]+))?"
)
_BASE64, _DECIMAL = "__base64__", "__decimal__"
"""Keys of bytes and of decimal numbers in the cache, which is JSON."""


@dataclass(frozen=True, slots=True)
class HubAddress:
    """A data set of the hub, or one split of it."""

    repository: str
    revision: str | None
    """Branch, tag or commit; None is the default branch."""
    configuration: str | None
    split: str | None
    """Name of the split; None is the only split of the data set."""

    @classmethod
    def parse(cls, address: str) -> HubAddress:
        """Parses an address. Raises `BapoError` for one of another form."""
        match = _ADDRESS.fullmatch(address)
        if match is None:
            raise BapoError(
                f"{address}: is no address of a data set; write hf://organisation/name, "
                "hf://organisation/name:split, or hf://organisation/name@revision:split"
            )
        return cls(*match.group("repository", "revision", "configuration", "split"))

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        configuration = f"{self.configuration}/" if self.configuration else ""
        split = f":{configuration}{self.split}" if self.split else ""
        return f"{HUB}{self.repository}{revision}{split}"


@lru_cache
def pin_revision(address: str) -> str:
    """Returns the address with the commit that its revision names at present.

    Within a process, an address always leads to the same commit. Raises `BapoError` when the hub
    cannot be reached, or has no such data set or revision.
    """
    parsed = HubAddress.parse(address)
    if parsed.revision is not None and COMMIT.fullmatch(parsed.revision):
        return address
    _require_library(address)
    from huggingface_hub import HfApi
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )
    from huggingface_hub.utils import httpx  # type: ignore[attr-defined]

    try:
        commit = HfApi().dataset_info(parsed.repository, revision=parsed.revision).sha
    except GatedRepoError as error:
        raise BapoError(_gated(address, parsed)) from error
    except RepositoryNotFoundError as error:
        raise BapoError(
            f"{address}: the hub has no such data set, or shows it to its members alone; check the "
            "name, and HF_TOKEN for a private one"
        ) from error
    except RevisionNotFoundError as error:
        raise BapoError(
            f"{address}: the data set has no revision {parsed.revision}; give a branch, a tag or a "
            "commit that it has"
        ) from error
    except HFValidationError as error:
        raise BapoError(f"{address}: {first_line(error)}") from error
    except (httpx.HTTPError, OSError) as error:
        raise BapoError(_unreachable(address, error)) from error
    return str(replace(parsed, revision=commit))


def read_hub(
    address: str,
    columns: Sequence[str],
    limit: int | None,
    cache: Path | None,
    *,
    others: bool = False,
) -> Iterator[Row]:
    """Yields at most `limit` rows of a split, which are streamed: no further ones are fetched.

    address: address with a commit as its revision. columns: the columns that the caller needs.
    others: whether the rows have the other columns, too.
    cache: directory in which the rows are kept; None keeps them nowhere.

    Raises `BapoError` as `pin_revision` does, for a split that does not exist, and without the
    `datasets` library; `ValueError` for a missing column or a row that cannot be read.
    """
    if cache is None:
        yield from _stream(HubAddress.parse(address), columns, limit, others)
        return
    identity = json.dumps([address, list(columns), limit, *(["others"] if others else [])])
    file = cache / f"{hashlib.sha256(identity.encode()).hexdigest()[:16]}.json"
    if not file.is_file():
        _write_rows(list(_stream(HubAddress.parse(address), columns, limit, others)), file)
    with file.open("rb") as opened:
        for row in read_rows(opened, file.name, columns):
            yield {name: _restore_value(value) for name, value in row.items()}


def _stream(
    address: HubAddress, columns: Sequence[str], limit: int | None, others: bool
) -> Iterator[Row]:
    split = _open_split(address, columns, others)
    features = split.features or {}
    rows = iter(split)
    from datasets.exceptions import DatasetsError
    from huggingface_hub.utils import httpx  # type: ignore[attr-defined]

    for number in count(1) if limit is None else range(1, limit + 1):
        try:
            row = next(rows)
        except StopIteration:
            return
        except (httpx.HTTPError, OSError) as error:
            raise BapoError(_unreachable(str(address), error)) from error
        except (DatasetsError, ValueError, RuntimeError) as error:
            raise RowError(number, f"cannot be read: {first_line(error)}") from error
        try:
            check_columns(row, columns)
        except ValueError as error:
            raise RowError(number, str(error)) from error
        names = list(row) if others else columns
        yield {column: _shorten(row[column], features.get(column)) for column in names}


def _shorten(value: Any, feature: Any) -> Any:
    """Returns a value whose numbers have their shortest decimals if its feature is float32."""
    if isinstance(value, list):
        return [_shorten(item, getattr(feature, "feature", None)) for item in value]
    return shorten_float32(value) if getattr(feature, "dtype", "") == "float32" else value


def _open_split(address: HubAddress, columns: Sequence[str], others: bool) -> Any:
    """Returns an iterable of rows, which have the columns if those are known without a row, and no
    others unless they are asked for."""
    _require_library(str(address))
    import datasets
    from datasets.exceptions import DatasetNotFoundError
    from huggingface_hub.utils import httpx  # type: ignore[attr-defined]

    # The library warns of cards without metadata, which do not matter to a run.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    try:
        splits = datasets.load_dataset(
            # Without the scheme, a local directory of the same name would be read.
            f"{HUB}datasets/{address.repository}",
            address.configuration,
            revision=address.revision,
            streaming=True,
        )
    except DatasetNotFoundError as error:
        if "gated" in str(error):
            raise BapoError(_gated(str(address), address)) from error
        raise BapoError(f"{address}: {first_line(error)}") from error
    except FileNotFoundError as error:
        raise BapoError(f"{address}: {first_line(error)}") from error
    except ValueError as error:
        # No configuration is named, or one that does not exist, or the first rows are damaged.
        reason = " ".join(str(error).splitlines()[:2])
        raise BapoError(
            f"{address}: cannot be read: {reason} (an address with a configuration is "
            f"{HUB}{address.repository}:CONFIGURATION/SPLIT)"
        ) from error
    except (httpx.HTTPError, OSError) as error:
        raise BapoError(_unreachable(str(address), error)) from error
    rows = splits[_choose_split(address, list(splits))]
    if rows.features is not None:
        rows = rows.decode(False)  # images stay files, whose digests name them
    if rows.column_names is None:
        return rows
    check_columns(rows.column_names, columns)
    return rows if others else rows.select_columns(list(columns))


def _require_library(address: str) -> None:
    if find_spec("datasets") is None:
        raise BapoError(
            f"{address}: data sets of the hub need the `datasets` library; install it with "
            "`pip install -e '.[hub]'` in a clone of bapo, or give a file that you downloaded"
        )


def _choose_split(address: HubAddress, splits: Sequence[str]) -> str:
    if address.split is None:
        if len(splits) == 1:
            return splits[0]
        problem = "the data set has several splits; add one"
    else:
        if address.split in splits:
            return address.split
        problem = f"the data set has no split {address.split}; give one that it has"
    raise BapoError(f"{address}: {problem}: {', '.join(splits)}")


def _write_rows(rows: Sequence[Row], file: Path) -> None:
    """Writes the rows as JSON; another process sees the whole file or none."""
    try:
        text = json.dumps(rows, default=_encode_value)
    except TypeError as error:
        raise ValueError(f"holds values that are no text, numbers or lists: {error}") from error
    file.parent.mkdir(parents=True, exist_ok=True)
    write_private(file, text)


def _encode_value(value: Any) -> dict[str, str]:
    """Returns what stands in JSON for bytes and for a decimal number."""
    if isinstance(value, bytes):
        return {_BASE64: base64.b64encode(value).decode()}
    if isinstance(value, Decimal):
        return {_DECIMAL: str(value)}
    raise TypeError(f"{type(value).__name__} {value!r:.40}")


def _restore_value(value: Any) -> Any:
    """Returns a value of the cache with the values that `_encode_value` has encoded."""
    if isinstance(value, list):
        return [_restore_value(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {_BASE64}:
        return base64.b64decode(value[_BASE64])
    if value.keys() == {_DECIMAL}:
        return Decimal(value[_DECIMAL])
    return {name: _restore_value(item) for name, item in value.items()}


def _gated(address: str, parsed: HubAddress) -> str:
    return (
        f"{address}: the data set is gated; accept its conditions at "
        f"https://huggingface.co/datasets/{parsed.repository}, and set HF_TOKEN to a token of that "
        "account"
    )


def _unreachable(address: str, error: Exception) -> str:
    return (
        f"{address}: cannot be read from the hub: {first_line(error)}; check the network, and "
        "HF_ENDPOINT for a mirror, or download the data and give its file"
    )
