"""Statistics of a whole update, over all ranks, that an objective takes before it is trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bapo_core.objectives import Tokens
from bapo_core.seeding import derive_seed
from services.trainer.data import Batch
from services.trainer.ranks import Ranks
from services.trainer.targets import Targets


@dataclass(frozen=True, slots=True)
class UpdateStatistics:
    """Statistics of an update, which its micro-batches share."""

    values: dict[str, float]
    """The objective's numbers, which are metrics as well."""
    pre_update_logprobs: Tensor | None = None
    """(N, R) log-probs just before the update, from which the numbers were computed."""
    uniforms: Tensor | None = None
    """(N, R) uniform random numbers of the tokens."""


NO_STATISTICS = UpdateStatistics({})
"""The statistics of an objective that needs none."""


def tokens_of(
    targets: Targets,
    logprobs: Tensor,
    *,
    pre_update_logprobs: Tensor | None = None,
    uniforms: Tensor | None = None,
) -> Tokens:
    """Returns the arguments of an objective for the rows of `targets`, whose log-probs are given.

    All tensors are (n, R), on one device.
    """
    return Tokens(
        logprobs=logprobs,
        proximal_logprobs=targets.proximal_logprobs,
        advantages=targets.advantages,
        mask=targets.mask,
        weights=targets.weights,
        clip_center=targets.clip_center,
        pre_update_logprobs=pre_update_logprobs,
        uniforms=uniforms,
    )


def gather_tokens(tokens: Tokens, ranks: Ranks) -> Tokens:
    """Returns the valid tokens of all ranks, (T,), on every rank.

    Every rank then computes the same numbers, which may be sums or quantiles. A token takes 16 to
    24 bytes, which is little beside its logits.
    """
    names = (
        "pre_update_logprobs",
        "proximal_logprobs",
        "advantages",
        "weights",
        "clip_center",
        "uniforms",
    )
    columns: dict[str, Tensor] = {
        name: values[tokens.valid]
        for name in names
        if (values := getattr(tokens, name)) is not None
    }
    gathered = ranks.all_gather(torch.stack(list(columns.values())))
    if gathered.shape[1] == 0:
        # All responses were cut off (`loss.mask_truncated`), so no token has a loss. One without
        # advantage stands in, because means and quantiles of no token do not exist.
        gathered = torch.zeros(len(columns), 1)
    of_all = dict(zip(columns, gathered, strict=True))
    scored = of_all["pre_update_logprobs"]
    return Tokens(logprobs=scored, mask=torch.ones_like(scored, dtype=torch.bool), **of_all)


def draw_tokens(batch: Batch, positions: Sequence[int], seed: int, *update: int) -> Tensor:
    """Draws uniform random numbers (N, R) by (seed, update) and a response's place in the manifest.

    They depend neither on the ranks nor on the lengths of other responses. positions: places of the
    batch's groups among those of the manifest.
    """
    uniforms = torch.zeros_like(batch.behavior_logprobs)
    sizes = batch.sizes
    firsts = (sizes.cumsum(0) - sizes).tolist()
    for row, (group, length) in enumerate(
        zip(batch.group.tolist(), batch.mask.sum(dim=1).tolist(), strict=True)
    ):
        purpose = ("tokens", *update, positions[group], row - firsts[group])
        generator = torch.Generator().manual_seed(derive_seed(seed, *purpose))
        uniforms[row, :length] = torch.rand(length, generator=generator)
    return uniforms
