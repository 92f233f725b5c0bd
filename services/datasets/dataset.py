"""A dataset: the prompts of a run, named by their content."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

from services.buffer.api.wire import PromptItem
from services.datasets.images import Images


@dataclass(frozen=True, slots=True)
class Dataset:
    """Prompts in a fixed order, whose name contains a digest of them: the same on every machine."""

    name: str
    prompts: Sequence[PromptItem]
    address: str = ""
    """Where the prompts were read from, as the configuration has it; empty for generated ones."""
    left_out: int = 0
    """Number of rows that were left out, because they have no answer."""
    repeated: int = 0
    """Number of rows that were left out, because an earlier one has the same problem."""
    contradicting: int = 0
    """Number of these that differ from the earlier one, such as by their answer."""
    images: Images | None = None
    """The images of its prompts; None if the task has none."""
    limit: int | None = None
    """The limit of rows if it was reached, so that there may be more; otherwise None."""
    demonstrated: int = 0
    """Number of prompts with a demonstration, if the run asks for them."""
    too_long: int = 0
    """Number of prompts that were left out, because they have too many tokens."""
    unreadable: Sequence[tuple[int, str]] = ()
    """(number of the row, reason) for each reference that the task cannot read as one answer."""

    @property
    def notes(self) -> str:
        """Describes demonstrations, what was left out, and the limit that was reached."""
        left_out = f", {self.left_out} rows without an answer left out" if self.left_out else ""
        if self.repeated:
            left_out += f", {self.repeated} rows with a problem of an earlier row left out"
        if self.contradicting:
            left_out += f" ({self.contradicting} of them with another answer)"
        limit = f", read up to the limit of {self.limit} rows" if self.limit else ""
        shown = f", {self.demonstrated} with a demonstration" if self.demonstrated else ""
        too_long = f", {self.too_long} prompts left out as too long" if self.too_long else ""
        return shown + left_out + too_long + limit + self._unreadable_note

    @property
    def _unreadable_note(self) -> str:
        if not self.unreadable:
            return ""
        number, reason = self.unreadable[0]
        return (
            f"; the task cannot read the reference answers of {len(self.unreadable)} of "
            f"{len(self.prompts)}, for example of row {number}: {reason}. Right answers may be "
            "refused; `bapo dataset check` lists the rows"
        )

    @property
    def summary(self) -> str:
        """Describes for people how many prompts it has."""
        return f"{len(self.prompts)} prompts{self.notes}"


def name_dataset(task: str, split: str, prompts: Sequence[PromptItem]) -> str:
    """Returns the name of a dataset, which contains a digest of its prompts."""
    return "-".join(filter(None, (task, split, digest_of_prompts(prompts)[:12])))


def digest_of_prompts(prompts: Sequence[PromptItem]) -> str:
    """Returns the SHA-256 of prompts in their order, 64 hexadecimal digits."""
    content = json.dumps([prompt.model_dump() for prompt in prompts], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()
