"""Samples tokens by inversion of the distribution function, with exact log-probs."""

from __future__ import annotations

import torch
from torch import Tensor


def sample_tokens(
    logits: Tensor, uniforms: Tensor, *, temperature: float, top_p: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Returns (tokens, log-probs), each (rows,), for logits (rows, V) and uniforms (rows,)."""
    logprobs = torch.log_softmax(logits.float() / temperature, dim=-1)
    if top_p < 1:
        logprobs = _truncate(logprobs, top_p)
    # Double precision keeps small probabilities exact when a large vocabulary is summed.
    cumulative = logprobs.double().exp().cumsum(dim=-1)
    total = cumulative[:, -1:]
    # Strictly below the total, even when the product rounds up to it: some token then exceeds it.
    thresholds = torch.minimum(uniforms[:, None] * total, total.nextafter(torch.zeros_like(total)))
    # The first token whose cumulative probability exceeds the threshold has a positive probability.
    # The clamp is for outputs that are not finite, which are refused at the end.
    tokens = torch.searchsorted(cumulative, thresholds, right=True).clamp(max=logits.shape[-1] - 1)
    # On a CPU, the float32 sum of `log_softmax` is 1.5e-5 too small for 49,152 tokens, and every
    # log-prob as much too large. `total`, which would be 1, has the same error.
    normalised = logprobs.gather(1, tokens).double() - total.log()
    return tokens[:, 0], normalised[:, 0].float()


def _truncate(logprobs: Tensor, top_p: float) -> Tensor:
    """Returns the log-probs (rows, V) of the nucleus, renormalised; -inf outside of it.

    The nucleus is the smallest set of the most probable tokens whose probability reaches `top_p`.
    """
    ordered, tokens = logprobs.sort(dim=-1, descending=True, stable=True)
    probabilities = ordered.double().exp()
    before = probabilities.cumsum(dim=-1) - probabilities
    kept = torch.empty_like(tokens, dtype=torch.bool).scatter_(-1, tokens, before < top_p)
    return torch.log_softmax(logprobs.masked_fill(~kept, -torch.inf), dim=-1)


def draw_uniforms(seed: int, group_size: int, length: int) -> Tensor:
    """Returns (length, G) uniforms in [0, 1) that depend on the seed alone.

    A larger `length` only appends rows.
    """
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(length, group_size, generator=generator, dtype=torch.float64)
