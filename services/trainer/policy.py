"""The model being trained: its directory on disk, and log-probs of responses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from bapo_core.errors import BapoError
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
        """Where it computes."""
        return device_of(self)

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
        head = hf_model.get_output_embeddings()
        return token_logprobs(
            states_before(hf_model, packed),
            head.weight,
            packed.targets,
            temperature=temperature,
            bias=head.bias,
            entropy=entropy,
        )


def device_of(module: nn.Module) -> torch.device:
    """Where `module` computes; what is sharded may wait elsewhere."""
    parameter = next(module.parameters())
    if isinstance(parameter, DTensor) and parameter.device_mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return parameter.device


def states_before(model: Any, packed: Packed) -> Tensor:
    """(K, width): the hidden states that each response token of `packed` is predicted from."""
    hidden: Tensor = model.base_model(
        input_ids=packed.tokens,
        position_ids=packed.positions,
        attention_mask=None,
        use_cache=False,
        sequences=packed.sequences,
    ).last_hidden_state[0]
    return hidden[packed.predicted_at]


def load_policy(directory: Path) -> Policy:
    """The causal language model in a Hugging Face directory, in fp32."""
    with _explained(directory):
        model: Any = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation=attention.IMPLEMENTATION
        )
    return _scoring(model, directory)


def empty_policy(directory: Path) -> Policy:
    """The same with no weights yet: memory that nobody has touched costs nothing."""
    with _explained(directory):
        config = AutoConfig.from_pretrained(directory)
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                config, dtype=torch.float32, attn_implementation=attention.IMPLEMENTATION
            )
    model.to_empty(device="cpu")
    model.tie_weights()
    return _scoring(model, directory)


@contextmanager
def _explained(directory: Path) -> Iterator[None]:
    """What is wrong with a model directory, in one line."""
    if not (directory / "config.json").is_file():
        raise BapoError(
            f"{directory} is not a model directory: it has no config.json; set model.path to a "
            "Hugging Face directory, or to `tiny`"
        )
    try:
        yield
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise BapoError(f"{directory}: the model cannot be loaded: {reason}") from error


def _scoring(model: Any, directory: Path) -> Policy:
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
