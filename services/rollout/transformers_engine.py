"""Batched sampling with transformers, with exact log-probs and little work for finished sequences.

Each prompt is prefilled once and its key-value cache copied to its G samples (`placed_cache`). Then
a step samples one more token of each (`token_step`), without the host waiting for the device; on a
GPU it is captured where the model allows it (`captured_step`). Finished rows leave the batch when
enough of them are finished for the next smaller batch. The uniform random numbers of a sample come
from its request's seed, so a sample does not depend on the rest of the batch.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    DynamicCache,
)
from transformers.cache_utils import DynamicLayer
from transformers.core_model_loading import revert_weight_conversion

from bapo_core.errors import BapoError
from services.common.errors import first_line
from services.common.logs import hide_progress_bars
from services.model.ends import find_end_tokens, log_end_tokens
from services.model.json_files import read_object
from services.model.layers import has_recurrent_layers
from services.model.load_errors import explain_load_error
from services.model.vision import (
    OpenImage,
    Pixels,
    VisionProcessor,
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
from services.rollout.captured_step import (
    CapturedSteps,
    CaptureFailed,
    capture_for,
    shapes_for,
    why_not_captured,
)
from services.rollout.errors import ModelLoadError, WrongVersion, explain_damage
from services.rollout.placed_cache import (
    LinearAttentionLayer,
    cache_arguments,
    empty_cache,
    recurrent_states,
)
from services.rollout.sampling import draw_uniforms
from services.rollout.token_step import SampleBatch

log = logging.getLogger(__name__)

COMPACT_BELOW = 0.8
"""Finished rows are dropped once the rest fits into less than this share of the batch: often enough
to save their cost, seldom enough that copying the rest does not cost more."""

MAX_DENSE_PATCHES = 16384
"""Patches over which a vision tower attends with one dense mask, of 2 bytes for each pair: 0.5 GiB.
A single prompt may have more."""


class NonFiniteLogprobs(BapoError):
    """The model's outputs are not finite, so none of its samples can be used."""


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
        self._captured: CapturedSteps | None = None

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
        with explain_damage(directory):
            identity = _read_identity(directory)
        if self._model is None or identity != self._identity:
            with explain_damage(directory):
                model, own_names = self._build(directory)
                ends, vision = _end_tokens(model, directory), load_processor(directory)
            if self._captured is not None:
                self._captured.release()
            model.to(self._device)
            _refuse_other_layers(model, str(directory))
            self._model, self._identity, self._own_names = model, identity, own_names
            self._ends, self._vision = ends, vision
            self._prepare_capture()
        elif self._own_names is not None:
            self._copy_weights(self._own_names, _read_weights(directory), str(directory))
        else:
            # Beside the model itself, so that the device never holds two.
            converted, _ = self._build(directory)
            self._model.load_state_dict(converted.state_dict())
        self._version = version

    def prepare(self, directory: Path) -> None:
        """Builds the model in `directory` and samples a token, without serving a version.

        The first `load` of the same architecture then copies weights alone, and the first
        `generate` finds the libraries of the device loaded. Raises what `load` raises.
        """
        if self._model is None:
            self.load(directory, 0)
            prompt = PromptRequest(prompt_token_ids=[0], seed=0)
            once = Sampling(temperature=1.0, max_tokens=1, group_size=1)
            self.generate([prompt], once, policy_version=0)

    def use(self, model: nn.Module, version: int) -> None:
        """Serves `model` itself, on its own device; its owner may go on training it.

        Call it again after another change than new values of weights: captured token steps would
        not have it.
        """
        _refuse_other_layers(model, "the model")
        self._device = next(model.parameters()).device
        self._ends = _end_tokens(model)
        self._model, self._identity, self._version = model, None, version
        self._prepare_capture()

    def _prepare_capture(self) -> None:
        """Lets the token steps of the model be captured if it and the device allow it."""
        self._captured = None
        make_capture = capture_for(self._device)
        if make_capture is None:
            return
        reason = why_not_captured(self._model)
        if reason is None:
            self._captured = CapturedSteps(self._model, make_capture, shapes_for(self._device))
        else:
            _log_without_capture(reason)

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
        except Exception as error:  # of any kind, as what the files say is any
            reason = explain_load_error(error)
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
            responses = self._respond(wave, sampling)
            groups += [
                GeneratedGroup(
                    index=start + row // size,
                    policy_version=policy_version,
                    responses=responses[row : row + size],
                )
                for row in range(0, len(responses), size)
            ]
        return groups

    def _respond(
        self, prompts: Sequence[PromptRequest], sampling: Sampling
    ) -> list[GeneratedResponse]:
        """Returns the samples of prompts that fit into one batch."""
        pixels = self._pixels(prompts)
        wave = _Wave(self._model, self._device, self._ends, prompts, sampling, pixels)
        try:
            return wave.run(self._captured)
        except CaptureFailed as error:
            _log_without_capture(str(error))
            self._captured = None
        return wave.run(None)

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
        self._ends, self._pixels = torch.tensor(ends), pixels
        self._shapes = shapes_for(device)
        lengths = [len(prompt.prompt_token_ids) for prompt in prompts]
        self._padded = len(set(lengths)) > 1
        width = max(lengths)
        if self._padded:
            width = self._shapes.prompt_places(width)
        tokens, mask = _left_padded(prompts, width)
        self._prompts, self._prompt_mask = tokens.to(device), mask.to(device)
        uniforms = [
            draw_uniforms(prompt.seed, sampling.group_size, sampling.max_tokens)
            for prompt in prompts
        ]
        self._uniforms = torch.cat(uniforms, dim=1).to(device)

    def run(self, captured: CapturedSteps | None) -> list[GeneratedResponse]:
        """Returns all samples, G consecutive ones for each prompt.

        captured: captured steps of the model, if there are any. Raises `CaptureFailed` if they are
        of no use.
        """
        length, samples = self._uniforms.shape
        batch = self._allocate(captured)
        prompt_positions, first_positions = self._positions()
        layers, logits = self._prefill(prompt_positions)
        prompt_of_row = batch.begin(
            self._shapes.rows(samples),
            self._uniforms,
            self._prompt_mask,
            first_positions,
            layers,
            padded=self._padded,
            captured=captured is not None,
        )
        batch.sample(logits.index_select(0, prompt_of_row), self._sampling)
        for sampled in range(1, length):
            if (sampled - 1) % self._shapes.chunk == 0 and self._compact(batch) == 0:
                break
            if captured is None:
                batch.take_step(self._model, self._sampling)
            else:
                captured.take_step(self._sampling)
            batch.filled += 1
        return self._responses(batch)

    def _allocate(self, captured: CapturedSteps | None) -> SampleBatch:
        """Returns a batch with room for all samples."""
        length, samples = self._uniforms.shape
        places = self._prompts.shape[1] + length
        allocate = SampleBatch if captured is None else captured.batch_for
        return allocate(
            self._device,
            self._ends.to(self._device),
            columns=self._shapes.rows(samples),
            tokens=length,
            places=places,
        )

    def _compact(self, batch: SampleBatch) -> int:
        """Drops finished rows if there are many. Returns the number of unfinished ones."""
        unfinished = batch.count_unfinished()
        size = self._shapes.rows(unfinished)
        if unfinished > 0 and size < COMPACT_BELOW * batch.size:
            batch.keep_unfinished(size)
        return unfinished

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

    def _prefill(self, positions: Tensor) -> tuple[list[Any], Tensor]:
        """Returns the layers' states of the prompts, and the logits (P, V) of the first tokens."""
        cache = empty_cache(self._model)
        images = token_types(self._model, self._prompts)
        if self._pixels is not None:
            images |= self._pixels.to(self._device).inputs_of(self._model)
        output = self._model(
            input_ids=self._prompts,
            attention_mask=self._prompt_mask.long(),
            position_ids=positions,
            **cache_arguments(self._model, cache),
            logits_to_keep=1,
            **images,
        )
        return cache.layers, output.logits[:, -1]

    def _responses(self, batch: SampleBatch) -> list[GeneratedResponse]:
        """Returns each sample up to its first end token, or the limit."""
        length, samples = self._uniforms.shape
        tokens, logprobs = (
            matrix[:length, :samples].cpu().T for matrix in (batch.tokens, batch.logprobs)
        )
        is_end = torch.isin(tokens, self._ends)
        stopped = is_end.any(dim=1)
        lengths = torch.where(stopped, is_end.int().argmax(dim=1) + 1, length)
        is_part = torch.arange(length) < lengths[:, None]
        if not bool(torch.isfinite(logprobs[is_part]).all()):
            raise NonFiniteLogprobs(
                "the model's outputs are not finite; its weights are broken, publish others"
            )
        return [
            GeneratedResponse(
                token_ids=token_ids[:length],
                logprobs=logprobs[:length],
                finish_reason="stop" if ended else "length",
            )
            for token_ids, logprobs, length, ended in zip(
                tokens.tolist(), logprobs.tolist(), lengths.tolist(), stopped.tolist(), strict=True
            )
        ]


def _left_padded(prompts: Sequence[PromptRequest], width: int) -> tuple[Tensor, Tensor]:
    """Returns (tokens, mask), each (P, width), in which every prompt ends in the last column."""
    tokens = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros(len(prompts), width, dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        ids = torch.tensor(prompt.prompt_token_ids)
        tokens[row, width - len(ids) :] = ids
        mask[row, width - len(ids) :] = True
    return tokens, mask


def _end_tokens(model: Any, directory: Path | None = None) -> list[int]:
    """Returns the ids of the tokens that end a response.

    They are all that the files of the model's directory name, as in vLLM, or else those of the
    model's configuration.
    """
    ends = [] if directory is None else find_end_tokens(directory)
    for config in (getattr(model, "generation_config", None), model.config):
        named = getattr(config, "eos_token_id", None)
        if not ends and named is not None:
            ends = list(named) if isinstance(named, list) else [named]
    if not ends:
        raise ModelLoadError(
            f"{directory or 'the model'}: names no end token, so no response could ever end; set "
            "eos_token_id in generation_config.json"
        )
    log_end_tokens(ends)
    return ends


def _log_without_capture(reason: str) -> None:
    log.warning(
        "the model's token steps are not captured as CUDA graphs but run kernel by kernel: %s",
        reason,
    )


@torch.inference_mode()
def _refuse_other_layers(model: Any, source: str) -> None:
    """Raises `ModelLoadError` if a layer's state is neither keys and values nor that of a
    `LinearAttentionLayer`, which padding on the left leaves as it is.

    The model is on the device on which it will generate: kernels of such layers may need a GPU.
    """
    if not has_recurrent_layers(type(model), model.config):
        return
    cache, problem = empty_cache(model), None
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
        logits = model(input_ids=tokens, **cache_arguments(model, cache)).logits[:, -1]
        behind_padding = model(
            input_ids=padded,
            attention_mask=(padded > 0).long(),
            position_ids=(torch.arange(6, device=device)[None] - 3).clamp(min=0),
            **cache_arguments(model, empty_cache(model)),
        ).logits[:, -1]
    except (ValueError, TypeError, RuntimeError, AttributeError, IndexError) as error:
        return first_line(error)
    recurrent = [layer for layer in cache.layers if type(layer) is LinearAttentionLayer]
    if not recurrent or not all(recurrent_states(layer) for layer in recurrent):
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
    if not (directory / "config.json").is_file():
        raise ModelLoadError(
            f"{directory}: not a model directory (it has no config.json); give a Hugging Face "
            "model directory"
        )
    names = ("config", "generation_config")
    return {name: read_object(directory / f"{name}.json") for name in names}


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
