"""Token steps of few shapes, captured as CUDA graphs where model and device allow it.

A token step of a small model launches hundreds of kernels that take less time than their launches;
a captured step is launched as a whole. It is valid for one number of rows and one number of visible
places, so both come from small sets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bapo_core.errors import BapoError
from services.common.errors import first_line
from services.model.layers import has_recurrent_layers
from services.rollout.api.wire import Sampling
from services.rollout.token_step import SampleBatch

Capture = Callable[[Callable[[], None]], Callable[[], None]]
"""Function that calls a function of tensors twice, the second time without effect, and returns
another one that does the same with the same tensors. Raises one of `STEP_ERRORS` if it cannot."""

STEPS_BEFORE_CAPTURE = 8
"""Steps of a shape that run kernel by kernel first: capturing takes the time of about as many."""

MOST_MOVED_TOKENS = 0.1
"""Largest share of rows in which a step whose mask hides places may sample another token than one
without these places (but two rows may always), because rounding moves the boundaries between
tokens."""

MOST_MEAN_DIFFERENCE = {torch.float32: 1e-3, torch.float64: 1e-3}
"""Largest mean difference of their log-probs, in nats, by the data type of the model. Attention
with a mask is another kernel, which rounds differently."""

HALF_PRECISION_DIFFERENCE = 0.05
"""The same for models in bfloat16 and float16."""

STEP_ERRORS = (RuntimeError, ValueError, TypeError, AttributeError, IndexError, AssertionError)
"""What models raise for a tensor where they expect a number, and CUDA (`RuntimeError`) for what
cannot be captured."""


class CaptureFailed(BapoError):
    """A token step cannot be captured, or computes something else when it is."""


@dataclass(frozen=True, slots=True)
class StepShapes:
    """The shapes that token steps may have on a device."""

    chunk: int
    """Token steps after which the host asks how many rows are unfinished, and waits for it."""
    least_rows: int
    row_digits: int
    least_places: int
    place_digits: int
    """Numbers of rows and of visible places have so many significant binary digits."""

    def prompt_places(self, longest: int) -> int:
        """Returns the number of places to which prompts of several lengths are padded."""
        return _round_up(longest, self.place_digits, 1)

    def rows(self, unfinished: int) -> int:
        """Returns the number of rows for so many unfinished ones."""
        return _round_up(unfinished, self.row_digits, self.least_rows)

    def visible(self, filled: int) -> int:
        """Returns the number of places that attention gets if so many are filled."""
        return _round_up(filled, self.place_digits, self.least_places)


EXACT = StepShapes(chunk=1, least_rows=1, row_digits=64, least_places=1, place_digits=64)
"""For a CPU, on which neither new shapes nor reads cost anything."""

FEW = StepShapes(chunk=8, least_rows=8, row_digits=2, least_places=64, place_digits=3)
"""For a GPU: 8, 12, 16, 24, 32, ... rows and 64, 80, 96, 112, 128, 160, ... places."""


def shapes_for(device: torch.device) -> StepShapes:
    """Returns the shapes of token steps on a device."""
    return EXACT if device.type == "cpu" else FEW


def _round_up(count: int, digits: int, least: int) -> int:
    """Returns the smallest number from `least` on, not below `count`, that has at most `digits`
    binary digits before its zeros."""
    unit = 1 << max(0, (count - 1).bit_length() - digits)
    return max(least, -(-count // unit) * unit)


def why_not_captured(model: Any) -> str | None:
    """Returns why the token step of a model is not even tried to capture; None if it is."""
    if has_recurrent_layers(type(model), model.config):
        return "it has recurrent layers, whose states do not stay in place"
    if not getattr(model, "_can_compile_fullgraph", False):
        return f"transformers computes {type(model).__name__} in ways that depend on values"
    attention = model.config.get_text_config()._attn_implementation
    if attention not in ("sdpa", "eager"):
        return f"its attention is {attention}, which reads the lengths of sequences"
    return None


def capture_for(device: torch.device) -> Callable[[], Capture] | None:
    """Returns a constructor of what captures token steps on a device; None if nothing does."""
    return partial(CudaCapture, device) if device.type == "cuda" else None


class CudaCapture:
    """Captures functions as CUDA graphs, which share the memory of their intermediate results."""

    def __init__(self, device: torch.device) -> None:
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, function: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        outer = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(outer)
        # Also resets the stream where a failed capture would leave its own.
        with torch.cuda.stream(self._stream):
            # The first call loads kernels and allocates the workspaces of their libraries. What
            # waits for the device raises here, where nothing is captured that would break off.
            mode = torch.cuda.get_sync_debug_mode()
            torch.cuda.set_sync_debug_mode("error")
            try:
                function()
            finally:
                torch.cuda.set_sync_debug_mode(mode)
            # Threads that do something else with the device must not make the capture fail.
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                function()
        outer.wait_stream(self._stream)
        replay: Callable[[], None] = graph.replay
        return replay


class CapturedSteps:
    """The captured token steps of one model, and the batch whose tensors they compute with.

    The batch is kept for all calls, since a captured step is valid for its tensors alone. Weights
    may be replaced in place.
    """

    def __init__(self, model: Any, make_capture: Callable[[], Capture], shapes: StepShapes) -> None:
        """make_capture: returns what captures the steps of one batch, and of no other: memory that
        its steps have shared cannot be used again once all of them are forgotten."""
        self._model, self._make_capture, self._shapes = model, make_capture, shapes
        self._capture: Capture | None = None
        self._batch: SampleBatch | None = None
        self._addresses: list[int] = []
        self._replays: dict[Any, Callable[[], None]] = {}
        self._plain_steps: Counter[Any] = Counter()

    def batch_for(
        self, device: torch.device, ends: Tensor, *, columns: int, tokens: int, places: int
    ) -> SampleBatch:
        """Returns a batch with at least so much room: the kept one if it has, and if the weights
        are where they were.

        Raises `CaptureFailed` if the device captures nothing.
        """
        addresses = [
            tensor.data_ptr() for tensor in (*self._model.parameters(), *self._model.buffers())
        ]
        if addresses != self._addresses or not (
            self._batch and self._batch.fits(columns, tokens, places)
        ):
            self.release()  # first, so that the device never holds two batches
            self._addresses = addresses
        if self._batch is None:
            try:
                self._capture = self._make_capture()
            except STEP_ERRORS as error:
                raise CaptureFailed(first_line(error)) from error
            places = self._shapes.visible(places)
            self._batch = SampleBatch(device, ends, columns=columns, tokens=tokens, places=places)
        return self._batch

    def release(self) -> None:
        """Forgets the batch and all captured steps, which hold memory of the device."""
        self._batch = self._capture = None
        self._replays.clear()
        self._plain_steps.clear()

    def take_step(self, sampling: Sampling) -> None:
        """Takes a step of the batch, captured if its shape has had some steps.

        Captured or not, it is the same step, so that equal calls have equal bits. Raises
        `CaptureFailed`, after which the batch is of no use.
        """
        batch, capture = self._batch, self._capture
        assert batch is not None
        assert capture is not None
        visible = self._shapes.visible(batch.filled + 1)
        key = (batch.size, visible, sampling.temperature, sampling.top_p)
        if key in self._replays:
            self._replays[key]()
            return

        def take() -> None:
            batch.take_step(self._model, sampling, visible)

        def take_captured() -> None:
            before = batch.state()
            self._replays[key] = capture(take)
            batch.rewind(before)
            self._replays[key]()

        self._plain_steps[key] += 1
        if self._plain_steps[key] == 1:
            _take_compared(self._model, batch, sampling, take)
        elif self._plain_steps[key] <= STEPS_BEFORE_CAPTURE:
            take()
        else:
            _take_compared(self._model, batch, sampling, take_captured)


def _take_compared(
    model: Any, batch: SampleBatch, sampling: Sampling, take: Callable[[], None]
) -> None:
    """Takes a step by `take`, after the same one that attends to filled places alone.

    Raises `CaptureFailed` if `take` fails, or if more than rounding distinguishes the two.
    """
    before = batch.state()
    batch.take_step(model, sampling)
    tokens, logprobs = batch.newest()
    batch.rewind(before)
    try:
        take()
    except STEP_ERRORS as error:
        raise CaptureFailed(first_line(error)) from error
    own_tokens, own_logprobs = batch.newest()
    same = own_tokens == tokens
    # Broken weights, whose log-probs are not finite, are found when the samples are complete.
    compared = same & logprobs.isfinite()
    differences = torch.where(compared, own_logprobs - logprobs, 0).abs()
    mean = differences.sum() / compared.sum().clamp(min=1)
    moved, difference = torch.stack([(~same).sum(), mean]).tolist()
    dtype = next(model.parameters()).dtype
    limit = MOST_MEAN_DIFFERENCE.get(dtype, HALF_PRECISION_DIFFERENCE)
    if moved > max(2, MOST_MOVED_TOKENS * batch.size) or not difference <= limit:
        raise CaptureFailed(
            f"one step sampled other tokens in {moved:.0f} of {batch.size} rows than without, and "
            f"its log-probs differed by {difference:.2g} nats on average"
        )
