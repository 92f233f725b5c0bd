"""The model being trained: its directory on disk, and log-probs of responses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from services.common.errors import BapoError
from services.trainer import attention
from services.trainer.data import Batch, Packed, pack
from services.trainer.logprobs import token_logprobs

_CHANGED_LOGITS = ("final_logit_softcapping", "logits_scaling", "logit_scale")
"""What some models do to their logits after the output layer."""


class Policy(nn.Module):
    """A causal language model that scores packed sequences: never all logits at a time."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def width(self) -> int:
        """Of its hidden states."""
        hf_model: Any = self.model
        return int(hf_model.config.get_text_config().hidden_size)

    def forward(
        self, packed: Packed, temperature: float, entropy: bool = False
    ) -> tuple[Tensor, Tensor]:
        """(log-probs, entropies), each (K,), of the K response tokens of `packed`.

        The distribution is softmax(logits / temperature), as the engine samples it. Entropies are
        0 unless asked for.
        """
        hf_model: Any = self.model
        hidden = hf_model.base_model(
            input_ids=packed.tokens,
            position_ids=packed.positions,
            attention_mask=None,
            use_cache=False,
            sequences=packed.sequences,
        ).last_hidden_state[0]
        head = hf_model.get_output_embeddings()
        return token_logprobs(
            hidden[packed.predicted_at],
            head.weight,
            packed.targets,
            temperature=temperature,
            bias=head.bias,
            entropy=entropy,
        )


def load_policy(directory: Path) -> Policy:
    """The causal language model in a Hugging Face directory, in fp32."""
    if not (directory / "config.json").is_file():
        raise BapoError(
            f"{directory} is not a model directory: it has no config.json; set model.path to a "
            "Hugging Face directory, or to `tiny`"
        )
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation=attention.IMPLEMENTATION
        )
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise BapoError(f"{directory}: the model cannot be loaded: {reason}") from error
    for name in _CHANGED_LOGITS:
        if getattr(model.config, name, None) not in (None, 1.0):
            raise BapoError(
                f"{directory}: the model changes its logits ({name}), which the trainer's "
                "log-probs do not; choose another model"
            )
    return Policy(model).eval()


def response_logprobs(
    policy: Policy, batch: Batch, rows: Tensor, temperature: float, *, entropy: bool = False
) -> tuple[Tensor, Tensor]:
    """(log-probs, entropies) of the response tokens of `rows`, each (len(rows), R), 0 if masked."""
    found = policy(pack(batch, rows).to(policy.device), temperature, entropy)
    mask = batch.mask[rows]
    logprobs, entropies = (
        torch.zeros(mask.shape).masked_scatter(mask, each.cpu()) for each in found
    )
    return logprobs, entropies
