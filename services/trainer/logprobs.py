"""Log-probs and entropies of tokens without the (tokens x vocabulary) matrix.

Neither forward nor backward holds more of it than a chunk of tokens: the forward pass keeps one
normaliser a token, and the backward pass makes the logits of a chunk again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

LOGITS_AT_ONCE = 1 << 25
"""Elements of a chunk of the matrix: 128 MiB in fp32, of which two or three are held."""


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    entropy: bool = False,
    logits_at_once: int = LOGITS_AT_ONCE,
) -> tuple[Tensor, Tensor]:
    """(log-probs, entropies) in nats, each (T,), of `targets` under softmax(logits / temperature).

    hidden: (T, H); weight: (V, H) and bias: (V,) of the output layer; targets: (T,). Computed and
    returned in fp32, or fp64 for hidden states of that. Entropies are 0 unless asked for.
    Gradients are exact and flow to hidden states, weight and bias.
    """
    chunk = max(1, logits_at_once // weight.shape[0])
    found: tuple[Tensor, Tensor] = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, targets, temperature, entropy, chunk
    )
    return found


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        entropy: bool,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        precise = torch.promote_types(hidden.dtype, torch.float32)
        logprobs = hidden.new_empty(len(hidden), dtype=precise)
        normalisers = torch.empty_like(logprobs)
        entropies = torch.zeros_like(logprobs)
        for part in _chunks(len(hidden), chunk):
            logits = linear(hidden[part], weight, bias).to(precise).div_(temperature)
            normaliser = logits.logsumexp(dim=-1)
            normalisers[part] = normaliser
            chosen = logits.gather(1, targets[part, None]).squeeze(1)
            logprobs[part] = chosen - normaliser
            if entropy:
                distribution = (logits - normaliser[:, None]).exp_()
                entropies[part] = normaliser - torch.linalg.vecdot(distribution, logits)
        ctx.save_for_backward(hidden, weight, bias, targets, normalisers, entropies)
        ctx.temperature, ctx.entropy, ctx.chunk = temperature, entropy, chunk
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        of_logprobs, of_entropies = gradients
        hidden, weight, bias, targets, normalisers, entropies = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        precise = normalisers.dtype
        to_hidden = torch.empty_like(hidden) if wants_hidden else None
        to_weight = torch.zeros_like(weight, dtype=precise) if wants_weight else None
        to_bias = torch.zeros_like(bias, dtype=precise) if wants_bias else None
        for part in _chunks(len(hidden), ctx.chunk):
            logits = linear(hidden[part], weight, bias).to(precise).div_(ctx.temperature)
            log_distribution = logits.sub_(normalisers[part, None])
            distribution = log_distribution.exp()
            # d log p(y) / d logits = onehot(y) - p;  d H / d logits = -p (log p + H)
            if ctx.entropy:
                factor = log_distribution.add_(entropies[part, None])
                factor.mul_(of_entropies[part, None]).add_(of_logprobs[part, None])
                to_logits = distribution.mul_(factor).neg_()
            else:
                to_logits = distribution.mul_(of_logprobs[part, None]).neg_()
            to_logits.scatter_add_(1, targets[part, None], of_logprobs[part, None])
            to_logits.div_(ctx.temperature)
            if to_bias is not None:
                to_bias += to_logits.sum(dim=0)
            to_logits = to_logits.to(hidden.dtype)
            if to_hidden is not None:
                to_hidden[part] = to_logits @ weight
            if to_weight is not None:
                _add_product(to_weight, to_logits.t(), hidden[part])
        return (
            to_hidden,
            None if to_weight is None else to_weight.to(weight.dtype),
            None if to_bias is None else to_bias.to(bias.dtype),
            *(None,) * 4,
        )


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, added up in the precision of `total`."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


def _chunks(tokens: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)]
