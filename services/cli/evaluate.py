"""Measures accuracy and reward of a model on evaluation sets, without any service."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from rich.console import Console
from rich.progress import track

from bapo_core.config import RunConfig
from bapo_core.config.evaluation import EvaluationSet
from bapo_core.errors import BapoError
from bapo_core.metrics import (
    accuracy_bins,
    majority_at_k,
    mean_score,
    sample_counts,
    scores_of_bins,
)
from bapo_core.outcomes import has_answer
from bapo_core.rewards import reward_parts, total_reward
from bapo_core.seeding import derive_seed
from bapo_core.tasks import get_task, normalise_answer
from services.buffer.api.wire import Evaluation, Score
from services.cli.console import plain_console
from services.cli.progress import PLAIN_EVERY_S
from services.cli.responses import SampledResponse
from services.cli.reward_files import read_reward_file
from services.cli.service import data_sources
from services.common.images import decode_image
from services.datasets import Dataset, load_datasets, load_evaluation_sets, tokenize_prompt
from services.datasets.images import image_digests
from services.model.conversation import decode_response, load_tokenizer
from services.model.limits import ModelLimits
from services.model.vision import OpenImage, VisionProcessor, check_model, load_processor
from services.rollout.api.wire import GeneratedGroup, PromptRequest, Sampling
from services.rollout.transformers_engine import TransformersEngine
from services.verifier.api.trial import verifier_options
from services.verifier.api.wire import ItemVerdict
from services.verifier.pool import VerifierPool

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Value = TypeVar("Value")

PROMPTS_AT_ONCE = 16
"""Prompts between two movements of the progress bar."""


def evaluate_directory(
    config: RunConfig,
    directory: Path,
    *,
    blank_images: bool = False,
    note: Callable[[str], None] = lambda _: None,
    keep: Callable[[SampledResponse], None] = lambda _: None,
) -> list[Evaluation]:
    """Samples the prompts of every evaluation set and scores the responses.

    The model counts as policy version 1.

    blank_images: whether the model is shown white images of the same sizes. note: takes a line on
    a data set of which something was left out or cannot be read. keep: takes each response, in
    order, once all of its set are scored.

    Raises `BapoError` when `directory` holds no model, when a set cannot be read, and when images
    are to be blank but no prompt has one, and when the reward function fails on all responses.
    """
    if not (directory / "config.json").is_file():
        raise BapoError(f"{directory} is not a model directory: it has no config.json")

    held_out = _load_held_out(config)
    for dataset in held_out.values():
        if dataset.notes:
            note(f"{dataset.name}: {dataset.summary}")
    open_image = _make_image_opener(held_out, directory)
    if blank_images:
        if open_image is None:
            raise BapoError("no prompt has an image; leave out --blank-images")
        open_image = blank_image_opener(open_image)
    engine = TransformersEngine(open_image=open_image)
    engine.load(directory, 1)
    tokenizer, vision = load_tokenizer(directory), load_processor(directory)
    limits = ModelLimits.read(directory)
    return [
        _evaluate_set(config, settings, held_out[name], engine, tokenizer, vision, limits, keep)
        for name, settings in config.evaluation_sets.items()
    ]


def _load_held_out(config: RunConfig) -> dict[str, Dataset]:
    """Returns the prompts of each set; generated ones depend on how many are for training.

    The training data need not be there otherwise.
    """
    if config.evaluation.sets or config.task.test_path is not None:
        return load_evaluation_sets(config, data_sources())
    return load_datasets(config, data_sources()).test


def _make_image_opener(held_out: Mapping[str, Dataset], directory: Path) -> OpenImage | None:
    """Returns a function that opens the images of prompts; None if they have none.

    Raises `BapoError` unless the model takes images.
    """
    images = [dataset.images for dataset in held_out.values() if dataset.images is not None]
    if not images:
        return None
    check_model(directory)

    def open_image(digest: str) -> bytes:
        with_image = [stored for stored in images if digest in stored.digests]
        return (with_image or images)[0].get(digest)

    return open_image


def blank_image_opener(open_image: OpenImage) -> OpenImage:
    """Returns a function that opens a white image in place of each image, of the same size."""

    def open_blank(digest: str) -> bytes:
        from PIL import Image

        buffer = io.BytesIO()
        size = decode_image(open_image(digest)).size
        Image.new("RGB", size, "white").save(buffer, format="PNG")
        return buffer.getvalue()

    return open_blank


def _evaluate_set(
    config: RunConfig,
    settings: EvaluationSet,
    dataset: Dataset,
    engine: TransformersEngine,
    tokenizer: PreTrainedTokenizerBase,
    vision: VisionProcessor | None,
    limits: ModelLimits,
    keep: Callable[[SampledResponse], None],
) -> Evaluation:
    task = get_task(config.task.name, **settings.options)
    limits.check_length(config.rollout.max_prompt_tokens, config.rollout.max_response_tokens)
    requests = [
        PromptRequest(
            prompt_token_ids=tokenize_prompt(
                task, prompt, tokenizer, vision, config.rollout.prompt_date
            ),
            images=image_digests(prompt.payload),
            seed=derive_seed(config.seed, "evaluation", 1, prompt.uid),
        )
        for prompt in dataset.prompts
    ]
    for request in requests:
        limits.check_ids(request.prompt_token_ids)
    groups = list(_generate(config, settings, engine, requests))
    responses = [
        (
            prompt.payload,
            decode_response(tokenizer, response.token_ids, ended=response.finish_reason == "stop"),
        )
        for prompt, group in zip(dataset.prompts, groups, strict=True)
        for response in group.responses
    ]
    functions = config.task.functions
    text = None if functions is None else read_reward_file(functions)
    pool = VerifierPool(workers=1, deadline_s=5.0)
    try:
        verdicts = pool.verify(task.name, verifier_options(settings.options, text), responses)
    finally:
        pool.close()
    n, solved_at = settings.samples, config.task.solved_at
    generated = [response for group in groups for response in group.responses]
    for number, (response, verdict) in enumerate(zip(generated, verdicts, strict=True)):
        prompt = dataset.prompts[number // n]
        keep(
            SampledResponse(
                evaluation_set=settings.name,
                prompt_uid=prompt.uid,
                payload=prompt.payload,
                index=number % n,
                text=responses[number][1],
                reward=verdict.reward,
                correct=verdict.is_correct(solved_at),
                reward_parts=verdict.parts,
                finish_reason=response.finish_reason,
                outcome=verdict.outcome,
                status=verdict.status,
                extracted=verdict.extracted,
                failure=verdict.failure if verdict.failed else None,
                tokens=len(response.token_ids),
            )
        )
    _note_failures(task.name, settings.name, verdicts)
    _note_cut_off(settings.name, groups, config.rollout.max_response_tokens)
    correct = _split_by_prompt([verdict.is_correct(solved_at) for verdict in verdicts], n)
    answers = _split_by_prompt(
        [normalise_answer(task, verdict.extracted) for verdict in verdicts], n
    )
    bins = accuracy_bins([sum(group) for group in correct], n)
    # Without an answer there is no majority, as for rewards of any number.
    majority = [
        mean_score(
            "maj", k, [majority_at_k(*pair, k) for pair in zip(answers, correct, strict=True)]
        )
        for k in (sample_counts(n) if any(map(any, answers)) else [])
    ]
    sampled = [response for group in groups for response in group.responses]
    rewards = [
        compute_reward(config, verdict, len(response.token_ids))
        for verdict, response in zip(verdicts, sampled, strict=True)
    ]
    return Evaluation(
        version=1,
        evaluation_set=settings.name,
        mean_accuracy=sum(map(sum, correct)) / len(verdicts),
        mean_reward=sum(rewards) / len(rewards),
        bins=bins,
        prompts=len(correct),
        tokens=sum(len(response.token_ids) for response in sampled),
        scores=[Score(**asdict(score)) for score in [*scores_of_bins(bins), *majority]],
    )


def compute_reward(config: RunConfig, verdict: ItemVerdict, tokens: int) -> float:
    """Returns the reward that a run with this configuration gives to a response of `tokens`."""
    parts = reward_parts(
        verdict.reward,
        verdict.parts,
        tokens=tokens,
        max_tokens=config.rollout.max_response_tokens,
        settings=config.reward,
        failed=verdict.failed,
    )
    return total_reward(parts, config.reward)


def _note_failures(task: str, evaluation_set: str, verdicts: Sequence[ItemVerdict]) -> None:
    """Says on standard error on how many responses the reward function failed.

    Raises `BapoError` if it failed on all of them: an accuracy of 0 would not be the model's.
    """
    lost = sum(not has_answer(verdict.outcome) for verdict in verdicts)
    if lost:
        raise BapoError(
            f"the verifier lost its workers on {lost} of {len(verdicts)} responses to "
            f"{evaluation_set}, which are not the cause; give the machine more memory"
        )
    failures = [verdict for verdict in verdicts if verdict.failed]
    if not failures:
        return
    failed = f"the reward function of task {task} failed on"
    where, reason = f"the {len(verdicts)} responses to {evaluation_set}", failures[0].failure
    if len(failures) == len(verdicts):
        raise BapoError(f"{failed} all of {where}: {reason}; fix its `verify`")
    plain_console(stderr=True).print(
        f"note: {failed} {len(failures)} of {where}, which count as wrong: {reason}",
        soft_wrap=True,
    )


def _note_cut_off(evaluation_set: str, groups: Sequence[GeneratedGroup], limit: int) -> None:
    """Says on standard error how many of the responses reached the length limit, if any did."""
    reasons = [response.finish_reason for group in groups for response in group.responses]
    cut_off = reasons.count("length")
    if not cut_off:
        return
    advice = ", and rarely hold an answer; raise the limit" if 2 * cut_off > len(reasons) else ""
    plain_console(stderr=True).print(
        f"note: {cut_off:,} of {len(reasons):,} responses to {evaluation_set} were cut off at "
        f"{limit} tokens (rollout.max_response_tokens){advice}",
        soft_wrap=True,
    )


def _split_by_prompt(values: Sequence[Value], samples: int) -> list[Sequence[Value]]:
    return [values[start : start + samples] for start in range(0, len(values), samples)]


def _generate(
    config: RunConfig,
    settings: EvaluationSet,
    engine: TransformersEngine,
    requests: Sequence[PromptRequest],
) -> Iterator[GeneratedGroup]:
    """Yields the group of each request in order, and shows the progress on standard error."""
    sampling = Sampling(
        temperature=settings.temperature,
        top_p=settings.top_p,
        max_tokens=config.rollout.max_response_tokens,
        group_size=settings.samples,
    )
    for start in show_progress(settings.name, len(requests), plain_console(stderr=True)):
        yield from engine.generate(
            requests[start : start + PROMPTS_AT_ONCE], sampling, policy_version=1
        )


def show_progress(
    name: str, prompts: int, console: Console, clock: Callable[[], float] = time.monotonic
) -> Iterator[int]:
    """Yields the position of every `PROMPTS_AT_ONCE`-th prompt, and shows how far that is.

    A terminal has a bar; elsewhere a line is printed from time to time.

    name: of the evaluation set. clock: returns seconds.
    """
    starts = range(0, prompts, PROMPTS_AT_ONCE)
    if console.is_terminal:
        yield from track(starts, name, console=console, transient=True)
        return
    last_line: float | None = None
    for start in starts:
        if last_line is None or clock() - last_line > PLAIN_EVERY_S:
            last_line = clock()
            console.print(f"{name}: {start} of {prompts} prompts", soft_wrap=True)
        yield start
