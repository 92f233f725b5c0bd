"""The rows of a batch of samples on the device, and the step that samples one more token in each.

The step reads nothing from the device, and learns from a tensor which token of the samples it is.
All tensors keep their addresses, so that the step can be captured (`captured_step`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from services.model.vision import fed_tokens
from services.rollout.api.wire import Sampling
from services.rollout.placed_cache import PlacedLayer, Span, cache_arguments
from services.rollout.sampling import sample_tokens


class SampleBatch:
    """Samples of one model, and the rows of the batch in which they are generated.

    Each sample has a column of `tokens` and `logprobs`. Each row generates one sample; when
    finished rows leave the batch, others take their place, and the samples keep their columns.
    """

    def __init__(
        self, device: torch.device, ends: Tensor, *, columns: int, tokens: int, places: int
    ) -> None:
        """Allocates room for samples of `tokens` tokens, which need `places` with their prompts.

        ends: (E,), the ids of the tokens that end a sample. columns: the most samples, and rows.
        """
        self.columns, self.places = columns, places

        def allocate(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.tokens = allocate(tokens, columns, dtype=torch.long)
        self.logprobs = allocate(tokens, columns, dtype=torch.float)
        self._uniforms = allocate(tokens, columns, dtype=torch.double)
        self._ends = ends
        self._sampled = allocate(1, dtype=torch.long)
        self._prompt_length = allocate(1, dtype=torch.long)
        self._column_of_row = allocate(columns, dtype=torch.long)
        self._finished = allocate(columns, dtype=torch.bool)
        self._first_positions = allocate(columns, 1, dtype=torch.long)
        self._mask = allocate(columns, places, dtype=torch.long)
        self._padded = False
        self._span = Span(allocate(1, dtype=torch.long))
        self._cache = DynamicCache()
        # For a CPU, attention without a mask is faster, and reading the mask costs nothing.
        self._read_mask = device.type == "cpu"
        self.size = 0
        """Number of rows that a step computes."""
        self.filled = 0
        """Number of places of the cache that are filled."""

    def fits(self, columns: int, tokens: int, places: int) -> bool:
        """Returns whether there is room for so many rows, tokens and places."""
        return columns <= self.columns and tokens <= len(self.tokens) and places <= self.places

    def begin(
        self,
        size: int,
        uniforms: Tensor,
        prompt_mask: Tensor,
        first_positions: Tensor,
        layers: Sequence[Any],
        *,
        padded: bool,
        captured: bool,
    ) -> Tensor:
        """Starts samples, G consecutive ones for each prompt.

        size: number of rows; those beyond the samples count as finished. uniforms: (tokens,
        samples). prompt_mask: (P, L), false at padding, of which there is none unless `padded`.
        first_positions: (P,), the position id of each first token. layers: states of the prompts.
        captured: whether steps may be captured, and then have more `visible` places than filled.
        Returns the index (size,) of the prompt of each row.
        """
        length, samples = uniforms.shape
        prompts, self.filled = prompt_mask.shape
        self.size, self._padded = size, padded
        columns = torch.arange(self.columns, device=uniforms.device)
        prompt_of_row = (columns[:size] // (samples // prompts)).clamp(max=prompts - 1)
        self.tokens.zero_()
        self.logprobs.zero_()
        self._uniforms[:length, :samples] = uniforms
        self._sampled.zero_()
        self._prompt_length.fill_(self.filled)
        self._column_of_row.copy_(columns)
        self._finished.copy_(columns >= samples)
        self._first_positions[:size, 0] = first_positions.index_select(0, prompt_of_row)
        self._mask.zero_()
        self._mask[:size, : self.filled] = prompt_mask.index_select(0, prompt_of_row).long()
        if not self._cache.layers:
            self._cache.layers.extend(
                PlacedLayer(self._span, layer, self.columns, self.places)
                if isinstance(layer, DynamicLayer)
                else layer
                for layer in layers
            )
        for own, layer in zip(self._cache.layers, layers, strict=True):
            if isinstance(own, PlacedLayer):
                own.fill(layer, prompt_of_row, clear=captured)
            else:
                _select_rows(own, prompt_of_row)
        return prompt_of_row

    def take_step(self, model: Any, sampling: Sampling, visible: int | None = None) -> None:
        """Feeds the last token of each row to the model, and samples the next one.

        visible: number of places that attention gets, those not filled hidden by the mask; as many
        as are filled unless given.
        """
        size, last = self.size, self._sampled - 1
        self._span.padded = visible is not None
        self._span.visible = visible = self.filled + 1 if visible is None else visible
        self._span.place.copy_(self._prompt_length + last)
        self._mask.index_fill_(1, self._span.place, 1)
        # Two-dimensional: each architecture derives what its attention needs (a window, a bias by
        # distance). Preparing it here saves nothing that can be measured.
        mask = self._mask[:size, :visible] if self._padded or self._span.padded else None
        self._span.unread_mask = mask is not None and (self._span.padded or not self._read_mask)
        tokens = self.tokens.view(-1).index_select(0, self._cells(last))
        output = model(
            input_ids=fed_tokens(model, tokens)[:, None],
            attention_mask=mask,
            position_ids=self._first_positions[:size] + last,
            **cache_arguments(model, self._cache),
        )
        self.sample(output.logits[:, -1], sampling)

    def sample(self, logits: Tensor, sampling: Sampling) -> None:
        """Samples the next token of each row from logits (size, V)."""
        cells = self._cells(self._sampled)
        tokens, logprobs = sample_tokens(
            logits,
            self._uniforms.view(-1).index_select(0, cells),
            temperature=sampling.temperature,
            top_p=sampling.top_p,
        )
        self.tokens.view(-1).index_copy_(0, cells, tokens)
        self.logprobs.view(-1).index_copy_(0, cells, logprobs)
        self._finished[: self.size].logical_or_((tokens[:, None] == self._ends).any(dim=1))
        self._sampled.add_(1)

    def _cells(self, token: Tensor) -> Tensor:
        """Returns where a token (1,) of each row is in matrices (tokens, columns), (size,)."""
        return token * self.columns + self._column_of_row[: self.size]

    def count_unfinished(self) -> int:
        """Returns the number of rows that are not finished; waits for the device."""
        return int((~self._finished[: self.size]).sum())

    def keep_unfinished(self, size: int) -> None:
        """Keeps `size` rows, all unfinished ones among them, in order."""
        rows = self._finished[: self.size].int().argsort(stable=True)[:size]
        for state in (self._column_of_row, self._finished, self._first_positions, self._mask):
            state[:size] = state.index_select(0, rows)
        for layer in self._cache.layers:
            if isinstance(layer, PlacedLayer):
                layer.keep(rows, self.filled)
            else:
                _select_rows(layer, rows)
        self.size = size

    def state(self) -> tuple[Tensor, Tensor]:
        """Returns a copy of what a step changes and depends on."""
        return self._sampled.clone(), self._finished.clone()

    def rewind(self, state: tuple[Tensor, Tensor]) -> None:
        """Lets the next step be the one after which `state` was taken, once more."""
        self._sampled.copy_(state[0])
        self._finished.copy_(state[1])

    def newest(self) -> tuple[Tensor, Tensor]:
        """Returns copies of the newest tokens and log-probs, each (size,)."""
        cells = self._cells(self._sampled - 1)
        return self.tokens.view(-1)[cells], self.logprobs.view(-1)[cells]


def _select_rows(layer: Any, rows: Tensor) -> None:
    """Replaces a recurrent layer's states by those of `rows`."""
    layer.reorder_cache(rows)
