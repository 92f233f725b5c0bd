"""Measures how far the log-probs of the rollout engine and of the trainer differ.

Generates with the engine of a configuration, scores the same tokens with the trainer's code, and
compares. A difference biases every importance ratio of a run. A different dtype or kernel shifts
log-probs slightly; a wrong temperature, truncation or stale weights shifts them a lot.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from bapo_core.config import RunConfig
from bapo_core.errors import BapoError
from bapo_core.importance import mismatch_metrics, weight_metrics
from bapo_core.seeding import derive_seed
from bapo_core.tasks import get_task
from services.buffer.api.trajectories import TrajectoryGroup, TrajectoryResponse, table_of
from services.buffer.api.wire import PromptItem
from services.cli.service import data_sources
from services.datasets import load_datasets, tokenize_prompt
from services.datasets.images import image_digests
from services.model.conversation import load_tokenizer
from services.model.vision import OpenImage, check_model, load_processor
from services.rollout.api.wire import GeneratedGroup, GenerateRequest, PromptRequest
from services.rollout.server import make_driver
from services.rollout.settings import VllmSettings
from services.trainer.data import collate, microbatches, read_pixels
from services.trainer.policy import response_logprobs
from services.trainer.ranks import init_distributed
from services.trainer.shard import load_sharded

MICROBATCH_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Upper limits of the metrics, and the lower limit of `ess_fraction`."""

    logprob_diff_mean: float
    logprob_diff_max: float
    mismatch_kl: float
    ess_fraction: float


TOLERANCES = {
    "float32": Tolerance(1e-5, 1e-3, 1e-7, 0.9999),
    "bfloat16": Tolerance(0.02, 1.0, 1e-3, 0.98),
}


@dataclass(frozen=True, slots=True)
class Parity:
    """Metrics of the mismatch over a number of tokens, with their limits."""

    tokens: int
    responses: int
    metrics: dict[str, float]
    tolerance: Tolerance

    def failures(self) -> list[str]:
        """Returns the names of the metrics that are out of tolerance."""
        limits = self.tolerance
        failures = [
            name
            for name in ("logprob_diff_mean", "logprob_diff_max", "mismatch_kl")
            if not self.metrics[name] <= getattr(limits, name)
        ]
        if not self.metrics["ess_fraction"] >= limits.ess_fraction:
            failures.append("ess_fraction")
        return failures


def measure_parity(config: RunConfig, model: Path, *, prompts: int) -> Parity:
    """Generates for the first `prompts` training prompts and scores the same tokens.

    Raises `BapoError` when the engine refuses a prompt.
    """
    train = load_datasets(config, data_sources()).train
    open_image = None
    if train.images is not None:
        check_model(model, config.rollout.engine.kind)
        open_image = train.images.get
    request, groups = asyncio.run(_generate(config, model, train.prompts[:prompts], open_image))
    refused = [group.refused for group in groups if group.refused]
    if refused:
        raise BapoError(f"the engine refuses a prompt: {refused[0]}")
    batch = collate(
        None,
        table_of(
            [
                TrajectoryGroup(
                    prompt_uid=str(group.index),
                    prompt_token_ids=prompt.prompt_token_ids,
                    policy_version=group.policy_version,
                    responses=[
                        TrajectoryResponse(
                            r.token_ids, r.logprobs, 0.0, r.finish_reason, "", correct=False
                        )
                        for r in group.responses
                    ],
                )
                for prompt, group in zip(request.prompts, groups, strict=True)
            ]
        ),
    )
    if open_image is not None:
        images = [prompt.images for prompt in request.prompts]
        batch = replace(batch, pixels=read_pixels(images, load_processor(model), open_image))
    trainer_logprobs = torch.zeros_like(batch.behavior_logprobs)
    all_rows = torch.arange(len(batch.tokens))
    # On a GPU, as a trainer does: sharding is what makes it compute in bfloat16.
    with init_distributed() as ranks, torch.no_grad():
        policy = load_sharded(model, ranks, prepare=lambda policy: policy)
        for rows in microbatches(batch, all_rows, MICROBATCH_TOKENS, padded=not policy.packs):
            trainer_logprobs[rows] = response_logprobs(policy, batch, rows, request.temperature)[0]
    logprobs = (trainer_logprobs, batch.behavior_logprobs, batch.mask)
    metrics = mismatch_metrics(*logprobs) | weight_metrics(
        *logprobs, **config.loss.correction.weighting
    )
    engine = config.rollout.engine
    half = torch.cuda.is_available() or (engine.kind == "vllm" and engine.dtype == "bfloat16")
    tolerance = TOLERANCES["bfloat16" if half else "float32"]
    return Parity(int(batch.mask.sum()), len(batch.tokens), metrics, tolerance)


async def _generate(
    config: RunConfig,
    model: Path,
    prompts: Sequence[PromptItem],
    open_image: OpenImage | None,
) -> tuple[GenerateRequest, list[GeneratedGroup]]:
    tokenizer, vision = load_tokenizer(model), load_processor(model)
    task = get_task(config.task.name, **config.task.arguments)
    rollout = config.rollout
    request = GenerateRequest(
        policy_version=1,
        manifest_digest="",
        temperature=rollout.temperature,
        max_tokens=rollout.max_response_tokens,
        group_size=rollout.group_size,
        prompts=[
            PromptRequest(
                prompt_token_ids=tokenize_prompt(
                    task, prompt, tokenizer, vision, rollout.prompt_date
                ),
                images=image_digests(prompt.payload),
                seed=derive_seed(config.seed, "doctor", prompt.uid),
            )
            for prompt in prompts
        ],
    )
    with tempfile.TemporaryDirectory(prefix="bapo-doctor-") as scratch:
        driver = make_driver(config, Path(scratch), VllmSettings(), open_image)
        try:
            await driver.load(model, 1)
            generated = [line async for line in driver.generate(request)]
        finally:
            await driver.close()
    groups = [line for line in generated if isinstance(line, GeneratedGroup)]
    return request, sorted(groups, key=lambda group: group.index)


def show(console: Console, config: RunConfig, parity: Parity) -> None:
    """Prints the metrics and their limits as a table."""
    title = (
        f"{config.rollout.engine.kind} against the trainer: {parity.responses} responses, "
        f"{parity.tokens} tokens"
    )
    table = Table("", "measured", "tolerance", title=title, title_justify="left")
    failures = parity.failures()
    for name, label in (
        ("logprob_diff_mean", "|Δ log-prob|, mean"),
        ("logprob_diff_max", "|Δ log-prob|, largest"),
        ("mismatch_kl", "KL(engine || trainer), nats a token"),
        ("ess_fraction", "effective share of samples"),
    ):
        limit = getattr(parity.tolerance, name)
        sign = "≥" if name == "ess_fraction" else "≤"
        mark = "✗" if name in failures else "✓"
        table.add_row(label, f"{parity.metrics[name]:.3g}", f"{sign} {limit:g} {mark}")
    console.print(table)
