"""The tiny base models of tasks on digits: the architecture and the tokenizer of `tiny`.

Their warm start is so short that they answer few prompts correctly and many almost: base models
with prompts of every difficulty, which reinforcement learning improves within minutes.
"""

from __future__ import annotations

from pathlib import Path

from bapo_core.seeding import derive_rng
from bapo_core.tasks.digits import DigitsTask, DistinctTask, SortingTask
from tools.model_directory import write_directory
from tools.tiny_models.text import BATCH, build_tokenizer, warm_start
from tools.tiny_models.warm_start import Progress

SORTING_STEPS = 55
"""With these steps, about one response of five is correct."""
DISTINCT_STEPS = 53
"""With these steps, about one response of five is correct."""


def build_tiny_sorting_model(
    directory: Path, *, seed: int, steps: int = SORTING_STEPS, progress: Progress | None = None
) -> None:
    """Trains the model that sorts digits, as `build_digits_model` does."""
    build_digits_model(directory, SortingTask(), seed=seed, steps=steps, progress=progress)


def build_tiny_distinct_model(
    directory: Path, *, seed: int, steps: int = DISTINCT_STEPS, progress: Progress | None = None
) -> None:
    """Trains the model that leaves out repeated digits, as `build_digits_model` does."""
    build_digits_model(directory, DistinctTask(), seed=seed, steps=steps, progress=progress)


def build_digits_model(
    directory: Path, task: DigitsTask, *, seed: int, steps: int, progress: Progress | None = None
) -> None:
    """Trains a model on a task's answers and writes it to `directory`, all files or none.

    seed: determines the weights, together with the task's name.
    steps: steps of the warm start, each on problems that it has not seen.
    progress: called after each step with (steps done, all steps, loss).

    Raises `BapoError` if `directory` has files.
    """
    name = f"tiny-{task.name}"
    with write_directory(directory) as partial:
        tokenizer = build_tokenizer()
        rng = derive_rng(seed, name, "examples")
        numbers = [task.random_digits(rng) for _ in range(steps * BATCH)]
        examples = [
            (
                tokenizer.encode(f"{digits}="),
                [*tokenizer.encode(task.solve(digits)), tokenizer.eos_token_id],
            )
            for digits in numbers
        ]
        model = warm_start(tokenizer, examples, name, seed=seed, steps=steps, progress=progress)
        model.save_pretrained(partial, safe_serialization=True)
        tokenizer.save_pretrained(partial)
