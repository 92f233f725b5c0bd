"""The policy: a causal language model that computes the log-probs of responses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from bapo_core.config.training import OptimizerConfig
from services.trainer.attention_kernels import Needs
from services.trainer.data import Batch, Packed
from services.trainer.families import device_of, logit_cap, logit_factor
from services.trainer.hidden_states import packs, target_hidden_states
from services.trainer.logprobs import token_logprobs
from services.trainer.micro_batches import MicroBatch


class Policy(nn.Module):
    """A causal language model that scores packed sequences without holding all logits at a time."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.attention_kinds: frozenset[Needs] = frozenset()
        """Kinds of packed attention that the model has, as far as they have been observed."""

    @property
    def device(self) -> torch.device:
        """The device that computes."""
        return device_of(self)

    @property
    def packs(self) -> bool:
        """Whether sequences are computed without padding."""
        return packs(self.model)

    @property
    def width(self) -> int:
        """Size of the hidden states."""
        hf_model: Any = self.model
        return int(hf_model.config.get_text_config().hidden_size)

    def forward(
        self, packed: Packed, temperature: float, entropy: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Returns (log-probs, entropies) in nats, each (K,), of the K response tokens of `packed`.

        The distribution is softmax(logits / temperature), which the engine samples from. Entropies
        are 0 unless asked for. Memory: besides the activations, (K, width) hidden states and a few
        tiles of logits (`logprobs`).
        """
        hf_model: Any = self.model
        head = hf_model.get_output_embeddings()
        return token_logprobs(
            target_hidden_states(hf_model, packed),
            head.weight,
            packed.target_ids,
            # softmax(capped(factor x logits) / temperature)
            temperature=temperature / logit_factor(hf_model.config),
            cap=None if (cap := logit_cap(hf_model.config)) is None else cap / temperature,
            bias=head.bias,
            entropy=entropy,
        )


def response_logprobs(
    policy: Policy, batch: Batch, rows: Tensor, temperature: float, *, entropy: bool = False
) -> tuple[Tensor, Tensor]:
    """Returns (log-probs, entropies) of the tokens of `rows`, (len(rows), R) each; 0 if masked.

    They are on the CPU, and gradients flow.
    """
    micro_batch = MicroBatch.of(batch, rows, policy.device)
    logprobs, entropies = policy(micro_batch.packed, temperature, entropy)
    return micro_batch.grid.spread(logprobs).cpu(), micro_batch.grid.spread(entropies).cpu()


def make_optimizer(module: nn.Module, learning_rate: float, settings: OptimizerConfig) -> AdamW:
    """Builds AdamW for the parameters of `module` that are not frozen, with moments of 0.

    AdamW itself makes its moments in its first step. A checkpoint before that step would make them
    by a step with a learning rate of 0, which counts in the correction of their bias, so that the
    weights would depend on when checkpoints are stored.
    """
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = AdamW(
        parameters,
        lr=learning_rate,
        betas=(settings.beta1, settings.beta2),
        weight_decay=settings.weight_decay,
        fused=True,
    )
    for parameter in parameters:
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return optimizer
