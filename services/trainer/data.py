"""From a batch manifest to tensors."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pyarrow as pa
import torch
from torch import Tensor

from bapo_core.config import RunConfig
from bapo_core.errors import BapoError
from bapo_core.seeding import derive_rng
from services.buffer.api.trajectories import (
    SCHEMA,
    TrajectoryGroup,
    decode_proximal,
    groups_of,
    read_table,
)
from services.buffer.api.wire import ManifestMember
from services.common.objectstore import ObjectStore
from services.trainer.attention import Sequences
from services.trainer.ranks import shares


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
        return torch.cat([torch.empty(0, dtype=torch.long), *by_group])


def collate(members: Sequence[ManifestMember], groups: Sequence[TrajectoryGroup]) -> Batch:
    """Tensors of the groups; `members` says where each came from, in the same order.

    There may be none: a rank that has nothing to train still takes part.
    """
    rows = [
        (index, group.prompt_token_ids, response)
        for index, group in enumerate(groups)
        for response in group.responses
    ]
    prompt_lengths = torch.tensor([len(prompt) for _, prompt, _ in rows], dtype=torch.long)
    counts = torch.tensor([len(each.token_ids) for _, _, each in rows], dtype=torch.long)
    lengths = prompt_lengths + counts
    tokens = torch.zeros(len(rows), int(lengths.max()) if rows else 1, dtype=torch.long)
    tokens[_first(lengths, tokens.shape[1])] = torch.tensor(
        [token for _, prompt, each in rows for token in (*prompt, *each.token_ids)],
        dtype=torch.long,
    )
    mask = _first(counts, int(counts.max()) if rows else 1)
    behavior = torch.zeros(mask.shape)
    behavior[mask] = torch.tensor([value for _, _, each in rows for value in each.logprobs])
    return Batch(
        members=members,
        group=torch.tensor([index for index, _, _ in rows], dtype=torch.long),
        tokens=tokens,
        prompt_lengths=prompt_lengths,
        lengths=lengths,
        behavior=behavior,
        mask=mask,
        rewards=torch.tensor(
            [[response.reward for response in group.responses] for group in groups]
        ).reshape(len(groups), len(groups[0].responses) if groups else 1),
    )


def _first(counts: Tensor, width: int) -> Tensor:
    """(n, width), true in the first `counts` columns of each row."""
    return torch.arange(width) < counts[:, None]


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


@dataclass(frozen=True, slots=True)
class Plan:
    """Which groups of a batch make an update together, and which rank takes which of them."""

    updates: list[list[list[int]]]
    """For each update, for each rank: places of groups in the manifest."""

    def of_rank(self, rank: int) -> list[int]:
        """All groups of a rank, in the manifest's order: the rank's own batch."""
        return sorted(index for update in self.updates for index in update[rank])


def make_plan(
    config: RunConfig, step: int, members: Sequence[ManifestMember], *, ranks: int, width: int
) -> Plan:
    """Updates of whole groups, drawn by (seed, step); each shared among the ranks by cost.

    width: of the model's hidden states.
    """
    order = list(range(len(members)))
    derive_rng(config.seed, "minibatch", step).shuffle(order)
    at_once = config.optimizer.minibatch_prompts
    updates = []
    for start in range(0, len(order), at_once):
        update = order[start : start + at_once]
        taken = shares([group_cost(members[index], width) for index in update], ranks)
        updates.append([sorted(update[place] for place in places) for places in taken])
    return Plan(updates)


def group_cost(member: ManifestMember, width: int) -> float:
    """Relative FLOPs of a group's pass: of a token, 24 width^2 a layer in linear layers, and
    2 width x length in causal attention."""
    return member.tokens * (1 + member.tokens / member.size / (12 * width))


@dataclass(frozen=True, slots=True)
class Packed:
    """Sequences one after another, T tokens in all, K of them of responses."""

    tokens: Tensor
    """(1, T)"""
    positions: Tensor
    """(1, T), from 0 on in each sequence."""
    sequences: Sequences
    predicted_at: Tensor
    """(K,) where each response token is predicted: one before its place."""
    targets: Tensor
    """(K,) the response tokens."""

    def to(self, device: torch.device) -> Packed:
        return Packed(
            self.tokens.to(device),
            self.positions.to(device),
            Sequences(self.sequences.starts.to(device), self.sequences.longest),
            self.predicted_at.to(device),
            self.targets.to(device),
        )


PADDING = Packed(
    tokens=torch.zeros(1, 2, dtype=torch.long),
    positions=torch.arange(2)[None],
    sequences=Sequences.of(torch.tensor([2])),
    predicted_at=torch.zeros(1, dtype=torch.long),
    targets=torch.zeros(1, dtype=torch.long),
)
"""One token of a response: for a rank that has nothing to do while others have."""


def pack(batch: Batch, rows: Tensor) -> Packed:
    """These rows without their padding; response tokens in the order of `batch.mask[rows]`."""
    sequences = Sequences.of(batch.lengths[rows])
    tokens = batch.tokens[rows[sequences.row], sequences.position]
    response, column = torch.nonzero(batch.mask[rows], as_tuple=True)
    begins = sequences.starts[:-1].long() + batch.prompt_lengths[rows]
    places = begins[response] + column
    return Packed(
        tokens=tokens[None],
        positions=sequences.position[None],
        sequences=sequences,
        predicted_at=places - 1,
        targets=tokens[places],
    )


def microbatches(lengths: Tensor, rows: Tensor, token_budget: int) -> list[Tensor]:
    """Splits `rows` into parts of similar length, none of more tokens than the budget.

    Raises `BapoError` for a row that is longer by itself.
    """
    ordered = rows[torch.argsort(lengths[rows], stable=True)]
    parts: list[list[int]] = []
    room = 0
    for row, length in zip(ordered.tolist(), lengths[ordered].tolist(), strict=True):
        if length > token_budget:
            raise BapoError(
                f"a sequence of {length} tokens does not fit optimizer.microbatch_tokens "
                f"({token_budget}); raise it, or lower rollout.max_response_tokens"
            )
        if length > room:
            parts.append([])
            room = token_budget
        parts[-1].append(row)
        room -= length
    return [torch.tensor(part) for part in parts]
