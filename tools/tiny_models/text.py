"""The tiny base model: small enough for a laptop's processor, real enough to learn.

It is an ordinary Hugging Face directory with Qwen3's architecture and a character tokenizer. It is
warm-started on random valid Countdown expressions, a quarter of which have their own value as the
target, so that it almost always writes well-formed answers and seldom correct ones: a base model
with a tail of hard prompts.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from bapo_core.seeding import derive_rng, derive_seed
from bapo_core.tasks.countdown import CountdownTask, random_expression
from tools.model_directory import write_directory
from tools.tiny_models.character_tokenizer import build_character_tokenizer
from tools.tiny_models.warm_start import (
    Progress,
    draw_batches,
    fit,
    pad_examples,
    two_threads,
)

PAD, END = "<pad>", "<eos>"
CHARACTERS = "0123456789+-*/()= :"
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"

STEPS = 400
BATCH = 128
EXAMPLES = 24_000
"""Distinct training examples. Each is seen about twice (400 steps of 128)."""
AIMED = 0.25
"""Share of the examples whose target is the value of their expression."""

TASK = CountdownTask(template="short")


def build_tiny_model(
    directory: Path,
    *,
    seed: int,
    steps: int = STEPS,
    task: CountdownTask = TASK,
    progress: Progress | None = None,
) -> None:
    """Trains the model and writes it to `directory`, all files or none.

    seed: determines the weights.
    steps: steps of the warm start.
    task: task whose prompts the model can read.
    progress: called after each step with (steps done, all steps, loss).

    Raises `BapoError` if `directory` has files.
    """
    with write_directory(directory) as partial:
        tokenizer = build_tokenizer()
        examples = _examples(tokenizer, task, derive_rng(seed, "tiny", "examples"))
        model = warm_start(tokenizer, examples, "tiny", seed=seed, steps=steps, progress=progress)
        model.save_pretrained(partial, safe_serialization=True)
        tokenizer.save_pretrained(partial)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Builds a tokenizer with one token for each character; an unknown character raises."""
    return build_character_tokenizer(
        (PAD, END), CHARACTERS, chat_template=CHAT_TEMPLATE, max_length=128
    )


def model_config(vocabulary_size: int) -> Qwen3Config:
    """Returns the configuration of a Qwen3 model with 0.85 M parameters.

    The embeddings are not tied: vLLM on CPUs mishandles tied ones after a reload.
    """
    return Qwen3Config(
        vocab_size=vocabulary_size,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )


def warm_start(
    tokenizer: PreTrainedTokenizerFast,
    examples: Sequence[tuple[list[int], list[int]]],
    name: str,
    *,
    seed: int,
    steps: int,
    progress: Progress | None,
) -> Qwen3ForCausalLM:
    """Trains a model of random weights on (prompt, response) token ids.

    name: name of the model, which determines the weights together with the seed.
    """
    with two_threads():
        with torch.random.fork_rng():
            torch.manual_seed(derive_seed(seed, name, "weights"))
            model = Qwen3ForCausalLM(model_config(len(tokenizer)))
        model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
            eos_token_id=1, pad_token_id=0
        )
        order = derive_rng(seed, name, "order")
        done = count(1)

        def losses() -> Iterator[Tensor]:
            for batch in draw_batches(len(examples), BATCH, order):
                tokens, labels = pad_examples([examples[index] for index in batch])
                yield model(input_ids=tokens, labels=labels).loss

        def show(loss: float) -> None:
            if progress is not None:
                progress(next(done), steps, loss)

        model.train()
        fit(list(model.parameters()), losses(), steps, show)
        model.train(False)
    return model


def _examples(
    tokenizer: PreTrainedTokenizerFast, task: CountdownTask, rng: random.Random
) -> list[tuple[list[int], list[int]]]:
    """Returns (prompt, response) token ids; the prompts are rendered by the task."""
    examples: list[tuple[list[int], list[int]]] = []
    while len(examples) < EXAMPLES:
        numbers = [rng.randint(1, task.max_number) for _ in range(rng.choice(task.numbers))]
        text, value = random_expression(numbers, rng)
        target = rng.randint(task.min_target, task.max_target)
        if len(examples) < AIMED * EXAMPLES:
            if value.denominator != 1 or not task.min_target <= value <= task.max_target:
                continue
            target = int(value)
        (message,) = task.render({"nums": numbers, "target": target})
        prompt = tokenizer.encode(message["content"])
        examples.append((prompt, [*tokenizer.encode(text), tokenizer.eos_token_id]))
    return examples
