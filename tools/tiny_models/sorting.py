"""The tiny base model that sorts digits: the architecture and the tokenizer of `tiny`.

Its warm start on sorted digits is so short that it sorts few numbers correctly and many almost:
a base model with prompts of every difficulty, which reinforcement learning improves within minutes.
"""

from __future__ import annotations

from pathlib import Path

from bapo_core.seeding import derive_rng
from bapo_core.tasks.sorting import SortingTask
from tools.model_directory import write_directory
from tools.tiny_models.text import BATCH, build_tokenizer, warm_start
from tools.tiny_models.warm_start import Progress

STEPS = 55
"""With these steps, about one response of five is correct."""

TASK = SortingTask()


def build_tiny_sorting_model(
    directory: Path, *, seed: int, steps: int = STEPS, progress: Progress | None = None
) -> None:
    """Trains the model and writes it to `directory`, all files or none.

    seed: determines the weights.
    steps: steps of the warm start, each on problems that it has not seen.
    progress: called after each step with (steps done, all steps, loss).

    Raises `BapoError` if `directory` has files.
    """
    with write_directory(directory) as partial:
        tokenizer = build_tokenizer()
        rng = derive_rng(seed, "tiny-sorting", "examples")
        numbers = [TASK.random_digits(rng) for _ in range(steps * BATCH)]
        examples = [
            (
                tokenizer.encode(f"{digits}="),
                [*tokenizer.encode("".join(sorted(digits))), tokenizer.eos_token_id],
            )
            for digits in numbers
        ]
        model = warm_start(
            tokenizer, examples, "tiny-sorting", seed=seed, steps=steps, progress=progress
        )
        model.save_pretrained(partial, safe_serialization=True)
        tokenizer.save_pretrained(partial)
