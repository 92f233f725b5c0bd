"""Data frames from rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bapo_core.errors import BapoError

if TYPE_CHECKING:
    import pandas


def frame_of(rows: Sequence[Mapping[str, Any]], *, index: str) -> pandas.DataFrame:
    """Returns a row for each mapping, with the values of the key `index` as its index.

    Raises `BapoError` where pandas is not installed.
    """
    try:
        import pandas
    except ImportError as error:
        raise BapoError("data frames need pandas: `pip install pandas`") from error
    frame = pandas.DataFrame.from_records(list(rows))
    return frame.set_index(index) if index in frame else frame
