"""Batched sampling with transformers, with exact log-probs and no work for finished sequences.

Each prompt is prefilled once and its key-value cache copied to its G samples. Keys and values are
written into preallocated buffers instead of being concatenated for every token. Finished rows leave
the batch. The uniform random numbers of a sample come from its request's seed, so a sample does not
depend on the rest of the batch.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    DynamicCache,
    cache_utils,
)
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.core_model_loading import revert_weight_conversion

from bapo_core.errors import BapoError
from services.common.errors import first_line
from services.common.logs import hide_progress_bars
from services.model.layers import has_recurrent_layers
from services.model.vision import (
    OpenImage,
    Pixels,
    VisionProcessor,
    fed_tokens,
    load_processor,
    patches_in_dense_attention,
    reads_images,
    rope_positions,
    token_types,
)
from services.rollout.api.wire import (
    GeneratedGroup,
    GeneratedResponse,
    PromptRequest,
    Sampling,
)
from services.rollout.errors import ModelLoadError, WrongVersion

ATTENTION_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer)
"""States of layers of attention. Those of layers that are recurrent too are subclasses."""

LinearAttentionLayer: Any = getattr(cache_utils, "LinearAttentionLayer", None)
"""State of a recurrent layer; None in a transformers in which each model has its own."""

COMPACT_BELOW = 0.8
"""Finished rows are dropped once the unfinished ones are fewer than this share of the batch: often
enough to save their cost, seldom enough that copying the rest does not cost more."""


MAX_DENSE_PATCHES = 16384
"""Patches over which a vision tower attends with one dense mask, of 2 bytes for each pair: 0.5 GiB.
A single prompt may have more."""


class NonFiniteLogprobs(BapoError):
    """The model's outputs are not finite, so none of its samples can be used."""


class _PlacedLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """One layer's keys and values, in buffers preallocated for the whole sequence."""

    def place(self, keys: Tensor, values: Tensor, repeats: int, length: int) -> None:
        """Copies the prompts' keys and values (P, heads, L, d), each row `repeats` times."""
        prompts, heads, self._filled, _ = keys.shape
        self._buffers = []
        for source in (keys, values):
            buffer = source.new_empty(prompts * repeats, heads, length, source.shape[-1])
            buffer[:, :, : self._filled] = source.repeat_interleave(repeats, dim=0)
            self._buffers.append(buffer)
        self.is_initialized = True
        self._expose()

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        end = self._filled + key_states.shape[-2]
        for buffer, new in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:, :, self._filled : end] = new
        self._filled = end
        return self._expose()

    def keep(self, rows: Tensor) -> None:
        """Drops all rows but `rows`."""
        used = self._filled
        for index, buffer in enumerate(self._buffers):
            smaller = buffer.new_empty(len(rows), *buffer.shape[1:])
            torch.index_select(buffer[:, :, :used], 0, rows, out=smaller[:, :, :used])
            self._buffers[index] = smaller
        self._expose()

    def _expose(self) -> tuple[Tensor, Tensor]:
        keys, values = (buffer[:, :, : self._filled] for buffer in self._buffers)
        self.keys, self.values = keys, values
        return keys, values


class TransformersEngine:
    """An engine for causal language models of transformers.

    Their layers are attention, or recurrent ones whose state is a `LinearAttentionLayer`.

    It also serves the models that read images (`services.model.vision`).

    max_sequences: number of samples generated at a time; bounds memory.
    device: where models are loaded; the GPU if there is one, unless given.
    dtype: data type of the weights that `load` builds; float32 on CPU and bfloat16 elsewhere unless
        given.
    open_image: returns the images of prompts; None if no prompt has any.
    """

    def __init__(
        self,
        *,
        max_sequences: int = 1024,
        device: str | None = None,
        dtype: torch.dtype | None = None,
        open_image: OpenImage | None = None,
    ) -> None:
        self._open_image = open_image
        self._vision: VisionProcessor | None = None
        self._max_sequences = max_sequences
        self._device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        default = torch.float32 if self._device.type == "cpu" else torch.bfloat16
        self._dtype = dtype or default
        self._model: Any = None
        self._ends: list[int] = []
        self._identity: dict[str, Any] | None = None
        self._own_names: dict[str, str] | None = None
        """The model's name of each weight by its name in files; None if files hold other tensors
        than the model computes with."""
        self._version = 0

    @property
    def version(self) -> int:
        """The policy version served; 0 before the first load."""
        return self._version

    # -- weights

    def load(self, directory: Path, version: int) -> None:
        """Serves the model in `directory`; loads in place if only the weights changed.

        A model whose files hold other tensors than it computes with is built again in main memory:
        transformers converts them while it loads.

        Raises `ModelLoadError` for a directory that holds no such model. Everything is checked
        before anything changes, so the engine then still serves the version from before.
        """
        identity = _read_identity(directory)
        if self._model is None or identity != self._identity:
            model, own_names = self._build(directory)
            ends, vision = _end_tokens(model, directory), load_processor(directory)
            model.to(self._device)
            _refuse_other_layers(model, str(directory))
            self._model, self._identity, self._own_names = model, identity, own_names
            self._ends, self._vision = ends, vision
        elif self._own_names is not None:
            self._copy_weights(self._own_names, _read_weights(directory), str(directory))
        else:
            # Beside the model itself, so that the device never holds two.
            converted, _ = self._build(directory)
            self._model.load_state_dict(converted.state_dict())
        self._version = version

    def use(self, model: nn.Module, version: int) -> None:
        """Serves `model` itself, on its own device; its owner may go on training it."""
        _refuse_other_layers(model, "the model")
        self._device = next(model.parameters()).device
        self._ends = _end_tokens(model)
        self._model, self._identity, self._version = model, None, version

    def _build(self, directory: Path) -> tuple[nn.Module, dict[str, str] | None]:
        """Returns the model, on the CPU, and its names of the weights by their names in files."""
        hide_progress_bars()
        auto: Any = AutoModelForImageTextToText if reads_images(directory) else AutoModelForCausalLM
        try:
            loaded: Any = auto.from_pretrained(
                directory,
                dtype=self._dtype,
                attn_implementation="sdpa",
                # A model directory must not be able to run code here.
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
        except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
            reason = first_line(error)
            raise ModelLoadError(
                f"{directory}: no causal language model can be loaded from it: {reason}; give a "
                "Hugging Face directory with config.json and *.safetensors"
            ) from error
        model, report = loaded
        # transformers initialises missing weights at random, and only warns.
        if report["missing_keys"]:
            raise _misfit(str(directory), min(report["missing_keys"]), "is missing")
        built: nn.Module = model.eval().requires_grad_(False)
        return built, _own_names(built)

    def _copy_weights(
        self, own_names: Mapping[str, str], weights: Mapping[str, Tensor], source: str
    ) -> None:
        """Replaces all weights. Raises `ModelLoadError` before it has replaced any."""
        state = self._model.state_dict()
        current: dict[str, Tensor] = {saved: state[own] for saved, own in own_names.items()}
        tied = set(getattr(self._model, "all_tied_weights_keys", None) or {})
        for name in current.keys() - weights.keys() - tied:
            raise _misfit(source, name, "is missing")
        for name, new in weights.items():
            if name not in current:
                raise _misfit(source, name, "is not in this architecture")
            if new.shape != current[name].shape:
                shapes = f"{tuple(new.shape)} instead of {tuple(current[name].shape)}"
                raise _misfit(source, name, f"has the shape {shapes}")
        with torch.no_grad():
            for name, new in weights.items():
                current[name].copy_(new)

    # -- generation

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[PromptRequest],
        sampling: Sampling,
        *,
        policy_version: int,
    ) -> list[GeneratedGroup]:
        """Returns a group for each prompt, in order; equal calls give equal results, bit for bit.

        Raises `WrongVersion` if the engine serves another version, and `NonFiniteLogprobs` if the
        weights are broken.
        """
        if policy_version != self._version or self._model is None:
            raise WrongVersion(
                f"asked for policy version {policy_version}, but the engine serves {self._version}"
            )
        size = sampling.group_size
        groups: list[GeneratedGroup] = []
        for start, wave in self._waves(prompts, max(1, self._max_sequences // size)):
            pixels = self._pixels(wave)
            responses = _Wave(self._model, self._device, self._ends, wave, sampling, pixels).run()
            groups += [
                GeneratedGroup(
                    index=start + row // size,
                    policy_version=policy_version,
                    responses=responses[row : row + size],
                )
                for row in range(0, len(responses), size)
            ]
        return groups

    def _waves(
        self, prompts: Sequence[PromptRequest], most: int
    ) -> Iterator[tuple[int, Sequence[PromptRequest]]]:
        """Yields at most `most` prompts at a time, and the index of the first one.

        Fewer where the memory of the vision tower grows with the square of all patches.
        """
        patches_of_token = patches_in_dense_attention(self._model)
        start, patches = 0, 0
        for index, prompt in enumerate(prompts):
            more = 0
            if patches_of_token:
                tokens = prompt.prompt_token_ids.count(self._model.config.image_token_id)
                more = tokens * patches_of_token
            if index > start and (index - start == most or patches + more > MAX_DENSE_PATCHES):
                yield start, prompts[start:index]
                start, patches = index, 0
            patches += more
        if prompts:
            yield start, prompts[start:]

    def _pixels(self, prompts: Sequence[PromptRequest]) -> Pixels | None:
        """Returns the images of all prompts, in order; None if there are none."""
        with_images = [prompt.images for prompt in prompts if prompt.images]
        if not with_images:
            return None
        if self._vision is None or self._open_image is None:
            raise BapoError(
                "a prompt has images, but the model that is served reads none; set model.path to a "
                "model that does"
            )
        vision, open_image = self._vision, self._open_image
        return Pixels.join(
            [vision.pixels([open_image(digest) for digest in digests]) for digests in with_images]
        )


class _Wave:
    """The samples of some prompts, generated in one batch of R = prompts x G rows."""

    def __init__(
        self,
        model: Any,
        device: torch.device,
        ends: Sequence[int],
        prompts: Sequence[PromptRequest],
        sampling: Sampling,
        pixels: Pixels | None = None,
    ) -> None:
        self._model, self._device, self._sampling = model, device, sampling
        self._pixels = pixels
        group_size, length = sampling.group_size, sampling.max_tokens
        self._prompts, self._prompt_mask = _left_padded(prompts, device)
        self._ends = torch.tensor(ends, device=device)
        rows = len(prompts) * group_size
        uniforms = [_uniforms(prompt.seed, group_size, length) for prompt in prompts]
        self._uniforms = torch.cat(uniforms).to(device)
        self._tokens = torch.zeros(rows, length, dtype=torch.long, device=device)
        self._logprobs = torch.zeros(rows, length, device=device)
        self._lengths = torch.full((rows,), length, device=device)
        self._stopped = torch.zeros(rows, dtype=torch.bool, device=device)

    def run(self) -> list[GeneratedResponse]:
        """Returns all samples, G consecutive ones for each prompt."""
        group_size, length = self._sampling.group_size, self._sampling.max_tokens
        prompt_length = self._prompts.shape[1]
        prompt_positions, first_positions = self._positions()
        layers, logits = self._prefill(length, prompt_positions)
        cache = DynamicCache()
        cache.layers.extend(layers)
        logits = logits.repeat_interleave(group_size, dim=0)
        positions = first_positions.repeat_interleave(group_size)[:, None]
        attention_mask = torch.ones(
            len(positions), prompt_length + length, dtype=torch.long, device=self._device
        )
        attention_mask[:, :prompt_length] = self._prompt_mask.repeat_interleave(group_size, dim=0)
        padded = not bool(self._prompt_mask.all())
        # Indices (into all R rows) of those that are still in the batch.
        rows = torch.arange(len(positions), device=self._device)
        finished = torch.zeros(len(rows), dtype=torch.bool, device=self._device)
        for t in range(length):
            tokens, logprobs = _sample(logits, self._sampling, self._uniforms[rows, t])
            self._tokens[rows, t] = torch.where(finished, 0, tokens)
            self._logprobs[rows, t] = logprobs
            ending = torch.isin(tokens, self._ends) & ~finished
            self._lengths[rows[ending]] = t + 1
            self._stopped[rows[ending]] = True
            finished |= ending
            unfinished = int((~finished).sum())
            if unfinished == 0 or t == length - 1:
                break
            if unfinished < COMPACT_BELOW * len(rows):
                kept = torch.nonzero(~finished).flatten()
                for layer in layers:
                    _keep_rows(layer, kept)
                rows, positions = rows[kept], positions[kept]
                attention_mask = attention_mask[kept]
                tokens, finished = tokens[kept], finished[kept]
            # Two-dimensional: each architecture derives what its attention needs (a window, a
            # bias by distance). Preparing it here saves nothing that can be measured.
            mask = attention_mask[:, : prompt_length + t + 1] if padded else None
            logits = self._step(tokens, positions + t, mask, cache)
        return self._responses()

    def _positions(self) -> tuple[Tensor, Tensor]:
        """Returns the position ids of the prompts, and of the first token of each response.

        Those of prompts with images are (3, P, L), for multimodal rotary embeddings, and otherwise
        (P, L). Those of the first tokens are (P,).
        """
        lengths = self._prompt_mask.sum(dim=1)
        if self._pixels is None or self._pixels.grids is None:
            return (self._prompt_mask.cumsum(dim=1) - 1).clamp(min=0), lengths
        positions, offsets = rope_positions(
            self._model.base_model, self._prompts, self._prompt_mask, self._pixels.grids
        )
        return positions, lengths + offsets[:, 0].to(self._device)

    def _prefill(self, new_tokens: int, positions: Tensor) -> tuple[list[Any], Tensor]:
        """Returns the cache layers of all rows, with room for the response, and the first logits.

        The logits have the shape (P, V): one row for each prompt.
        """
        prompt_cache = _empty_cache(self._model)
        images = token_types(self._model, self._prompts)
        if self._pixels is not None:
            images |= self._pixels.to(self._device).inputs_of(self._model)
        output = self._model(
            input_ids=self._prompts,
            attention_mask=self._prompt_mask.long(),
            position_ids=positions,
            **_cache_arguments(self._model, prompt_cache),
            logits_to_keep=1,
            **images,
        )
        length = self._prompts.shape[1] + new_tokens
        group_size = self._sampling.group_size
        return [
            _for_samples(layer, group_size, length) for layer in prompt_cache.layers
        ], output.logits[:, -1]

    def _step(
        self, tokens: Tensor, positions: Tensor, mask: Tensor | None, cache: DynamicCache
    ) -> Tensor:
        """Returns logits (rows, V) after one more token in each row."""
        output = self._model(
            input_ids=fed_tokens(self._model, tokens)[:, None],
            attention_mask=mask,
            position_ids=positions,
            **_cache_arguments(self._model, cache),
        )
        logits: Tensor = output.logits[:, -1]
        return logits

    def _responses(self) -> list[GeneratedResponse]:
        if not bool(torch.isfinite(self._logprobs).all()):
            raise NonFiniteLogprobs(
                "the model's outputs are not finite; its weights are broken, publish others"
            )
        return [
            GeneratedResponse(
                token_ids=token_ids[:length],
                logprobs=logprobs[:length],
                finish_reason="stop" if stopped else "length",
            )
            for token_ids, logprobs, length, stopped in zip(
                self._tokens.tolist(),
                self._logprobs.tolist(),
                self._lengths.tolist(),
                self._stopped.tolist(),
                strict=True,
            )
        ]


def _sample(logits: Tensor, sampling: Sampling, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (tokens, log-probs), each (rows,), by inversion of the distribution function."""
    logprobs = torch.log_softmax(logits.float() / sampling.temperature, dim=-1)
    if sampling.top_p < 1:
        logprobs = _truncate(logprobs, sampling.top_p)
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


def _uniforms(seed: int, group_size: int, length: int) -> Tensor:
    """Returns (G, length) uniforms in [0, 1) that depend on the seed alone.

    A larger `length` only appends columns.
    """
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(length, group_size, generator=generator, dtype=torch.float64).T


def _left_padded(prompts: Sequence[PromptRequest], device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns (tokens, mask), each (P, L), in which every prompt ends in the last column."""
    width = max(len(prompt.prompt_token_ids) for prompt in prompts)
    tokens = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros(len(prompts), width, dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        ids = torch.tensor(prompt.prompt_token_ids)
        tokens[row, width - len(ids) :] = ids
        mask[row, width - len(ids) :] = True
    return tokens.to(device), mask.to(device)


def _end_tokens(model: Any, directory: Path | None = None) -> list[int]:
    """Returns the ids of the tokens that end a response.

    They come from the generation config, or else the model's config, or else the tokenizer.
    """
    for config in (getattr(model, "generation_config", None), model.config):
        ends = getattr(config, "eos_token_id", None)
        if ends is not None:
            return list(ends) if isinstance(ends, list) else [ends]
    if directory is not None and (directory / "tokenizer_config.json").is_file():
        end = AutoTokenizer.from_pretrained(directory).eos_token_id
        if end is not None:
            return [int(end)]
    raise ModelLoadError(
        f"{directory or 'the model'}: names no end token, so no response could ever end; set "
        "eos_token_id in generation_config.json"
    )


def _empty_cache(model: Any) -> DynamicCache:
    """Returns a cache for prompts, whose attention layers keep all keys and values."""
    if not has_recurrent_layers(type(model), model.config):
        return DynamicCache()
    cache = DynamicCache(config=model.config.get_text_config())
    cache.layers = [
        DynamicLayer() if type(layer) in ATTENTION_LAYERS else layer  # type: ignore[no-untyped-call]
        for layer in cache.layers
    ]
    return cache


def _cache_arguments(model: Any, cache: DynamicCache) -> dict[str, Any]:
    """Returns the arguments with which a model reads a cache and writes to it."""
    return {_cache_argument(model.__class__): cache, "use_cache": True}


@lru_cache
def _cache_argument(model: type[Any]) -> str:
    """Returns the name of the argument by which models of a class take their cache.

    It is `cache` from transformers 5.24 on, and `past_key_values` before, which is no longer
    accepted from 5.40 on.
    """
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def _for_samples(layer: Any, group_size: int, length: int) -> Any:
    """Returns a layer's state after the prompts, `group_size` times each, for `length` tokens."""
    if type(layer) is LinearAttentionLayer:
        states = _states(layer)
        prompts = torch.arange(len(states[0]), device=states[0].device)
        layer.reorder_cache(prompts.repeat_interleave(group_size))
        return layer
    assert isinstance(layer, DynamicLayer)
    assert layer.keys is not None
    assert layer.values is not None
    placed = _PlacedLayer()  # type: ignore[no-untyped-call]
    placed.place(layer.keys, layer.values, group_size, length)
    return placed


def _keep_rows(layer: Any, rows: Tensor) -> None:
    """Drops all rows of a layer's state but `rows`."""
    if isinstance(layer, _PlacedLayer):
        layer.keep(rows)
    else:
        layer.reorder_cache(rows)


def _states(layer: Any) -> list[Tensor]:
    """Returns the states of a `LinearAttentionLayer`."""
    states = (*layer.conv_states.values(), *layer.recurrent_states.values())
    return [state for state in states if state is not None]


@torch.inference_mode()
def _refuse_other_layers(model: Any, source: str) -> None:
    """Raises `ModelLoadError` if a layer's state is neither keys and values nor that of a
    `LinearAttentionLayer`, which padding on the left leaves as it is.

    The model is on the device on which it will generate: kernels of such layers may need a GPU.
    """
    if not has_recurrent_layers(type(model), model.config):
        return
    cache, problem = _empty_cache(model), None
    others = {type(layer) for layer in cache.layers} - {DynamicLayer, LinearAttentionLayer}
    if others:
        problem = min(other.__name__ for other in others)
    else:
        problem = _problem_of_states(model, cache)
    if problem is not None:
        raise ModelLoadError(
            f"{source}: its layers have a state that this engine cannot share between samples "
            f"({problem}); serve the model with vLLM (rollout.engine = vllm)"
        )


def _problem_of_states(model: Any, cache: DynamicCache) -> str | None:
    """Returns why states that a model puts into `cache` are not all that it needs, or None."""
    device = next(model.parameters()).device
    tokens = torch.arange(1, 4, device=device)[None]
    padded = torch.cat([torch.zeros_like(tokens), tokens], dim=1)
    try:
        logits = model(input_ids=tokens, **_cache_arguments(model, cache)).logits[:, -1]
        behind_padding = model(
            input_ids=padded,
            attention_mask=(padded > 0).long(),
            position_ids=(torch.arange(6, device=device)[None] - 3).clamp(min=0),
            **_cache_arguments(model, _empty_cache(model)),
        ).logits[:, -1]
    except (ValueError, TypeError, RuntimeError, AttributeError, IndexError) as error:
        return first_line(error)
    recurrent = [layer for layer in cache.layers if type(layer) is LinearAttentionLayer]
    if not recurrent or not all(_states(layer) for layer in recurrent):
        return "they are not in the cache"
    largest = (behind_padding - logits).abs().max() / logits.abs().max()
    if largest > (1e-3 if logits.dtype == torch.float32 else 0.1):
        return "padding before a prompt changes them"
    return None


def _place(tensor: Tensor) -> tuple[int, torch.Size]:
    """Returns what two tensors have in common only if they are the same one."""
    return tensor.data_ptr(), tensor.shape


def _read_identity(directory: Path) -> dict[str, Any]:
    """Returns the configuration files; weights of an equal identity can be loaded in place."""
    config = _read_json(directory / "config.json")
    if config is None:
        raise ModelLoadError(
            f"{directory}: not a model directory (it has no config.json); give a Hugging Face "
            "model directory"
        )
    return {"config": config, "generation": _read_json(directory / "generation_config.json")}


def _read_json(path: Path) -> Any:
    """Returns the file's content, or None if there is no such file."""
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError as error:
        raise ModelLoadError(
            f"{path}: not JSON; the directory is damaged, publish it again"
        ) from error


def _read_weights(directory: Path) -> dict[str, Tensor]:
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ModelLoadError(f"{directory}: has no *.safetensors; publish the weights again")
    weights: dict[str, Tensor] = {}
    for file in files:
        try:
            weights |= load_file(file)
        except (OSError, SafetensorError) as error:
            raise ModelLoadError(
                f"{file}: cannot be read as safetensors ({error}); publish the weights again"
            ) from error
    return weights


def _own_names(model: Any) -> dict[str, str] | None:
    """Returns the model's name of each weight by the name that it has in files.

    The names differ for models that read images. Returns None if files hold other tensors than the
    model computes with, such as one for each expert.
    """
    weights: dict[str, Tensor] = model.state_dict()
    saved: dict[str, Tensor] = revert_weight_conversion(model, dict(weights))
    if len(saved) != len(weights):
        return None
    # Of tied weights, any name will do.
    names = {_place(tensor): name for name, tensor in weights.items()}
    if not all(_place(tensor) in names for tensor in saved.values()):
        return None
    return {name: names[_place(tensor)] for name, tensor in saved.items()}


def _misfit(source: str, name: str, problem: str) -> ModelLoadError:
    return ModelLoadError(
        f"{source}: the weights do not fit the model: {name} {problem}; publish them again with "
        "the config.json they belong to"
    )
