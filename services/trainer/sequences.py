"""Bounds of packed sequences, and how sequences share the tokens of a prompt."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from services.trainer.transfer import send


@dataclass(frozen=True)
class Sequences:
    """Bounds of n sequences of S tokens: i is in `cu_seqlens[i]` to `cu_seqlens[i + 1]`.

    The T packed tokens are the same S tokens, or fewer if sequences share prompts.
    """

    cu_seqlens: Tensor
    """(n + 1,) int32 cumulative sequence lengths, from 0 on."""
    max_seqlen: int
    """Tokens of the longest sequence."""
    sources: Tensor | None = None
    """(S,) index of the packed token that each token is; None if none is shared, so that S = T."""
    kept: Tensor | None = None
    """(T,) index among the S tokens of the first one that each packed token is; None as above."""
    images: Tensor | None = None
    """(T,) number of the image that each packed token belongs to, and 0 for text, if the tokens of
    an image attend to all tokens of this image; otherwise None."""
    images_in_window: bool = False
    """Whether they do so within a sliding window alone, and not in layers without one."""

    @classmethod
    def of(cls, lengths: Tensor) -> Sequences:
        """Builds the bounds of sequences of these `lengths`, (n,)."""
        cu_seqlens = torch.zeros(len(lengths) + 1, dtype=torch.int32)
        cu_seqlens[1:] = lengths.cumsum(0)
        return cls(cu_seqlens, int(lengths.max()))

    @cached_property
    def sequence_ids(self) -> Tensor:
        """(S,) index of the sequence that each token belongs to."""
        lengths = self.cu_seqlens.diff().long()
        return torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)

    @cached_property
    def position_ids(self) -> Tensor:
        """(S,) position of each token in its sequence, from 0 on."""
        tokens = torch.arange(len(self.sequence_ids), device=self.sequence_ids.device)
        return tokens - self.cu_seqlens[:-1].long()[self.sequence_ids]

    @cached_property
    def pad_indices(self) -> Tensor:
        """(n, max_seqlen) indexes into the packed tokens that lay them out as padded sequences.

        Padding is the last token of the sequence again.
        """
        starts = self.cu_seqlens[:-1, None].long()
        ends = self.cu_seqlens[1:, None].long()
        columns = torch.arange(self.max_seqlen, device=starts.device)
        return self.packed_indices(torch.minimum(starts + columns, ends - 1))

    @cached_property
    def unpad_indices(self) -> Tensor:
        """(T,) indexes into the flattened padded sequences that pack them again."""
        return self.keep(self.sequence_ids * self.max_seqlen + self.position_ids)

    def share_prompts(self, prompt_lengths: Tensor, prompts: Tensor) -> Sequences:
        """Returns these sequences with every prompt packed once, where its first sequence begins.

        prompt_lengths: (n,) tokens with which the sequences begin. prompts: (n,) number of each
        sequence's prompt; those of one number begin with the same tokens.
        """
        numbers, prompt = torch.unique(prompts, return_inverse=True)
        if len(numbers) == len(prompts):
            return self
        sequence = torch.arange(len(prompts))
        first = sequence.new_full((len(numbers),), len(prompts))
        owner = first.scatter_reduce(0, prompt, sequence, "amin")[prompt]
        shared = (owner != sequence)[self.sequence_ids]
        shared &= self.position_ids < prompt_lengths[self.sequence_ids]
        packed = (~shared).cumsum(0) - 1
        owned = self.cu_seqlens[:-1].long()[owner][self.sequence_ids] + self.position_ids
        return replace(
            self,
            sources=torch.where(shared, packed[torch.where(shared, owned, 0)], packed),
            kept=torch.nonzero(~shared)[:, 0],
        )

    def keep(self, values: Tensor) -> Tensor:
        """Returns values (S, ...) of the sequences' tokens as (T, ...) of the packed ones."""
        return values if self.kept is None else values[self.kept]

    def spread(self, values: Tensor) -> Tensor:
        """Returns values (T, ...) of the packed tokens as (S, ...) of the sequences'."""
        return values if self.sources is None else values[self.sources]

    def packed_indices(self, tokens: Tensor) -> Tensor:
        """Returns the indexes among the packed tokens of these of the S tokens."""
        return tokens if self.sources is None else self.sources[tokens]

    def tensors(self) -> dict[str, Tensor]:
        """Returns the tensors of these bounds by the names of their fields."""
        names = ("cu_seqlens", "sources", "kept", "images")
        values = ((name, getattr(self, name)) for name in names)
        return {name: tensor for name, tensor in values if tensor is not None}

    def to(self, device: torch.device) -> Sequences:
        """Returns a copy on `device`."""
        tensors = self.tensors()
        moved: dict[str, Any] = dict(
            zip(tensors, send(list(tensors.values()), device), strict=True)
        )
        return replace(self, **moved)
