"""Predicts how much memory of a GPU training takes, and fits what may be fitted to it.

The prediction is for one rank of n that shard the model (FSDP2, weights in fp32 computed in bf16):

    sharded     16 bytes a trained weight (weight, gradient, two moments of AdamW), and 4 a frozen
                one, or 2 in bf16; a reference model adds 4, a critic as much as the policy, and
                supervised updates 8 a trained weight (their own moments). All / n
    unsharded   2 bytes a weight of the root and of two layers, and 6 more a trained one of the root
                (gradients in bf16 and in fp32, until they are reduced)
    activations of T tokens: the input of each layer, 2 x width x layers, under `full`, or else all
                that its backward pass needs, 2 x `layer_elements` x layers
    working     1.5 times the activations of one layer, for its backward pass
    log-probs   4 x width x T for gradients of hidden states, one tile of logits, and the gradient
                of the output layer

`benchmarks.gpu` compares it with what the allocator has reserved: 0.92 to 0.99 of it on an H100,
before log-probs were fused. `MARGIN` covers that, and fragments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from bapo_core.config import RunConfig
from services.trainer.logprobs import GPU_TILE

Mode = Literal["none", "selective", "full"]
MARGIN = 1.12
"""Memory that must be there for each byte that is predicted."""
TRAINED, FROZEN, FROZEN_HALF = 16, 4, 2
"""Bytes of a weight with gradient and optimizer state, of a frozen one, and of one in bf16."""
MOMENTS = 8
"""Bytes of the two moments of a trained weight in another AdamW."""
SELECTIVE = 0.6
"""Share of a layer's activations that `selective` keeps: those of matrix products and attention."""


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Sizes of a model, on which the memory of training depends."""

    trained: int
    """Number of weights that are trained."""
    frozen: int
    frozen_bytes: int
    """Bytes of a frozen weight."""
    largest_layer: int
    """Weights of the largest layer."""
    root: int
    """Weights outside of the layers: embeddings and output layer."""
    root_trained: int
    layers: int
    width: int
    vocabulary: int
    layer_elements: int
    """Activations of a token in a layer, in elements of 2 bytes."""

    @classmethod
    def of(cls, model: Any, layers: list[nn.Module], *, half_frozen: bool) -> ModelSize:
        """Returns the sizes of a causal language model of transformers, whose layers are given."""
        text = model.config.get_text_config()
        sizes = [sum(p.numel() for p in layer.parameters()) for layer in layers]
        everything = list(model.parameters())
        in_layers = {id(p) for layer in layers for p in layer.parameters()}
        root = [p for p in everything if id(p) not in in_layers]
        trained = sum(p.numel() for p in everything if p.requires_grad)
        return cls(
            trained=trained,
            frozen=sum(p.numel() for p in everything) - trained,
            frozen_bytes=FROZEN_HALF if half_frozen else FROZEN,
            largest_layer=max(sizes, default=0),
            root=sum(p.numel() for p in root),
            root_trained=sum(p.numel() for p in root if p.requires_grad),
            layers=len(layers),
            width=text.hidden_size,
            vocabulary=text.vocab_size,
            layer_elements=layer_elements(text),
        )


def layer_elements(text: Any) -> int:
    """Returns how many elements of 2 bytes a layer keeps of a token for its backward pass.

    By counting what the layers of Llama and Qwen save: 4 x width around each norm (its input in
    fp32, its output and the input of the products), 5 for each element of queries and of keys (norm
    and rotary embedding in fp32, attention), 4 for each of the gated layer.
    """
    heads = text.num_attention_heads
    key_heads = getattr(text, "num_key_value_heads", None) or heads
    head = getattr(text, "head_dim", None) or text.hidden_size // heads
    inner = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    experts = getattr(text, "num_experts_per_tok", None)
    if experts:
        inner = experts * (getattr(text, "moe_intermediate_size", None) or inner)
    return int(8 * text.hidden_size + 5 * head * (heads + key_heads) + 4 * inner)


def predict_bytes(
    size: ModelSize,
    tokens: int,
    mode: Mode,
    *,
    ranks: int = 1,
    reference: bool = False,
    critic: bool = False,
    supervised: bool = False,
    offload: bool = False,
) -> float:
    """Returns the bytes at the peak of a step with micro-batches of `tokens` tokens.

    supervised: whether supervised updates have an AdamW of their own. offload: whether everything
    that is sharded stays in the CPU's memory (`trainer.offload`).
    """
    model = TRAINED * size.trained + size.frozen_bytes * size.frozen
    model += MOMENTS * size.trained * supervised
    weights = size.trained + size.frozen
    sharded = (model + 4 * weights * reference + TRAINED * weights * critic) / ranks
    if offload:
        sharded = 0.0
    unsharded = 2 * (size.root + 2 * size.largest_layer) + 6 * size.root_trained
    of_layer = 2 * size.layer_elements * tokens
    inputs = 2 * size.width * size.layers * tokens
    kept = {
        "none": size.layers * of_layer,
        "selective": inputs + SELECTIVE * size.layers * of_layer,
        "full": inputs,
    }[mode]
    head = 2 * size.vocabulary * size.width if size.root_trained else 0
    logprobs = 4 * size.width * tokens + 2 * GPU_TILE * min(GPU_TILE, tokens) + head
    return sharded + unsharded + kept + 1.5 * of_layer + logprobs


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """How a step is computed so that it fits the memory of the device."""

    checkpointing: Mode
    microbatch_tokens: int
    """Most tokens in a micro-batch, at most `optimizer.microbatch_tokens`."""
    predicted: float | None = None
    """Predicted bytes; None where nothing is predicted, as on a CPU."""
    available: float | None = None
    """Bytes of the device that were free."""

    def __str__(self) -> str:
        text = f"gradient_checkpointing {self.checkpointing}, "
        text += f"micro-batches of at most {self.microbatch_tokens:,} tokens"
        if self.predicted is None or self.available is None:
            return text
        gib = 1 << 30
        return f"{text}: {self.predicted / gib:.1f} of {self.available / gib:.1f} GiB predicted"


def longest_sequence(config: RunConfig) -> int:
    """Returns the tokens of the longest prompt with the longest response."""
    return config.rollout.max_prompt_tokens + config.rollout.max_response_tokens


def plan_memory(
    config: RunConfig, size: ModelSize | None, *, ranks: int = 1, available: float | None = None
) -> MemoryPlan:
    """Returns how a step fits into `available` bytes of a GPU; None is a CPU, which fits all.

    Under `gradient_checkpointing: auto` the activations are kept if that fits, and recomputed
    otherwise. Micro-batches that do not fit even so are smaller, down to the longest sequence.
    size: None for a model whose layers are unknown.
    """
    chosen = config.trainer.gradient_checkpointing
    budget = config.optimizer.microbatch_tokens
    if available is None or size is None:
        return MemoryPlan("none" if chosen == "auto" else chosen, budget)

    def predict(tokens: int, mode: Mode) -> float:
        return predict_bytes(
            size,
            tokens,
            mode,
            ranks=ranks,
            reference=config.kl.coefficient > 0 and config.kl.reference == "initial",
            critic=config.advantage.estimator == "gae",
            supervised=config.demonstrations.supervise_every > 0,
            offload=config.trainer.offload,
        )

    room = available / MARGIN
    mode: Mode
    if chosen != "auto":
        mode = chosen
    else:
        mode = "none" if predict(budget, "none") <= room else "full"
    # The prediction grows with the tokens: the most tokens that fit are found by bisection.
    tokens, low = budget, longest_sequence(config)
    if predict(budget, mode) > room:
        high = budget
        while low + 1 < high:
            middle = (low + high) // 2
            low, high = (middle, high) if predict(middle, mode) <= room else (low, middle)
        tokens = low
    return MemoryPlan(mode, tokens, predict(tokens, mode), available)


def free_bytes(engine_share: float = 0.0) -> float | None:
    """Returns how much memory of this rank's GPU the trainer may take; None without a GPU.

    engine_share: share of the GPU that an engine is going to take, which is not there yet.
    """
    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info()
    return max(float(free) - engine_share * total, 0.0)


def out_of_memory_remedy(config: RunConfig, plan: MemoryPlan) -> str:
    """Returns what to change after the memory was exhausted, of what has not been done yet."""
    remedies = []
    if plan.checkpointing != "full":
        remedies.append("set trainer.gradient_checkpointing=full")
    if not config.trainer.offload and plan.available is not None:
        remedies.append("set trainer.offload=true")
    remedies.append("train with more processes (trainer.processes)")
    text = ", or ".join(remedies) + ", then resume"
    longest = longest_sequence(config)
    if plan.microbatch_tokens > longest:
        text += f"; a new run may also have optimizer.microbatch_tokens={longest}, one sequence"
    else:
        text += "; a new run may also have a lower rollout.max_response_tokens"
    return text
