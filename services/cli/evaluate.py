"""Measures the accuracy of a model directory on held-out prompts, without any service."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bapo_core.config import RunConfig
from bapo_core.errors import BapoError
from bapo_core.metrics import accuracy_bins, pass_at_k
from bapo_core.seeding import derive_seed
from bapo_core.tasks import get_task
from services.cli.service import data_sources
from services.datasets import load_datasets
from services.rollout.api.wire import PromptRequest, Sampling
from services.rollout.collector import tokenize_conversation
from services.verifier.pool import VerifierPool


def evaluate_directory(config: RunConfig, directory: Path) -> dict[str, Any]:
    """Samples every held-out prompt and scores the responses in processes of their own.

    Returns mean accuracy, pass@k, and the number of prompts by correct samples (`bins`). Raises
    `BapoError` when `directory` holds no model.
    """
    if not (directory / "config.json").is_file():
        raise BapoError(f"{directory} is not a model directory: it has no config.json")
    from transformers import AutoTokenizer

    from services.rollout.transformers_engine import TransformersEngine

    _, held_out = load_datasets(config, data_sources())
    tokenizer = AutoTokenizer.from_pretrained(directory)
    task = get_task(config.task.name, **config.task.options)
    samples = config.evaluation_samples
    engine = TransformersEngine()
    engine.load(directory, 1)
    generated = engine.generate(
        [
            PromptRequest(
                prompt_token_ids=tokenize_conversation(tokenizer, task.render(prompt.payload)),
                seed=derive_seed(config.seed, "evaluation", 1, prompt.uid),
            )
            for prompt in held_out.prompts
        ],
        Sampling(
            temperature=config.evaluation_temperature,
            max_tokens=config.rollout.max_response_tokens,
            group_size=samples,
        ),
        policy_version=1,
    )
    responses = [
        (prompt.payload, str(tokenizer.decode(response.token_ids, skip_special_tokens=True)))
        for prompt, group in zip(held_out.prompts, generated, strict=True)
        for response in group.responses
    ]
    pool = VerifierPool(workers=1, deadline_s=5.0)
    try:
        verdicts = pool.verify(config.task.name, config.task.options, responses)
    finally:
        pool.close()
    rewards = [verdict.reward for verdict in verdicts]
    corrects = [
        int(sum(rewards[start : start + samples])) for start in range(0, len(rewards), samples)
    ]
    passes = {
        k: sum(pass_at_k(samples, c, k) for c in corrects) / len(corrects)
        for k in (1, 2, 4, 8, 16, 32)
        if k <= samples
    }
    return {
        "model": str(directory),
        "prompts": len(corrects),
        "samples": samples,
        "mean_accuracy": sum(corrects) / (samples * len(corrects)),
        "bins": accuracy_bins(corrects, samples),
        "pass_at_k": passes,
    }


def show(console: Console, result: dict[str, Any]) -> None:
    """Prints the result as tables."""
    console.print(
        f"{result['model']}: {result['prompts']} prompts, {result['samples']} samples each, "
        f"mean accuracy {result['mean_accuracy']:.4f}",
        highlight=False,
    )
    bins = Table("correct", "prompts", title="prompts by correct samples", title_justify="left")
    for correct, count in enumerate(result["bins"]):
        bins.add_row(str(correct), str(count))
    console.print(bins)
    passes = Table("k", "pass@k")
    for k, value in result["pass_at_k"].items():
        passes.add_row(str(k), f"{value:.4f}")
    console.print(passes)
