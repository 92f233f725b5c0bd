"""Runs TRL's side of `benchmarks.trl`: its `GRPOTrainer` on given responses, without generation.

    PYTHONPATH=.trl python -m benchmarks.trl_theirs SIDE OUT

`rollout_func` is TRL's own interface for responses with their behaviour log-probs. From there
on everything is TRL's: padding, advantages, scoring, micro-batches, loss, optimizer. Of the
preparation of a step, the scoring is measured; padding, decoding and rewards are not.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import trl.trainer.utils  # type: ignore[import-not-found]
from datasets import Dataset  # type: ignore[import-not-found]
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.trl_steps import (
    CLIP,
    GRADIENT_CLIP,
    LEARNING_RATE,
    WARM_UP_TOKENS,
    WEIGHT_CAP,
    Group,
    Instant,
    Meter,
    Side,
    finish,
    read_side,
)


class Replayed:
    """Gives the trainer the batch's responses, truncated in the first step."""

    def __init__(self, groups: list[Group]) -> None:
        self.groups, self.calls = groups, 0

    def __call__(self, prompts: list[str], _: Any) -> dict[str, list[Any]]:
        self.calls += 1
        next_response: Counter[str] = Counter()
        columns: dict[str, list[Any]] = {
            name: [] for name in ("prompt_ids", "completion_ids", "logprobs", "reward")
        }
        for prompt in prompts:
            group = self.groups[int(prompt)]
            if self.calls == 1:
                group = group.truncate(WARM_UP_TOKENS)
            response = group.responses[next_response[prompt]]
            next_response[prompt] += 1
            columns["prompt_ids"].append(group.prompt)
            columns["completion_ids"].append(response.tokens)
            columns["logprobs"].append(response.logprobs)
            columns["reward"].append(response.reward)
        return columns


def stored_reward(reward: list[float], **_: Any) -> list[float]:
    return reward


class Measured(GRPOTrainer):  # type: ignore[misc]
    """Measures how long the preparation of a step takes, without the scoring."""

    preparing = scoring = (0.0, 0.0)

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        started = Instant()
        self.scoring = (0.0, 0.0)
        completions = super()._generate_and_score_completions(inputs)
        spent = _since(started)
        self.preparing = (spent[0] - self.scoring[0], spent[1] - self.scoring[1])
        return completions

    def _get_per_token_logps_and_entropies(self, *arguments: Any, **named: Any) -> Any:
        started = Instant()
        scores = super()._get_per_token_logps_and_entropies(*arguments, **named)
        self.scoring = _since(started)
        return scores


def _since(started: Instant) -> tuple[float, float]:
    now = Instant()
    return now.seconds - started.seconds, now.cpu_seconds - started.cpu_seconds


class Watch(TrainerCallback):
    def __init__(self, meter: Meter) -> None:
        self.meter = meter
        self.trainer: Any = None
        self.started = Instant()

    def on_step_begin(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        if state.global_step == 1:
            self.meter.reset(named["model"])
        self.started = Instant()

    def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        seconds, cpu_seconds = _since(self.started)
        if state.global_step > 1:
            excluded = self.trainer.preparing
            self.meter.add(seconds - excluded[0], cpu_seconds - excluded[1])


def tokenizer() -> PreTrainedTokenizerFast:
    """Builds a tokenizer of one word, because the trainer requires one."""
    backend = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "word": 2}, unk_token="word"))
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>"
    )


def arguments(side: Side, groups: list[Group], directory: str) -> GRPOConfig:
    size = len(groups[0].responses)
    return GRPOConfig(
        output_dir=directory,
        use_cpu=not torch.cuda.is_available(),
        bf16=torch.cuda.is_available(),
        use_liger_kernel=side.liger,
        max_steps=side.steps + 1,
        per_device_train_batch_size=side.rows_at_once,
        gradient_accumulation_steps=len(groups) * size // side.rows_at_once,
        num_generations=size,
        max_completion_length=max(len(r.tokens) for group in groups for r in group.responses),
        gradient_checkpointing=side.gradient_checkpointing,
        loss_type="grpo",
        beta=0.0,
        epsilon=CLIP,
        vllm_importance_sampling_mode="token_truncate",
        vllm_importance_sampling_clip_max=WEIGHT_CAP,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=GRADIENT_CLIP,
        shuffle_dataset=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def run(side: Side, out: Path) -> None:
    groups = side.groups
    if side.responses_only and not torch.cuda.is_available():
        # TRL asks this function only whether to leave out padding; its kernels ask another one.
        trl.trainer.utils._use_triton = lambda _: True
    meter = Meter()
    watch = Watch(meter)
    with tempfile.TemporaryDirectory() as directory:
        trainer = Measured(
            model=AutoModelForCausalLM.from_pretrained(
                Path(side.directory) / "model", dtype="float32", trust_remote_code=False
            ),
            reward_funcs=stored_reward,
            args=arguments(side, groups, directory),
            train_dataset=Dataset.from_list([{"prompt": str(n)} for n in range(len(groups))]),
            processing_class=tokenizer(),
            rollout_func=Replayed(groups),
            callbacks=[watch],
        )
        watch.trainer = trainer
        if side.corrected:
            # Makes TRL correct for the log-probs of vLLM; there is no server to sync weights to.
            trainer.use_vllm, trainer._last_loaded_step = True, -1
            trainer.vllm_generation = SimpleNamespace(sync_weights=lambda: None)
        trainer.train()
    logged = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    meter.losses = [entry["loss"] for entry in logged]
    meter.gradient_norms = [entry["grad_norm"] for entry in logged]
    finish(meter, trainer.model, out)


if __name__ == "__main__":
    run(read_side(sys.argv[1]), Path(sys.argv[2]))
