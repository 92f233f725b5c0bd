"""Batched sampling with transformers: exact log-probs, and nothing paid for finished sequences.

A prompt is read once and its cache shared out to the G samples; keys and values have their place
from the start instead of being copied for every token; rows that have ended leave the batch. The
uniforms that decide a sample come from its request's seed, so a sample does not depend on what
else is in the batch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.cache_utils import DynamicLayer

from bapo_core.errors import BapoError
from services.rollout.engine import (
    GeneratedGroup,
    GenerationRequest,
    ModelLoadError,
    SampledResponse,
    SamplingParams,
    WrongVersion,
)

COMPACT_BELOW = 0.8
"""Rows that have ended are dropped once the others are fewer than this share of the batch: often
enough to save their cost, seldom enough that copying the rest does not cost more."""

ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}
"""Kinds of layers whose state is keys and values; others cannot share a prompt's cache here."""


class NonFiniteLogprobs(BapoError):
    """The model's outputs are not numbers: nothing that it sampled can be used."""


class _PlacedLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """One layer's keys and values in buffers of their final length."""

    def place(self, keys: Tensor, values: Tensor, repeats: int, length: int) -> None:
        """Takes over the prompts' keys and values (P, heads, L, d), each row `repeats` times."""
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
        """Drops all other rows."""
        used = self._filled
        for index, buffer in enumerate(self._buffers):
            kept = buffer.new_empty(len(rows), *buffer.shape[1:])
            torch.index_select(buffer[:, :, :used], 0, rows, out=kept[:, :, :used])
            self._buffers[index] = kept
        self._expose()

    def _expose(self) -> tuple[Tensor, Tensor]:
        keys, values = (buffer[:, :, : self._filled] for buffer in self._buffers)
        self.keys, self.values = keys, values
        return keys, values


class TransformersEngine:
    """An engine for any causal language model of transformers whose layers are attention.

    max_sequences: samples generated at a time; bounds memory.

    dtype: of the weights that `load` builds; by default float32 on CPU, else bfloat16.
    """

    def __init__(
        self,
        *,
        max_sequences: int = 1024,
        device: str = "cpu",
        dtype: torch.dtype | None = None,
    ) -> None:
        self._max_sequences, self._device = max_sequences, torch.device(device)
        default = torch.float32 if self._device.type == "cpu" else torch.bfloat16
        self._dtype = dtype or default
        self._model: Any = None
        self._ends: list[int] = []
        self._identity: dict[str, Any] | None = None
        self._version = 0

    @property
    def version(self) -> int:
        """The policy version served; 0 before the first load."""
        return self._version

    # -- weights

    def load(self, directory: Path, version: int) -> None:
        """Serves the model in `directory`; loads in place if only the weights changed.

        Everything is checked before anything changes: after a `ModelLoadError` the engine serves
        what it served before.
        """
        identity = _read_identity(directory)
        if self._model is not None and identity == self._identity:
            self._copy_weights(_read_weights(directory), str(directory))
        else:
            model = self._build(directory)
            self._ends = _end_tokens(model, directory)
            self._model, self._identity = model, identity
        self._version = version

    def load_state_dict(self, state: Mapping[str, Tensor], version: int) -> None:
        """Copies `state` into the model served, without files. Raises `ModelLoadError`."""
        if self._model is None:
            raise ModelLoadError("there is no model to copy a state dict into; load or use one")
        self._copy_weights(state, "the state dict")
        self._version = version

    def use(self, model: nn.Module, version: int) -> None:
        """Serves `model` itself, which its owner may go on training."""
        _refuse_other_layers(model, "the model")
        self._ends = _end_tokens(model)
        self._model, self._identity, self._version = model, None, version

    def _build(self, directory: Path) -> nn.Module:
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                directory,
                dtype=self._dtype,
                attn_implementation="sdpa",
                # Neither pickles nor code out of a directory.
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
        except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
            reason = str(error).splitlines()[0]
            raise ModelLoadError(
                f"{directory}: no causal language model can be loaded from it: {reason}; give a "
                "Hugging Face directory with config.json and *.safetensors"
            ) from error
        model, report = loaded
        # transformers makes up weights that are missing, and only warns.
        if report["missing_keys"]:
            raise _misfit(str(directory), min(report["missing_keys"]), "is missing")
        _refuse_other_layers(model, str(directory))
        built: nn.Module = model.eval().requires_grad_(False).to(self._device)
        return built

    def _copy_weights(self, weights: Mapping[str, Tensor], source: str) -> None:
        """Replaces the weights, or raises `ModelLoadError` and has replaced none."""
        current: dict[str, Tensor] = self._model.state_dict()
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
        requests: Sequence[GenerationRequest],
        sampling: SamplingParams,
        *,
        policy_version: int,
    ) -> list[GeneratedGroup]:
        """A group for each request, in order; the same call gives the same answer, bit for bit.

        Raises `WrongVersion`, and `NonFiniteLogprobs` if the weights are broken.
        """
        if policy_version != self._version or self._model is None:
            raise WrongVersion(
                f"asked for policy version {policy_version}, but the engine serves {self._version}"
            )
        per_wave = max(1, self._max_sequences // sampling.group_size)
        groups: list[GeneratedGroup] = []
        for start in range(0, len(requests), per_wave):
            wave = requests[start : start + per_wave]
            responses = _Wave(self._model, self._device, self._ends, wave, sampling).run()
            groups += [
                GeneratedGroup(responses[row : row + sampling.group_size], policy_version)
                for row in range(0, len(responses), sampling.group_size)
            ]
        return groups


class _Wave:
    """Samples for some prompts, generated together. R = prompts x G rows."""

    def __init__(
        self,
        model: Any,
        device: torch.device,
        ends: Sequence[int],
        requests: Sequence[GenerationRequest],
        sampling: SamplingParams,
    ) -> None:
        self._model, self._device, self._sampling = model, device, sampling
        group, length = sampling.group_size, sampling.max_tokens
        self._prompts, self._prompt_mask = _left_padded(requests, device)
        self._ends = torch.tensor(ends, device=device)
        rows = len(requests) * group
        self._uniforms = torch.cat([_uniforms(request.seed, group, length) for request in requests])
        self._uniforms = self._uniforms.to(device)
        self._tokens = torch.zeros(rows, length, dtype=torch.long, device=device)
        self._logprobs = torch.zeros(rows, length, device=device)
        self._lengths = torch.full((rows,), length, device=device)
        self._stopped = torch.zeros(rows, dtype=torch.bool, device=device)

    def run(self) -> list[SampledResponse]:
        """All samples, G rows for each prompt."""
        group, length = self._sampling.group_size, self._sampling.max_tokens
        prompt_length = self._prompts.shape[1]
        layers, logits = self._read_prompts(length)
        cache = DynamicCache()
        cache.layers.extend(layers)
        logits = logits.repeat_interleave(group, dim=0)
        positions = self._prompt_mask.sum(dim=1).repeat_interleave(group)[:, None]
        seen = torch.ones(
            len(positions), prompt_length + length, dtype=torch.long, device=self._device
        )
        seen[:, :prompt_length] = self._prompt_mask.repeat_interleave(group, dim=0)
        # Left padding matters only where there is some.
        padded = not bool(self._prompt_mask.all())
        alive = torch.arange(len(positions), device=self._device)
        ended = torch.zeros(len(alive), dtype=torch.bool, device=self._device)
        for t in range(length):
            chosen, logprobs = _sample(logits, self._sampling.temperature, self._uniforms[alive, t])
            self._tokens[alive, t] = torch.where(ended, 0, chosen)
            self._logprobs[alive, t] = logprobs
            ending = torch.isin(chosen, self._ends) & ~ended
            self._lengths[alive[ending]] = t + 1
            self._stopped[alive[ending]] = True
            ended |= ending
            going = int((~ended).sum())
            if going == 0 or t == length - 1:
                break
            if going < COMPACT_BELOW * len(alive):
                kept = torch.nonzero(~ended).flatten()
                for layer in layers:
                    layer.keep(kept)
                alive, positions, seen = alive[kept], positions[kept], seen[kept]
                chosen, ended = chosen[kept], ended[kept]
            # Two-dimensional: each architecture makes of it what its attention needs (a window, a
            # bias by distance). Preparing it here saves nothing that can be measured.
            mask = seen[:, : prompt_length + t + 1] if padded else None
            logits = self._step(chosen, positions + t, mask, cache)
        return self._responses()

    def _read_prompts(self, new_tokens: int) -> tuple[list[_PlacedLayer], Tensor]:
        """The caches of all rows with room for the response, and the first logits a prompt."""
        read = DynamicCache()
        positions = (self._prompt_mask.cumsum(dim=1) - 1).clamp(min=0)
        output = self._model(
            input_ids=self._prompts,
            attention_mask=self._prompt_mask.long(),
            position_ids=positions,
            past_key_values=read,
            use_cache=True,
            logits_to_keep=1,
        )
        placed = [_PlacedLayer() for _ in read.layers]  # type: ignore[no-untyped-call]
        length = self._prompts.shape[1] + new_tokens
        for new, layer in zip(placed, read.layers, strict=True):
            assert isinstance(layer, DynamicLayer)
            assert layer.keys is not None
            assert layer.values is not None
            new.place(layer.keys, layer.values, self._sampling.group_size, length)
        return placed, output.logits[:, -1]

    def _step(
        self, chosen: Tensor, positions: Tensor, mask: Tensor | None, cache: DynamicCache
    ) -> Tensor:
        """Logits (rows, V) after one more token a row."""
        output = self._model(
            input_ids=chosen[:, None],
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
        )
        logits: Tensor = output.logits[:, -1]
        return logits

    def _responses(self) -> list[SampledResponse]:
        if not bool(torch.isfinite(self._logprobs).all()):
            raise NonFiniteLogprobs(
                "the model's outputs are not finite; its weights are broken, publish others"
            )
        tokens, logprobs = self._tokens.tolist(), self._logprobs.tolist()
        return [
            SampledResponse(ids[:length], values[:length], "stop" if stopped else "length")
            for ids, values, length, stopped in zip(
                tokens, logprobs, self._lengths.tolist(), self._stopped.tolist(), strict=True
            )
        ]


def _sample(logits: Tensor, temperature: float, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """(tokens, log-probs), each (rows,), by inversion of the distribution function."""
    logprobs = torch.log_softmax(logits.float() / temperature, dim=-1)
    # In double precision, so that a large vocabulary does not blur the small probabilities.
    cumulative = logprobs.double().exp().cumsum(dim=-1)
    total = cumulative[:, -1:]
    # Below the total even when the product rounds up to it, so that some token always exceeds it.
    thresholds = torch.minimum(uniforms[:, None] * total, total.nextafter(torch.zeros_like(total)))
    # The first token whose cumulative probability exceeds the threshold: never an impossible one.
    # The limit is for outputs that are not numbers; they are refused at the end.
    chosen = torch.searchsorted(cumulative, thresholds, right=True).clamp(max=logits.shape[-1] - 1)
    return chosen[:, 0], logprobs.gather(1, chosen)[:, 0]


def _uniforms(seed: int, group_size: int, length: int) -> Tensor:
    """(G, length) in [0, 1), a function of the seed alone: a longer limit only appends columns."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(length, group_size, generator=generator, dtype=torch.float64).T


def _left_padded(
    requests: Sequence[GenerationRequest], device: torch.device
) -> tuple[Tensor, Tensor]:
    """(tokens, mask), each (P, L): every prompt ends in the last column."""
    width = max(len(request.prompt_token_ids) for request in requests)
    tokens = torch.zeros(len(requests), width, dtype=torch.long)
    mask = torch.zeros(len(requests), width, dtype=torch.bool)
    for row, request in enumerate(requests):
        ids = torch.tensor(list(request.prompt_token_ids))
        tokens[row, width - len(ids) :] = ids
        mask[row, width - len(ids) :] = True
    return tokens.to(device), mask.to(device)


def _end_tokens(model: Any, directory: Path | None = None) -> list[int]:
    """The tokens that end a response: by the generation config, the config, the tokenizer."""
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


def _refuse_other_layers(model: Any, source: str) -> None:
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ()) - ATTENTION
    if kinds:
        raise ModelLoadError(
            f"{source}: has layers of the kind {min(kinds)}, whose state this engine cannot share "
            "between samples; serve it with vLLM"
        )


def _read_identity(directory: Path) -> dict[str, Any]:
    """What must be equal for one version's weights to be loaded in place of another's."""
    config = _read_json(directory / "config.json")
    if config is None:
        raise ModelLoadError(
            f"{directory}: not a model directory (it has no config.json); give a Hugging Face one"
        )
    return {"config": config, "generation": _read_json(directory / "generation_config.json")}


def _read_json(path: Path) -> Any:
    """The content, or None if there is no such file."""
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


def _misfit(source: str, name: str, how: str) -> ModelLoadError:
    return ModelLoadError(
        f"{source}: the weights do not fit the model: {name} {how}; publish them again with the "
        "config.json they belong to"
    )
