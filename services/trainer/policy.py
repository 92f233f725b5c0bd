"""The model being trained: log-probs of responses, and its directory on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from services.common.errors import BapoError
from services.trainer.data import Batch


def load_model(directory: Path) -> nn.Module:
    """The causal language model in a Hugging Face directory, in fp32."""
    if not (directory / "config.json").is_file():
        raise BapoError(
            f"{directory} is not a model directory: it has no config.json; set model.path to a "
            "Hugging Face directory, or to `tiny`"
        )
    try:
        model: nn.Module = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="sdpa"
        )
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise BapoError(f"{directory}: the model cannot be loaded: {reason}") from error
    return model.eval()


def response_logprobs(
    model: nn.Module, batch: Batch, rows: Tensor, temperature: float, *, entropy: bool = False
) -> tuple[Tensor, Tensor]:
    """(log-probs, entropies) of the response tokens of `rows`, each (len(rows), R), 0 if masked.

    The distribution is softmax(logits / temperature), as the engine samples it. Only positions
    that predict a response token reach the output layer. Entropies are 0 unless asked for.
    """
    width = int(batch.lengths[rows].max())
    tokens = batch.tokens[rows, :width]
    mask = batch.mask[rows]
    hidden = _hidden_states(model, tokens)
    # Response token r of a row stands at prompt_length + r, and is predicted one before.
    row, column = torch.nonzero(mask, as_tuple=True)
    predicted_at = batch.prompt_lengths[rows][row] + column - 1
    logits = _output_layer(model)(hidden[row, predicted_at]).float() / temperature
    log_distribution = torch.log_softmax(logits, dim=-1)
    targets = tokens[row, predicted_at + 1]
    logprobs = log_distribution.gather(1, targets[:, None]).squeeze(1)
    result = torch.zeros(mask.shape, dtype=logprobs.dtype).index_put((row, column), logprobs)
    entropies = torch.zeros(mask.shape, dtype=logprobs.dtype)
    if entropy:
        of_tokens = -(log_distribution.exp() * log_distribution).sum(dim=-1)
        entropies = entropies.index_put((row, column), of_tokens)
    return result, entropies


def _hidden_states(model: nn.Module, tokens: Tensor) -> Tensor:
    """(N, L, H). Padding is on the right, so causal attention alone keeps it out."""
    hf_model: Any = model
    hidden: Tensor = hf_model.base_model(
        input_ids=tokens, attention_mask=None, use_cache=False
    ).last_hidden_state
    return hidden


def _output_layer(model: nn.Module) -> nn.Module:
    hf_model: Any = model
    layer: nn.Module = hf_model.get_output_embeddings()
    return layer
