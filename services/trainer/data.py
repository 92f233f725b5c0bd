"""Turns a batch manifest into tensors: reads trajectories, plans updates, packs micro-batches."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from bapo_core.config import RunConfig
from bapo_core.errors import BapoError
from bapo_core.seeding import derive_rng
from bapo_core.types import DEMONSTRATED, Source
from services.buffer.api.trajectories import (
    PROXIMAL_SCHEMA,
    SCHEMA,
    read_proximal,
    read_trajectories,
)
from services.buffer.api.wire import ManifestMember
from services.common.images import stored_images
from services.common.objectstore import TRANSFERS, ObjectStore
from services.model.vision import OpenImage, Pixels, VisionProcessor
from services.trainer.demonstrations import DemonstrationEncoder
from services.trainer.ranks import balance_by_cost
from services.trainer.sequences import Sequences
from services.trainer.transfer import send


@dataclass(frozen=True, slots=True)
class Batch:
    """Whole groups as tensors: N responses, a row each, in the manifest's order.

    A group has the responses that are compared with each other for their advantages: those of one
    member of the manifest, or of several that join (`ManifestMember.joins_previous`). The columns
    of (N, R) tensors are aligned to the responses: column r is the response's r-th token, and R is
    the longest response's length.
    """

    members: Sequence[ManifestMember]
    member: Tensor
    """(N,) int64: index of each row's member in `members`."""
    group: Tensor
    """(N,) int64: index of each row's group, counted from 0 in the order of the rows."""
    tokens: Tensor
    """(N, L) int64: prompt and response, padded on the right with 0, so that causal attention never
    sees padding before a token that counts."""
    prompt_lengths: Tensor
    """(N,) int64: tokens of each row's prompt."""
    lengths: Tensor
    """(N,) int64: tokens of each row's prompt and response together."""
    behavior_logprobs: Tensor
    """(N, R) float32: log-probs under the policy that generated the responses; 0 if masked."""
    mask: Tensor
    """(N, R) bool: true at the tokens of the responses, false at padding."""
    rewards: Tensor
    """(groups, G) float32, G of the largest group; smaller ones are padded with 0 on the right."""
    truncated: Tensor
    """(N,) bool: whether the response was cut off at `rollout.max_response_tokens`."""
    storage_logprobs: Tensor | None = None
    """(N, R) log-probs of the trainer at the storage step, where recorded; NaN elsewhere."""
    pixels: Sequence[Pixels | None] = ()
    """The images of each member's prompt, None without any; empty if no prompt has images."""

    @property
    def sizes(self) -> Tensor:
        """(groups,) int64: number of responses of each group."""
        return self.group.bincount(minlength=len(self.rewards))

    @property
    def packed_tokens(self) -> int:
        """Tokens that are computed: those of the responses, and each member's prompt once."""
        is_first = torch.ones_like(self.member, dtype=torch.bool)
        is_first[1:] = self.member[1:] != self.member[:-1]
        return int(self.mask.sum() + self.prompt_lengths[is_first].sum())

    @property
    def row_rewards(self) -> Tensor:
        """(N,) reward of each row."""
        return self.rewards[_first(self.sizes, self.rewards.shape[1])]

    @property
    def sources(self) -> list[str]:
        """The source of each row, a `Source` or `DEMONSTRATED` of `bapo_core.types`."""
        sources: list[str] = []
        for member in self.members:
            demonstrated = member.demonstration is not None
            sources += [member.source] * (member.response_count - demonstrated)
            sources += [DEMONSTRATED] * demonstrated
        return sources

    @property
    def demonstrated(self) -> Tensor:
        """(N, 1) bool: whether each row is a demonstration, which no policy sampled."""
        is_demonstrated = [source == DEMONSTRATED for source in self.sources]
        return torch.tensor(is_demonstrated, dtype=torch.bool)[:, None]

    @property
    def replayed(self) -> Tensor:
        """(N, 1) bool: whether each row is a replayed response."""
        is_replayed = [source == Source.REPLAYED for source in self.sources]
        return torch.tensor(is_replayed, dtype=torch.bool)[:, None]

    def rows_of(self, groups: Sequence[int]) -> Tensor:
        """Returns the row indexes of these groups, in this order."""
        by_group = [torch.nonzero(self.group == index).flatten() for index in groups]
        return torch.cat([torch.empty(0, dtype=torch.long), *by_group])


def collate(members: Sequence[ManifestMember] | None, table: pa.Table) -> Batch:
    """Builds the tensors of a batch straight from the columns of `table`.

    members: None takes each group of the table as one, for responses that are no training batch.
    table: of `SCHEMA`, the responses of `members` in the same order. Its rows are trusted: they
    were checked when they were stored, and their digest when they were read. A table without rows
    gives an empty batch, because a rank without groups still takes part in every pass.

    Raises `ValueError` if the table has another number of rows than `members`.
    """
    rows = len(table)
    if members is None:
        # The responses of a group are numbered from 0 on.
        member = group = (_values(table["response_index"]) == 0).cumsum(0) - 1
    else:
        counts = torch.tensor([member.response_count for member in members], dtype=torch.long)
        if int(counts.sum()) != rows:
            raise ValueError(f"the members have {int(counts.sum())} rows, but the table {rows}")
        member = torch.repeat_interleave(torch.arange(len(members)), counts)
        begins = torch.tensor([not member.joins_previous for member in members], dtype=torch.long)
        group = (begins.cumsum(0) - 1)[member]
    prompt_lengths = _values(pc.list_value_length(table["prompt_token_ids"])).long()
    response_lengths = _values(pc.list_value_length(table["token_ids"])).long()
    lengths = prompt_lengths + response_lengths
    in_prompt = _first(prompt_lengths, int(lengths.max()) if rows else 1)
    in_response = _first(lengths, in_prompt.shape[1]) & ~in_prompt
    tokens = torch.zeros(in_prompt.shape, dtype=torch.int32)
    tokens.masked_scatter_(in_prompt, _values(pc.list_flatten(table["prompt_token_ids"])))
    tokens.masked_scatter_(in_response, _values(pc.list_flatten(table["token_ids"])))
    mask = _first(response_lengths, int(response_lengths.max()) if rows else 1)
    return Batch(
        members=members or [],
        member=member,
        group=group,
        tokens=tokens.long(),
        prompt_lengths=prompt_lengths,
        lengths=lengths,
        behavior_logprobs=torch.zeros(mask.shape).masked_scatter_(
            mask, _values(pc.list_flatten(table["logprobs"]))
        ),
        mask=mask,
        rewards=_by_group(_values(table["reward"]), group),
        truncated=_values(pc.equal(table["finish_reason"], "length")),
    )


def _values(column: pa.ChunkedArray) -> Tensor:
    """Returns the numbers (n,) of a column, copied: PyTorch cannot share read-only memory."""
    return torch.tensor(column.to_numpy())


def _by_group(values: Tensor, group: Tensor) -> Tensor:
    """Returns values (N,) of rows as (groups, G), padded with 0; the groups are in order.

    G is at least 2, the smallest group that can be compared.
    """
    sizes = group.bincount()
    width = int(sizes.max()) if len(sizes) else 0
    present = _first(sizes, max(width, 2))
    return torch.zeros(present.shape).masked_scatter_(present, values)


def _first(counts: Tensor, width: int) -> Tensor:
    """Returns a mask (n, width) that is true in the first `counts` columns of each row."""
    return torch.arange(width) < counts[:, None]


class TrajectoryReader:
    """Reads groups from the object store; keeps recent objects in memory, for replays of them."""

    def __init__(
        self,
        store: ObjectStore,
        keep: int = 16,
        *,
        vision: VisionProcessor | None = None,
        encoder: DemonstrationEncoder | None = None,
    ) -> None:
        """keep: how many objects stay in memory between batches. vision: the processor of a model
        that reads images. encoder: the encoder of demonstrations, if batches may have any."""
        self._store, self._keep, self._vision = store, keep, vision
        self._encoder = encoder
        self._images = stored_images(store)
        self._tables: OrderedDict[str, pa.Table] = OrderedDict()

    def batch(self, members: Sequence[ManifestMember], *, with_storage: bool = False) -> Batch:
        """Returns the batch of these members; with their storage-step log-probs if asked.

        Raises `ObjectStoreError` for an object whose digest is not the manifest's.
        """
        digests = {member.object_key: member.object_digest for member in members}
        tables = self._tables_of(digests, read_trajectories)
        rows = [self._rows(member, tables[member.object_key]) for member in members]
        batch = collate(members, pa.concat_tables([SCHEMA.empty_table(), *rows]))
        images = [member.images for member in members]
        batch = replace(batch, pixels=read_pixels(images, self._vision, self._images.get))
        if with_storage:
            return replace(batch, storage_logprobs=self._storage_logprobs(batch))
        return batch

    def _rows(self, member: ManifestMember, table: pa.Table) -> pa.Table:
        rows = table.slice(member.row_start, member.row_count)
        chosen = rows if member.rows is None else rows.take(pa.array(member.rows, pa.int64()))
        if member.demonstration is None:
            return chosen
        if self._encoder is None:
            raise BapoError("the batch has demonstrations, but nothing encodes them")
        prompt = rows["prompt_token_ids"][0].as_py()
        return pa.concat_tables([chosen, self._encoder.encode(member, prompt)])

    def _tables_of(
        self, digests: Mapping[str, str], decode: Callable[[bytes], pa.Table]
    ) -> dict[str, pa.Table]:
        """Returns the tables in these objects by key, each of which is read at most once.

        A step's groups lie in as many objects as its rollouts took bundles, in any order.
        """

        def read(key: str) -> pa.Table:
            return decode(self._store.get(key, digests[key]))

        missing = [key for key in digests if key not in self._tables]
        with ThreadPoolExecutor(TRANSFERS) as pool:
            self._tables |= zip(missing, pool.map(read, missing), strict=True)
        for key in digests:
            self._tables.move_to_end(key)
        tables = {key: self._tables[key] for key in digests}
        while len(self._tables) > self._keep:
            self._tables.popitem(last=False)
        return tables

    def _storage_logprobs(self, batch: Batch) -> Tensor:
        digests = {
            member.proximal_key: member.proximal_digest
            for member in batch.members
            if member.proximal_key is not None and member.proximal_digest is not None
        }
        tables = self._tables_of(digests, read_proximal)
        recorded, found = [PROXIMAL_SCHEMA.empty_table()], []
        for member in batch.members:
            # They are of whole groups, and `correction: decoupled` replays only whole ones.
            table = None if member.rows is not None else tables.get(member.proximal_key or "")
            if table is not None:
                recorded.append(table.filter(pc.equal(table["group_id"], member.group_id)))
            found.append(table is not None)
        values = _values(pc.list_flatten(pa.concat_tables(recorded)["logprobs"]))
        present = batch.mask & torch.tensor(found, dtype=torch.bool)[batch.member][:, None]
        if len(values) != int(present.sum()):
            raise ValueError(
                f"{len(values)} log-probs of the storage step were recorded for "
                f"{int(present.sum())} tokens"
            )
        return torch.full(batch.mask.shape, torch.nan).masked_scatter_(present, values)


def read_pixels(
    images: Sequence[Sequence[str]], vision: VisionProcessor | None, open_image: OpenImage
) -> list[Pixels | None]:
    """Returns the pixel values of each member's images; an empty list if no member has any.

    images: digests of each member's images. Raises `BapoError` for images without a processor.
    """
    if not any(images):
        return []
    if vision is None:
        raise BapoError("the batch has prompts with images, but the model reads none")
    return [
        vision.pixels([open_image(digest) for digest in digests]) if digests else None
        for digests in images
    ]


def split_by_group(batch: Batch, values: Tensor) -> list[list[list[float]]]:
    """Returns the valid entries of `values` (N, R): for each member, a list for each response."""
    members: list[list[list[float]]] = [[] for _ in batch.members]
    for row, index in enumerate(batch.member.tolist()):
        members[index].append(values[row][batch.mask[row]].tolist())
    return members


def split_groups(members: Sequence[ManifestMember]) -> list[list[ManifestMember]]:
    """Returns the members of each group of a batch, whose responses are compared."""
    groups: list[list[ManifestMember]] = []
    for member in members:
        if not member.joins_previous:
            groups.append([])
        groups[-1].append(member)
    return groups


@dataclass(frozen=True, slots=True)
class Plan:
    """Which groups of a batch make an update together, and which rank takes which of them.

    With several passes a group is in several updates, always of the same rank.
    """

    updates: list[list[list[int]]]
    """For each update, for each rank: indexes of groups in the batch (`split_groups`)."""

    def of_rank(self, rank: int) -> list[int]:
        """Returns the indexes of all groups of a rank, in order, which are the rank's own batch."""
        return sorted({position for update in self.updates for position in update[rank]})


def make_plan(
    config: RunConfig, step: int, members: Sequence[ManifestMember], *, ranks: int, width: int
) -> Plan:
    """Draws updates of whole groups by (seed, step), and balances each over the ranks by cost.

    Passes after the first (`optimizer.epochs`) draw updates anew, by (seed, step, pass). Their
    groups stay with their ranks, which have read and scored them, so those updates are not
    balanced.

    width: size of the model's hidden states.
    """
    updates = []
    groups = split_groups(members)
    for update in _draw_minibatches(config, len(groups), "minibatch", step):
        costs = [
            sum(member_cost(member, width) for member in groups[position]) for position in update
        ]
        updates.append(
            [
                sorted(update[index] for index in indexes)
                for indexes in balance_by_cost(costs, ranks)
            ]
        )
    by_rank = [
        {position for update in updates for position in update[rank]} for rank in range(ranks)
    ]
    for epoch in range(2, config.optimizer.epochs + 1):
        for update in _draw_minibatches(config, len(groups), "epoch", step, epoch):
            updates.append([sorted(positions.intersection(update)) for positions in by_rank])
    return Plan(updates)


def _draw_minibatches(config: RunConfig, count: int, *purpose: str | int) -> list[list[int]]:
    """Shuffles `count` positions by (seed, purpose), and splits them into minibatches."""
    order = list(range(count))
    derive_rng(config.seed, *purpose).shuffle(order)
    size = config.optimizer.minibatch_prompts
    return [order[start : start + size] for start in range(0, count, size)]


def member_cost(member: ManifestMember, width: int) -> float:
    """Returns the relative FLOPs of a pass over the responses of a member.

    A token costs 24 width^2 a layer in linear layers, and 2 width x length in causal attention.
    Prompt tokens are left out, and responses count as equally long.
    """
    length = member.tokens / member.size
    return member.response_count * length * (1 + length / (12 * width))


@dataclass(frozen=True, slots=True)
class Packed:
    """Sequences one after another without padding: T tokens, of which K are of responses.

    The tokens of a prompt are there once, however many responses follow it.
    """

    tokens: Tensor
    """(1, T)"""
    position_ids: Tensor
    """(1, T), from 0 on in each sequence."""
    sequences: Sequences
    logit_positions: Tensor
    """(K,) index into the T tokens of the token that each response token is predicted from."""
    response_positions: Tensor
    """(K,) index into the T tokens of each response token."""
    target_ids: Tensor
    """(K,) ids of the response tokens."""
    pixels: Sequence[Pixels] = ()
    """The images of each prompt that has any, in the order of the T tokens."""
    images: Sequence[int | None] = ()
    """For each sequence, the index in `pixels` of its prompt's images, None without any; empty if
    no sequence has images."""

    def to(self, device: torch.device) -> Packed:
        """Returns a copy on `device`, with one transfer for all but the images."""
        names = ("tokens", "position_ids", "logit_positions", "response_positions", "target_ids")
        own, bounds = [getattr(self, name) for name in names], self.sequences.tensors()
        moved = send([*own, *bounds.values()], device)
        fields: dict[str, Any] = dict(zip(names, moved, strict=False))
        of_bounds: dict[str, Any] = dict(zip(bounds, moved[len(names) :], strict=True))
        return replace(
            self,
            **fields,
            sequences=replace(self.sequences, **of_bounds),
            pixels=[pixels.to(device) for pixels in self.pixels],
        )


PADDING = Packed(
    tokens=torch.zeros(1, 2, dtype=torch.long),
    position_ids=torch.arange(2)[None],
    sequences=Sequences.of(torch.tensor([2])),
    logit_positions=torch.zeros(1, dtype=torch.long),
    response_positions=torch.ones(1, dtype=torch.long),
    target_ids=torch.zeros(1, dtype=torch.long),
)
"""A sequence with one response token, for a rank that has no micro-batch left while others do."""


def pack(batch: Batch, rows: Tensor) -> Packed:
    """Packs these rows; response tokens are in the order of `batch.mask[rows]`.

    The responses of a member share their prompt's tokens and images.
    """
    prompt_lengths = batch.prompt_lengths[rows]
    sequences = Sequences.of(batch.lengths[rows])
    sequences = sequences.share_prompts(prompt_lengths, batch.member[rows])
    tokens = batch.tokens[rows[sequences.sequence_ids], sequences.position_ids]
    response, column = torch.nonzero(batch.mask[rows], as_tuple=True)
    response_starts = sequences.cu_seqlens[:-1].long() + prompt_lengths
    response_tokens = response_starts[response] + column
    pixels, images = _pack_pixels(batch, rows)
    return Packed(
        tokens=sequences.keep(tokens)[None],
        position_ids=sequences.keep(sequences.position_ids)[None],
        sequences=sequences,
        logit_positions=sequences.packed_indices(response_tokens - 1),
        response_positions=sequences.packed_indices(response_tokens),
        target_ids=tokens[response_tokens],
        pixels=pixels,
        images=images,
    )


def _pack_pixels(batch: Batch, rows: Tensor) -> tuple[list[Pixels], list[int | None]]:
    """Returns the images of the prompts of these rows, and the index of those of each row."""
    if not batch.pixels:
        return [], []
    members = batch.member[rows].tolist()
    present: list[Pixels] = []
    indexes: dict[int, int | None] = {}
    for member in dict.fromkeys(members):
        pixels = batch.pixels[member]
        indexes[member] = None if pixels is None else len(present)
        if pixels is not None:
            present.append(pixels)
    return present, [indexes[member] for member in members] if present else []


SHARED_COST = 0.25
"""Memory of a prompt token that another response has computed, relative to that of a token: only
its query, key, value and attention output are stored again."""


def microbatches(
    batch: Batch, rows: Tensor, token_budget: int, *, padded: bool = False
) -> list[Tensor]:
    """Splits `rows` into micro-batches of at most `token_budget` tokens.

    The responses of a member follow one another, and count its prompt once, and `SHARED_COST` of it
    for each further response. Members whose longest rows are of similar length follow one another.

    padded: whether the model computes every row as a whole, padded to the longest of its
        micro-batch. The tokens of all rows then count, with the padding.

    Raises `BapoError` for a row that is longer by itself.
    """
    members, lengths, prompts = (
        values[rows].tolist() for values in (batch.member, batch.lengths, batch.prompt_lengths)
    )
    longest: dict[int, int] = {}
    for member, length in zip(members, lengths, strict=True):
        longest[member] = max(length, longest.get(member, 0))
    order = sorted(range(len(rows)), key=lambda i: (longest[members[i]], members[i], lengths[i]))
    micro_batches: list[list[int]] = []
    room, last, widest = 0.0, -1, 0
    for index in order:
        member, length, prompt = members[index], lengths[index], prompts[index]
        if length > token_budget:
            raise BapoError(
                f"a sequence of {length} tokens does not fit optimizer.microbatch_tokens "
                f"({token_budget}); raise it, or lower rollout.max_response_tokens"
            )
        cost = length if member != last else length - (1 - SHARED_COST) * prompt
        if padded and micro_batches:
            wider = max(length, widest)
            cost = wider + len(micro_batches[-1]) * (wider - widest)
        if cost > room:
            micro_batches.append([])
            room, cost, widest = token_budget, length, 0
        micro_batches[-1].append(int(rows[index]))
        room, last, widest = room - cost, member, max(length, widest)
    return [torch.tensor(micro_batch) for micro_batch in micro_batches]
