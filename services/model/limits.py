"""What a model can take: token ids below its vocabulary size, and so many positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bapo_core.errors import BapoError
from services.model.json_files import read_object, section_of


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """The limits of a model; None where its configuration does not state one."""

    vocabulary: int | None
    """Rows of the embedding; a token id must be below."""
    positions: int | None
    """Tokens of a sequence. Rotary embeddings have no such limit."""

    @classmethod
    def read(cls, directory: Path) -> ModelLimits:
        """Reads the limits from config.json, of the language model if the model reads images.

        Raises `BapoError` for a limit that is no number.
        """
        file = directory / "config.json"
        config = read_object(file)
        text = section_of(config, "text_config", file) or config
        rotary = any("rope" in key or "rotary" in key for key in text)
        positions = text.get("max_position_embeddings") or text.get("n_positions")
        limits = cls(text.get("vocab_size"), None if rotary else positions)
        for limit in (limits.vocabulary, limits.positions):
            if not isinstance(limit, int | None):
                raise BapoError(f"{file}: {limit!r:.80} is no number of tokens; repair the file")
        return limits

    def check_length(self, prompt_tokens: int, response_tokens: int) -> None:
        """Raises `BapoError` if a model without rotary embeddings has too few positions."""
        longest = prompt_tokens + response_tokens
        if self.positions is not None and longest > self.positions:
            raise BapoError(
                f"rollout.max_prompt_tokens ({prompt_tokens}) and rollout.max_response_tokens "
                f"({response_tokens}) are {longest} tokens, but the model has {self.positions} "
                "positions; lower them, or choose another model"
            )

    def check_ids(self, token_ids: Sequence[int]) -> None:
        """Raises `BapoError` for a token id that is beyond the model's embedding."""
        largest = max(token_ids, default=0)
        if self.vocabulary is not None and largest >= self.vocabulary:
            raise BapoError(
                f"the tokenizer gives the token id {largest}, but the model's embedding has "
                f"{self.vocabulary} rows; resize the embedding after tokens were added, or take "
                "the model's own tokenizer"
            )
