"""Computes hidden states of packed sequences, with or without padding, and with their images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from services.model.vision import (
    IN_WINDOWS,
    ON_A_GRID,
    Pixels,
    fed_tokens,
    number_images,
    rope_positions,
    token_types,
)
from services.trainer import attention
from services.trainer.blank_images import blank_prompt, has_sharded_tower, idle_tower_output
from services.trainer.data import Packed
from services.trainer.families import base_model_of, is_sharded


def target_hidden_states(model: Any, packed: Packed) -> Tensor:
    """Returns the hidden states (K, width) from which the response tokens are predicted."""
    tokens, responses = packed.tokens.clone(), packed.response_positions
    tokens[0, responses] = fed_tokens(model, tokens[0, responses])
    # Before the language model, because every rank must gather the layers in the same order.
    idle = None
    if not packed.pixels and has_sharded_tower(model):
        idle = idle_tower_output(model)
    compute = _packed_hidden_states if packs(model) else _padded_hidden_states
    hidden = compute(model, packed, tokens)
    if idle is not None:
        hidden = hidden + idle.to(hidden.dtype)
    return hidden[packed.logit_positions]


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
            position_ids = multimodal_positions(base_model_of(model), tokens, packed)
    hidden: Tensor = base_model_of(model)(
        input_ids=tokens,
        position_ids=position_ids,
        attention_mask=None,
        use_cache=False,
        sequences=sequences,
        **images,
    ).last_hidden_state[0]
    return hidden


def multimodal_positions(base_model: Any, tokens: Tensor, packed: Packed) -> Tensor:
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


def _padded_hidden_states(model: Any, packed: Packed, tokens: Tensor) -> Tensor:
    """Returns the same as `_packed_hidden_states`, with each sequence computed as a padded row.

    Prompts and their images are computed again for each of their responses.
    """
    sequences = packed.sequences
    rows, lengths = tokens[0][sequences.pad_indices], sequences.cu_seqlens.diff()
    count, width = rows.shape
    images = [packed.pixels[index] for index in packed.images if index is not None]
    blank = blank_prompt(model) if not images else None
    if blank is not None and is_sharded(model):
        # The ranks gather the vision tower together: one without images adds a row with one.
        rows, lengths = _append_row(rows, lengths, blank.tokens.to(rows.device))
        images = [blank.pixels.to(rows.device)]
    hidden = hidden_states_of_rows(model, rows, lengths, images)
    idle = hidden[count:].sum() * 0.0
    return hidden[:count, :width].flatten(0, 1)[sequences.unpad_indices] + idle


def _append_row(rows: Tensor, lengths: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the padded rows (n + 1, L) and their lengths, with `row` as the last one."""
    width = max(rows.shape[1], len(row))
    padded = rows.new_zeros(len(rows) + 1, width)
    padded[:-1, : rows.shape[1]] = rows
    padded[-1, : len(row)] = row
    return padded, torch.cat([lengths, lengths.new_tensor([len(row)])])


def hidden_states_of_rows(
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
