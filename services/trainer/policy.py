"""The policy: loads a causal language model, and computes the log-probs of responses."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import AdamW
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from bapo_core.config import OptimizerConfig
from bapo_core.errors import BapoError
from services.buffer.api.trajectories import TrajectoryGroup, TrajectoryResponse, table_of
from services.common.errors import first_line
from services.common.logs import hide_progress_bars
from services.model.conversation import load_tokenizer
from services.model.layers import has_recurrent_layers
from services.model.vision import (
    ARCHITECTURES,
    IN_WINDOWS,
    ON_A_GRID,
    SUBSTITUTE,
    Pixels,
    VisionProcessor,
    fed_tokens,
    number_images,
    reads_images,
    rope_positions,
    token_types,
    vision_tower,
)
from services.trainer import attention
from services.trainer.attention_kernels import Needs
from services.trainer.data import Batch, Packed, collate
from services.trainer.logprobs import token_logprobs
from services.trainer.micro_batches import MicroBatch

_LOGIT_DIVISORS = ("logits_scaling",)
_LOGIT_FACTORS = ("logit_scale", "lm_head_multiplier")
"""Configuration keys of numbers by which models divide or multiply the output layer's logits."""
_LOGIT_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
"""Configuration keys of the bound of models that cap their logits softly."""
_BLANK_SIZE = (224, 224)
"""Height and width of blank images, in pixels."""
_WINDOW_IN_MASK = ("phimoe",)
"""Types of models that apply their sliding window through the mask alone."""
_NO_BOUNDS = ("nemotron",)
"""Types of models that pass nothing on to their attention, such as the bounds of sequences."""
_SAME = 1e-3
"""Largest difference between equal values, as a share of the largest one."""


def plain_name(name: str) -> str:
    """Returns a parameter's name without the wrappers of gradient checkpointing."""
    return name.replace("_checkpoint_wrapped_module.", "")


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


def logit_factor(config: Any) -> float:
    """Returns the number by which a model multiplies the logits of its output layer."""
    text = config.get_text_config()
    factor = 1.0
    for name in _LOGIT_FACTORS:
        factor *= getattr(text, name, None) or 1.0
    for name in _LOGIT_DIVISORS:
        factor /= getattr(text, name, None) or 1.0
    return factor


def logit_cap(config: Any) -> float | None:
    """Returns the bound c if a model replaces its logits l by c tanh(l / c), and otherwise None."""
    text = config.get_text_config()
    caps = (getattr(text, name, None) for name in _LOGIT_CAPS)
    return next((float(cap) for cap in caps if cap is not None), None)


def device_of(module: nn.Module) -> torch.device:
    """Returns the device that `module` computes on; offloaded shards are on the CPU meanwhile."""
    parameter = next(module.parameters())
    if isinstance(parameter, DTensor) and parameter.device_mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return parameter.device


def target_hidden_states(model: Any, packed: Packed) -> Tensor:
    """Returns the hidden states (K, width) from which the response tokens are predicted."""
    tokens, responses = packed.tokens.clone(), packed.response_positions
    tokens[0, responses] = fed_tokens(model, tokens[0, responses])
    # Before the language model, because every rank must gather the layers in the same order.
    idle = None
    if not packed.pixels and _has_sharded_tower(model):
        idle = _idle_tower_output(model)
    compute = _packed_hidden_states if packs(model) else _padded_hidden_states
    hidden = compute(model, packed, tokens)
    if idle is not None:
        hidden = hidden + idle.to(hidden.dtype)
    return hidden[packed.logit_positions]


def base_model_of(model: Any) -> Any:
    """Returns the model without its output layer."""
    # The prefix of Llama 4's language model names none of its parts.
    return model.model if model.base_model is model else model.base_model


def packs(model: Any) -> bool:
    """Returns whether the model computes packed sequences; otherwise they are padded."""
    return bool(model.config.get_text_config()._attn_implementation == attention.IMPLEMENTATION)


def _packed_hidden_states(model: Any, packed: Packed, tokens: Tensor) -> Tensor:
    """Returns the hidden states (T, width) of all packed tokens.

    tokens: (1, T), as they are fed.
    """
    sequences, position_ids, images = packed.sequences, packed.position_ids, {}
    if packed.pixels:
        images = Pixels.join(packed.pixels).inputs_of(model)
        if (numbers := number_images(model, tokens)) is not None:
            in_window = model.config.model_type in IN_WINDOWS
            sequences = replace(sequences, images=numbers[0], images_in_window=in_window)
        if packed.pixels[0].grids is not None:
            position_ids = _multimodal_positions(base_model_of(model), tokens, packed)
    hidden: Tensor = base_model_of(model)(
        input_ids=tokens,
        position_ids=position_ids,
        attention_mask=None,
        use_cache=False,
        sequences=sequences,
        **images,
    ).last_hidden_state[0]
    return hidden


def _padded_hidden_states(model: Any, packed: Packed, tokens: Tensor) -> Tensor:
    """Returns the same as `_packed_hidden_states`, with each sequence computed as a padded row.

    Prompts and their images are computed again for each of their responses.
    """
    sequences = packed.sequences
    rows, lengths = tokens[0][sequences.pad_indices], sequences.cu_seqlens.diff()
    count, width = rows.shape
    images = [packed.pixels[index] for index in packed.images if index is not None]
    blank = _blank_prompt(model) if not images else None
    if blank is not None and _is_sharded(model):
        # The ranks gather the vision tower together: one without images adds a row with one.
        rows, lengths = _append_row(rows, lengths, blank.tokens.to(rows.device))
        images = [blank.pixels.to(rows.device)]
    hidden = _hidden_states_of_rows(model, rows, lengths, images)
    idle = hidden[count:].sum() * 0.0
    return hidden[:count, :width].flatten(0, 1)[sequences.unpad_indices] + idle


def _append_row(rows: Tensor, lengths: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the padded rows (n + 1, L) and their lengths, with `row` as the last one."""
    width = max(rows.shape[1], len(row))
    padded = rows.new_zeros(len(rows) + 1, width)
    padded[:-1, : rows.shape[1]] = rows
    padded[-1, : len(row)] = row
    return padded, torch.cat([lengths, lengths.new_tensor([len(row)])])


def _hidden_states_of_rows(
    model: Any, rows: Tensor, lengths: Tensor, images: Sequence[Pixels]
) -> Tensor:
    """Returns the hidden states (n, L, width) of rows that are padded on the right.

    rows: (n, L). lengths: (n,), without the padding. images: those of each row that has any.
    """
    columns = torch.arange(rows.shape[1], device=rows.device)
    mask = columns < lengths[:, None]
    position_ids, inputs = columns.expand_as(rows), token_types(model, rows)
    if images:
        pixels = Pixels.join(images)
        inputs |= pixels.inputs_of(model)
        if model.config.model_type in ON_A_GRID:
            position_ids, _ = rope_positions(base_model_of(model), rows, mask, pixels.grids)
    hidden: Tensor = base_model_of(model)(
        input_ids=rows,
        position_ids=position_ids,
        attention_mask=mask.long(),
        use_cache=False,
        **inputs,
    ).last_hidden_state
    return hidden


@dataclass(frozen=True)
class BlankPrompt:
    """A black image alone, for a model whose type is not one of `vision.ARCHITECTURES`."""

    tokens: Tensor
    """(T,)"""
    pixels: Pixels

    @classmethod
    def of(cls, directory: Path) -> BlankPrompt:
        """Returns that of the model in `directory`."""
        text, pixels = VisionProcessor.load(directory).blank_image(*_BLANK_SIZE)
        return cls(
            torch.tensor(load_tokenizer(directory).encode(text, add_special_tokens=False)), pixels
        )


def _blank_prompt(model: Any) -> BlankPrompt | None:
    prompt: BlankPrompt | None = getattr(model, "blank_prompt", None)
    return prompt


def _is_sharded(module: nn.Module) -> bool:
    return any(isinstance(submodule, FSDPModule) for submodule in module.modules())


def _has_sharded_tower(model: Any) -> bool:
    """Returns whether a rank without images must compute the vision tower by itself.

    Models with a blank prompt compute it in a row of their own (`_padded_hidden_states`).
    """
    tower = vision_tower(base_model_of(model))
    return tower is not None and _is_sharded(tower) and _blank_prompt(model) is None


def _idle_tower_output(model: Any) -> Tensor:
    """Returns 0, computed by the vision tower.

    The ranks gather the shards of a layer when all of them compute it. So a rank whose sequences
    have no images passes a blank image through the tower, while others pass theirs.
    """
    blank = _blank_image(model.config).to(device_of(model))
    features = base_model_of(model).get_image_features(**blank.inputs_of(model), return_dict=True)
    outputs = [features.pooler_output, getattr(features, "deepstack_features", None) or ()]
    flat = torch.utils._pytree.tree_leaves(outputs)
    return sum((output.sum() for output in flat), torch.zeros((), device=device_of(model))) * 0.0


def _blank_image(config: Any) -> Pixels:
    """Returns the smallest image that the vision tower of a model of this configuration takes.

    Its values are 1, because some towers leave tiles of zeros out, as padding.
    """
    vision = config.vision_config
    if hasattr(vision, "spatial_merge_size"):  # patches on a grid
        side = vision.spatial_merge_size
        patch_size = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        return Pixels(
            {
                "pixel_values": torch.ones(side**2, patch_size),
                "image_grid_thw": torch.tensor([[1, side, side]]),
            }
        )
    if vision.model_type == "gemma4_vision":
        side = vision.pooling_kernel_size
        values = torch.ones(1, side**2, 3 * vision.patch_size**2)
        places = torch.cartesian_prod(torch.arange(side), torch.arange(side))[None]
        return Pixels({"pixel_values": values, "image_position_ids": places})
    if vision.model_type == "pixtral":
        # Of two by two tokens, because Mistral 3 drops the dimension of a single one.
        side = 2 * vision.patch_size * getattr(config, "spatial_merge_size", 1)
        values = torch.ones(1, vision.num_channels, side, side)
        return Pixels({"pixel_values": values, "image_sizes": torch.tensor([[side, side]])})
    size = vision.image_size
    height, width = (size, size) if isinstance(size, int) else size
    tile = torch.ones(1, vision.num_channels, height, width)
    if config.model_type == "llava_next":
        resolution = min(config.image_grid_pinpoints, key=math.prod)
        tiles = 1 + math.prod(resolution) // size**2  # the first one shows the whole image
        values = tile.expand(tiles, -1, -1, -1)[None]
        return Pixels({"pixel_values": values, "image_sizes": torch.tensor([resolution])})
    return Pixels({"pixel_values": tile})


def _multimodal_positions(base_model: Any, tokens: Tensor, packed: Packed) -> Tensor:
    """Returns position ids (3, 1, T) of multimodal rotary embeddings, from 0 in each sequence."""
    lengths = packed.sequences.cu_seqlens.diff().tolist()
    grids = [None if index is None else packed.pixels[index].grids for index in packed.images]
    positions = [
        rope_positions(base_model, sequence, torch.ones_like(sequence), of_prompt)[0]
        for sequence, of_prompt in zip(
            torch.split(packed.sequences.spread(tokens[0])[None], lengths, dim=1),
            grids,
            strict=True,
        )
    ]
    return packed.sequences.keep(torch.cat(positions, dim=2)[:, 0].T).T[:, None]


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


def freeze_vision(model: Any) -> None:
    """Freezes the vision tower, adapters included, of a model that reads images, in place."""
    tower = vision_tower(base_model_of(model))
    if tower is not None:
        tower.requires_grad_(False)
    elif _blank_prompt(model) is not None:
        raise BapoError(
            f"the vision tower of a {type(model).__name__} cannot be told from its other parts; "
            "set model.freeze_vision to false"
        )


def load_policy(directory: Path) -> Policy:
    """Loads the causal language model of a Hugging Face directory, in fp32.

    It may read images (`services.model.vision`). Raises `BapoError` for a directory without one,
    or a model that the trainer cannot score.
    """
    hide_progress_bars()
    with _explain_load_errors(directory):
        auto: Any = _auto_class(directory)
        config = AutoConfig.from_pretrained(directory)
        model: Any = auto.from_pretrained(
            directory, dtype=torch.float32, attn_implementation=_attention(auto, config)
        )
    policy = _make_policy(model, directory)
    if torch.cuda.is_available() and has_recurrent_layers(type(model), config):
        return policy  # The kernels of its layers may need a GPU, and the model is on the CPU.
    _check_scores(policy, directory)
    if (blank := _blank_prompt(model)) is not None:
        _try_prompt(model, blank, directory)
    return policy


def empty_policy(directory: Path) -> Policy:
    """Builds the model with uninitialised weights, to be filled from rank 0.

    The memory costs nothing until it is written: the kernel has not mapped it yet.
    """
    with _explain_load_errors(directory):
        config = AutoConfig.from_pretrained(directory)
        with torch.device("meta"):
            auto: Any = _auto_class(directory)
            model: Any = auto.from_config(
                config, dtype=torch.float32, attn_implementation=_attention(auto, config)
            )
    model.to_empty(device="cpu")
    model.tie_weights()
    return _make_policy(model, directory)


def _auto_class(directory: Path) -> type:
    return AutoModelForImageTextToText if reads_images(directory) else AutoModelForCausalLM


def _attention(auto: Any, config: Any) -> str | dict[str, str] | None:
    """Returns the implementations of attention; None lets transformers choose one for padded rows.

    A vision tower has no sequences to pack.
    """
    packable = _is_packable(auto._model_mapping.get(type(config), None), config)
    if auto is not AutoModelForImageTextToText:
        return attention.IMPLEMENTATION if packable else None
    if config.model_type not in ARCHITECTURES or not packable:
        return "sdpa"
    return {"text_config": attention.IMPLEMENTATION, "vision_config": "sdpa"}


def _is_packable(model_class: Any, config: Any) -> bool:
    """Whether packed attention can take the place of the attention of every layer.

    It cannot where attention has soft caps or sinks, which PyTorch's own attention lacks, too.
    """
    text = config.get_text_config()
    return (
        getattr(model_class, "_supports_attention_backend", False)
        and model_class._supports_sdpa
        and not has_recurrent_layers(model_class, config)
        and "chunked_attention" not in (getattr(text, "layer_types", None) or ())
        and text.model_type not in _NO_BOUNDS
        and not (text.model_type in _WINDOW_IN_MASK and text.sliding_window)
    )


@contextmanager
def _explain_load_errors(directory: Path) -> Iterator[None]:
    """Turns what transformers raises for a bad model directory into a `BapoError` of one line."""
    if not (directory / "config.json").is_file():
        raise BapoError(
            f"{directory} is not a model directory: it has no config.json; set model.path to a "
            "Hugging Face directory, `tiny` or `tiny-vision`"
        )
    try:
        yield
    except (OSError, ValueError, RuntimeError) as error:
        reason = first_line(error)
        raise BapoError(f"{directory}: the model cannot be loaded: {reason}") from error


@contextmanager
def _explain_scoring_errors(model: Any, what: str, directory: Path) -> Iterator[None]:
    """Turns what a model raises that takes other inputs into a `BapoError` of one line."""
    try:
        yield
    except (ValueError, TypeError, RuntimeError, AttributeError, KeyError, IndexError) as error:
        raise BapoError(
            f"{directory}: the trainer cannot score {what} with a {type(model).__name__}: "
            f"{first_line(error)}; choose another model"
        ) from error


def _make_policy(model: Any, directory: Path) -> Policy:
    if reads_images(directory) and model.config.model_type not in ARCHITECTURES:
        model.blank_prompt = BlankPrompt.of(directory)
    return Policy(model).eval()


@torch.no_grad()
def _check_scores(policy: Policy, directory: Path) -> None:
    """Raises `BapoError` unless the trainer scores responses as the model itself does.

    The model scores each alone, with the attention of transformers.
    """
    model: Any = policy.model
    groups = [([1, 2], [[3, 4, 5], [6, 3]]), ([5, 1, 4], [[2, 6]])]
    batch = collate(None, table_of([_unscored_group(*group) for group in groups]))
    with _explain_scoring_errors(model, "responses", directory):
        with attention.observed_attention() as observed:
            mine, _ = response_logprobs(policy, batch, torch.arange(len(batch.lengths)), 1.0)
        policy.attention_kinds = frozenset(observed.kinds)
        _check_windows(model, observed, directory)
        with _plain_attention(model):
            theirs = torch.cat(
                [
                    _plain_logprobs(model, prompt, response)
                    for prompt, responses in groups
                    for response in responses
                ]
            )
    difference = (mine[batch.mask] - theirs).abs().max()
    if not difference <= _SAME * theirs.abs().max().clamp(min=1.0):
        raise BapoError(
            f"{directory}: the trainer's log-probs of a {type(model).__name__} differ from the "
            f"model's own by up to {float(difference):.2g}, because it changes its logits or "
            "computes attention in a way that the trainer does not know; choose another model"
        )


def _unscored_group(prompt: list[int], responses: list[list[int]]) -> TrajectoryGroup:
    return TrajectoryGroup(
        prompt_uid="",
        prompt_token_ids=prompt,
        policy_version=1,
        responses=[
            TrajectoryResponse(tokens, [0.0] * len(tokens), 0.0, "stop", "", correct=False)
            for tokens in responses
        ],
    )


def _plain_logprobs(model: Any, prompt: list[int], response: list[int]) -> Tensor:
    """Returns the log-probs (R,) of a response, of one ordinary pass over prompt and response."""
    targets = torch.tensor(response)
    tokens = torch.cat([torch.tensor(prompt), fed_tokens(model, targets)])[None]
    inputs = {"attention_mask": torch.ones_like(tokens), **token_types(model, tokens)}
    logits = model(input_ids=tokens, use_cache=False, **inputs).logits[0, len(prompt) - 1 : -1]
    logprobs: Tensor = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    return logprobs


@contextmanager
def _plain_attention(model: Any) -> Iterator[None]:
    """Lets a model compute attention as transformers does, while the context lasts."""
    if not packs(model):
        yield
        return
    text = "text_config" if hasattr(model.config, "text_config") else ""
    model.set_attn_implementation({text: "eager"})
    try:
        yield
    finally:
        model.set_attn_implementation({text: attention.IMPLEMENTATION})


def _check_windows(model: Any, observed: attention.ObservedAttention, directory: Path) -> None:
    """Raises `BapoError` unless the packed attention gets the windows of the model's masks."""
    layers = getattr(model.config.get_text_config(), "layer_types", None)
    # Some models ask for the masks of all kinds of layers, also of those that they do not have.
    expected = observed.mask_windows if not layers or "sliding_attention" in layers else set()
    if packs(model) and expected - {None} != observed.windows - {None}:
        raise BapoError(
            f"{directory}: a {type(model).__name__} applies its sliding window in a way that the "
            "trainer's packed attention does not know; choose another model"
        )


@torch.no_grad()
def _try_prompt(model: Any, blank: BlankPrompt, directory: Path) -> None:
    """Raises `BapoError` if the model cannot score a blank image with a few tokens behind it.

    It cannot if these tokens see later ones, as in a model that takes them for a part of a prompt.
    """
    tokens = torch.cat([blank.tokens, torch.arange(1, 7)])
    tokens[-6:] = fed_tokens(model, tokens[-6:])
    rows = tokens.repeat(2, 1)
    rows[1, -1] = SUBSTITUTE
    lengths = torch.full((2,), len(tokens))
    with _explain_scoring_errors(model, "images", directory):
        first, second = _hidden_states_of_rows(model, rows, lengths, [blank.pixels] * 2)[:, :-1]
    if not torch.allclose(first, second, rtol=0.0, atol=_SAME * float(first.abs().max())):
        raise BapoError(
            f"{directory}: tokens of a {type(model).__name__} see later ones, so it has no "
            "log-probs of responses; choose another model"
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
