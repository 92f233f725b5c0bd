"""From a batch manifest to tensors."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa
import torch
from torch import Tensor

from services.buffer.trajectories import (
    SCHEMA,
    TrajectoryGroup,
    decode_proximal,
    groups_of,
    read_table,
)
from services.buffer.wire import ManifestMember
from services.common.objectstore import ObjectStore


@dataclass(frozen=True, slots=True)
class Batch:
    """Whole groups, one row a response: N rows, in the manifest's order.

    `tokens` (N, L) holds prompt and response, padded on the right with 0. `behavior` and `mask`
    (N, R) are aligned to the responses: column r is the response's r-th token, so causal attention
    never sees padding before a token that counts.
    """

    members: Sequence[ManifestMember]
    group: Tensor
    """(N,) index of each row's group in `members`."""
    tokens: Tensor
    prompt_lengths: Tensor
    lengths: Tensor
    behavior: Tensor
    mask: Tensor
    rewards: Tensor
    """(groups, G)"""
    storage: Tensor | None = None
    """(N, R) log-probs of the trainer at the storage step, where known; NaN where not."""

    def rows_of(self, groups: Sequence[int]) -> Tensor:
        """Row indexes of these groups, in this order."""
        by_group = [torch.nonzero(self.group == index).flatten() for index in groups]
        return torch.cat(by_group)


def collate(members: Sequence[ManifestMember], groups: Sequence[TrajectoryGroup]) -> Batch:
    """Tensors of the groups; `members` says where each came from, in the same order."""
    rows = [
        (index, group.prompt_token_ids, response)
        for index, group in enumerate(groups)
        for response in group.responses
    ]
    lengths = [len(prompt) + len(response.token_ids) for _, prompt, response in rows]
    widest = max(len(response.token_ids) for _, _, response in rows)
    tokens = torch.zeros(len(rows), max(lengths), dtype=torch.long)
    behavior = torch.zeros(len(rows), widest)
    mask = torch.zeros(len(rows), widest, dtype=torch.bool)
    for i, (_, prompt, response) in enumerate(rows):
        ids = [*prompt, *response.token_ids]
        tokens[i, : len(ids)] = torch.tensor(ids)
        behavior[i, : len(response.logprobs)] = torch.tensor(response.logprobs)
        mask[i, : len(response.logprobs)] = True
    return Batch(
        members=members,
        group=torch.tensor([index for index, _, _ in rows]),
        tokens=tokens,
        prompt_lengths=torch.tensor([len(prompt) for _, prompt, _ in rows]),
        lengths=torch.tensor(lengths),
        behavior=behavior,
        mask=mask,
        rewards=torch.tensor([[r.reward for r in group.responses] for group in groups]),
    )


class TrajectoryReader:
    """Reads groups from the object store. Objects that are replayed soon again stay in memory."""

    def __init__(self, store: ObjectStore, keep: int = 16) -> None:
        self._store, self._keep = store, keep
        self._tables: OrderedDict[str, pa.Table] = OrderedDict()

    def batch(self, members: Sequence[ManifestMember], *, proximal: bool = False) -> Batch:
        """The batch of these members; with their storage-step log-probs if `proximal`."""
        batch = collate(members, [self._group(member) for member in members])
        if proximal:
            return replace(batch, storage=self._storage(members, batch.behavior.shape))
        return batch

    def _group(self, member: ManifestMember) -> TrajectoryGroup:
        table = self._table(member.object_key, member.object_digest)
        return groups_of(table.slice(member.row_start, member.row_count))[0]

    def _table(self, key: str, digest: str) -> pa.Table:
        if key in self._tables:
            self._tables.move_to_end(key)
        else:
            self._tables[key] = read_table(self._store.get(key, digest), SCHEMA)
            if len(self._tables) > self._keep:
                self._tables.popitem(last=False)
        return self._tables[key]

    def _storage(self, members: Sequence[ManifestMember], shape: torch.Size) -> Tensor:
        found = torch.full(shape, torch.nan)
        objects: dict[str, dict[int, list[list[float]]]] = {}
        row = 0
        for member in members:
            if member.proximal_key is not None and member.proximal_digest is not None:
                key = member.proximal_key
                if key not in objects:
                    data = self._store.get(key, member.proximal_digest)
                    objects[key] = decode_proximal(data)
                for offset, values in enumerate(objects[key][member.group_id]):
                    found[row + offset, : len(values)] = torch.tensor(values)
            row += member.size
        return found


def microbatches(lengths: Tensor, rows: Tensor, token_budget: int) -> Iterator[Tensor]:
    """Splits `rows` into parts of similar length whose padded size fits the budget.

    A single row longer than the budget gets a part of its own.
    """
    ordered = rows[torch.argsort(lengths[rows], stable=True)]
    part: list[int] = []
    for row in ordered.tolist():
        width = int(lengths[row])
        if part and width * (len(part) + 1) > token_budget:
            yield torch.tensor(part)
            part = []
        part.append(row)
    if part:
        yield torch.tensor(part)
