"""Whether the GPU computes what the CPU computes: log-probs, entropies, loss and gradients.

The reference is fp32 on the CPU. Every comparison has a tolerance; the part fails at the end if one
is exceeded, with all figures in its result. On a CPU the same comparisons run with bfloat16 weights
in place of the GPU's mixed precision.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict_saver import save
from transformers import Qwen3Config, Qwen3ForCausalLM

from bapo_core.config import RunConfig
from benchmarks.batches import batch_of
from benchmarks.engine import countdown_prompts
from benchmarks.gpu.device import DEVICE, GPU, synchronize
from benchmarks.gpu.models import attention_needs, model_config, other_models
from benchmarks.gpu.record import Record
from benchmarks.gpu.steps import Steps, make_group, step_config
from benchmarks.trl_steps import Group, Response
from services.model.resolve import TINY_MODEL
from services.rollout.api.wire import PromptRequest, Sampling
from services.rollout.transformers_engine import TransformersEngine
from services.trainer.attention_kernels import (
    KERNELS,
    Needs,
    choose_kernel,
    choose_kernels,
    forget_choices,
)
from services.trainer.checkpoint import restore_state, state_of
from services.trainer.checkpoint_files import read_metadata
from services.trainer.data import Batch
from services.trainer.load_policy import load_policy
from services.trainer.lora import full_tensor
from services.trainer.policy import Policy, response_logprobs
from services.trainer.ranks import Ranks, init_distributed
from services.trainer.shard import compile_layers, shard


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The largest differences that count as equal."""

    logprob: float
    """Mean absolute difference of the tokens' log-probs, in nats."""
    gradient: float
    """Norm of the difference of all gradients over the norm of the gradients."""


FP32 = Tolerance(logprob=1e-5, gradient=1e-4)
BF16 = Tolerance(logprob=2e-2, gradient=1e-1)
MISMATCH_KL = 1e-3
"""KL(engine || trainer) per token with both in bfloat16."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The results of a forward and backward pass over a batch, as tensors on the CPU."""

    logprobs: Tensor
    entropies: Tensor
    loss: float
    gradient: Tensor
    """All gradients, flattened, in the order of the parameters."""


class Failures(Exception):
    """Some comparisons exceeded their tolerance."""


def measure(record: Record) -> None:
    with (
        tempfile.TemporaryDirectory(prefix="bapo-bench-") as directory,
        init_distributed() as ranks,
    ):
        model = Path(directory) / "model"
        shape = "toy" if record.toy else "small"
        torch.manual_seed(0)
        Qwen3ForCausalLM(model_config(shape)).save_pretrained(model)
        vocabulary = model_config(shape).vocab_size
        compare_with_cpu(record, model, batch_of(make_groups(record.toy, vocabulary)), ranks)
        few = make_groups(True, vocabulary)
        for name, build in other_models(shape).items():
            other = Path(directory) / name
            torch.manual_seed(0)
            build().save_pretrained(other)
            compare_other_model(record, name, other, batch_of(few), ranks)
        restart(record, model, few, ranks)
        engine_against_trainer(record, ranks, prompts=8 if record.toy else 128)
        # Last, because a kernel that fails may take the device's context along.
        compare_kernels(record, model, batch_of(few), ranks)
    wrong = [
        name
        for name, result in record.new_results.items()
        if not result.get("within_tolerance", True)
    ]
    if wrong:
        raise Failures(f"beyond their tolerance: {', '.join(wrong)}")


def make_groups(toy: bool, vocabulary: int) -> list[Group]:
    draw = np.random.default_rng(0)
    count, size, longest = (2, 4, 24) if toy else (8, 8, 256)
    return [
        make_group(
            draw,
            int(draw.integers(2, longest // 4 + 1)),
            draw.integers(1, longest + 1, size).tolist(),
            vocabulary,
        )
        for _ in range(count)
    ]


# -- passes


def on_cpu(model: Path) -> Policy:
    return load_policy(model)


def in_fp32(model: Path) -> Policy:
    return load_policy(model).to(DEVICE)


def in_bf16(model: Path, ranks: Ranks, *, compiled: bool = False) -> Policy:
    policy = load_policy(model)
    if compiled:
        compile_layers(policy)
    if GPU:
        return shard(policy, ranks)
    return policy.to(torch.bfloat16)


def run_pass(policy: Policy, batch: Batch, *, one_by_one: bool = False) -> Outcome:
    """Runs forward and backward passes over all rows, packed into one or each alone.

    The loss is a sum of log-probs with random factors, plus some of the entropies: every token has
    its own share in the gradient.
    """
    torch.manual_seed(0)
    factors = torch.randn(batch.mask.shape) / batch.mask.sum()
    rows = torch.arange(len(batch.lengths))
    logprobs, entropies = (torch.zeros(batch.mask.shape) for _ in range(2))
    loss = 0.0
    for part in torch.split(rows, 1) if one_by_one else [rows]:
        scores = response_logprobs(policy, batch, part, 1.0, entropy=True)
        share = (scores[0] * factors[part]).sum() + 0.1 * (scores[1] * factors[part]).sum()
        share.backward()  # type: ignore[no-untyped-call]
        loss += float(share.detach())
        logprobs[part], entropies[part] = (score.detach() for score in scores)
    gradient = [
        _flat(parameter.grad) for parameter in policy.parameters() if parameter.grad is not None
    ]
    return Outcome(logprobs, entropies, loss, torch.cat(gradient))


def compare_with_cpu(record: Record, model: Path, batch: Batch, ranks: Ranks) -> None:
    reference = run_pass(on_cpu(model), batch)
    mask = batch.mask
    fp32 = run_pass(in_fp32(model), batch)
    record.add("fp32_against_cpu", difference(fp32, reference, mask, FP32))
    alone = run_pass(in_fp32(model), batch, one_by_one=True)
    record.add("fp32_packed_against_one_by_one", difference(fp32, alone, mask, FP32))
    bf16 = run_pass(in_bf16(model, ranks), batch)
    record.add("bf16_against_cpu", difference(bf16, reference, mask, BF16))
    alone = run_pass(in_bf16(model, ranks), batch, one_by_one=True)
    record.add("bf16_packed_against_one_by_one", difference(bf16, alone, mask, BF16))
    again = run_pass(in_bf16(model, ranks), batch)
    record.add("bf16_twice", {**difference(bf16, again, mask, BF16), "bits": bits(bf16, again)})
    compiled = run_pass(in_bf16(model, ranks, compiled=True), batch)
    record.add("bf16_compiled_against_not", difference(compiled, bf16, mask, BF16))


def compare_other_model(record: Record, name: str, model: Path, batch: Batch, ranks: Ranks) -> None:
    reference, bf16 = run_pass(on_cpu(model), batch), run_pass(in_bf16(model, ranks), batch)
    record.add(f"{name}_in_bf16_against_cpu", difference(bf16, reference, batch.mask, BF16))


def compare_kernels(record: Record, model: Path, batch: Batch, ranks: Ranks) -> None:
    """Compares the whole model with each attention kernel that this device has."""
    reference = run_pass(on_cpu(model), batch)
    needs = replace(
        attention_needs(Qwen3Config.from_pretrained(model, trust_remote_code=False)),
        dtype=torch.bfloat16,
    )
    for name, kernel in KERNELS.items():
        choice = choose_kernel(needs, DEVICE, [kernel])
        if choice.kernel is not kernel:
            record.add(f"bf16_with_{name}", {"refused": choice.passed_over})
            continue
        with chosen(needs, name):
            outcome = run_pass(in_bf16(model, ranks), batch)
        record.add(f"bf16_with_{name}", difference(outcome, reference, batch.mask, BF16))


@contextmanager
def chosen(needs: Needs, name: str) -> Iterator[None]:
    """Has the model's attention computed by one kernel, as `trainer.attention` does."""
    choose_kernels([needs], DEVICE, name)
    try:
        yield
    finally:
        forget_choices()


def difference(one: Outcome, other: Outcome, mask: Tensor, tolerance: Tolerance) -> dict[str, Any]:
    logprob = (one.logprobs - other.logprobs)[mask].abs()
    entropy = (one.entropies - other.entropies)[mask].abs()
    gradient = float((one.gradient - other.gradient).norm() / other.gradient.norm())
    mean = float(logprob.mean())
    return {
        "logprob_mean": mean,
        "logprob_max": float(logprob.max()),
        "entropy_max": float(entropy.max()),
        "loss": abs(one.loss - other.loss),
        "gradient": gradient,
        "tolerance": {"logprob_mean": tolerance.logprob, "gradient": tolerance.gradient},
        "within_tolerance": mean <= tolerance.logprob and gradient <= tolerance.gradient,
    }


def bits(one: Outcome, other: Outcome) -> dict[str, bool]:
    """Returns whether log-probs and gradients are the same bit for bit."""
    return {
        "logprobs": torch.equal(one.logprobs, other.logprobs),
        "gradient": torch.equal(one.gradient, other.gradient),
    }


# -- checkpoint and restart


def restart(record: Record, model: Path, groups: list[Group], ranks: Ranks) -> None:
    """Takes a step, saves, takes another; then restores into a new policy and takes that again."""
    config = step_config(groups, microbatch_tokens=64)
    with tempfile.TemporaryDirectory(prefix="bapo-bench-") as directory:
        steps = new_steps(config, model, groups, ranks)
        steps.step()
        save(state_of(steps.updater.modules), checkpoint_id=directory)
        saved = digest(steps.policy)
        steps.step()
        restored = new_steps(config, model, groups, ranks)
        files = Path(directory)
        restore_state(files, restored.updater.modules, read_metadata(files, directory))
        restored.steps = 1
        same_after_restore = digest(restored.policy) == saved
        restored.step()
    weights, expected = (flat_weights(policy) for policy in (restored.policy, steps.policy))
    record.add(
        "restart",
        {
            "restored_bits": same_after_restore,
            "next_step_bits": torch.equal(weights, expected),
            "next_step_difference": float((weights - expected).abs().max()),
            "within_tolerance": same_after_restore,
        },
    )


def new_steps(config: RunConfig, model: Path, groups: list[Group], ranks: Ranks) -> Steps:
    return Steps(config, shard(load_policy(model), ranks), groups)


def flat_weights(policy: Policy) -> Tensor:
    synchronize()
    return torch.cat([_flat(parameter) for parameter in policy.parameters()])


def _flat(tensor: Tensor) -> Tensor:
    return full_tensor(tensor).float().cpu().flatten()


def digest(policy: Policy) -> str:
    return hashlib.sha256(flat_weights(policy).numpy().tobytes()).hexdigest()


# -- engine and trainer


def engine_against_trainer(record: Record, ranks: Ranks, prompts: int) -> None:
    """Samples from the tiny model with the engine, and scores the samples with the trainer."""
    token_ids = countdown_prompts(TINY_MODEL, prompts)
    engine = TransformersEngine()
    engine.load(TINY_MODEL, 1)
    generated = engine.generate(
        [PromptRequest(prompt_token_ids=ids, seed=index) for index, ids in enumerate(token_ids)],
        Sampling(temperature=1.0, max_tokens=32, group_size=8),
        policy_version=1,
    )
    groups = [
        Group(ids, [Response(r.token_ids, r.logprobs, 0.0) for r in group.responses])
        for ids, group in zip(token_ids, generated, strict=True)
    ]
    batch = batch_of(groups)
    for name, load in (("bf16", partial(in_bf16, ranks=ranks)), ("fp32", in_fp32)):
        with torch.no_grad():
            rows = torch.arange(len(batch.lengths))
            scores, _ = response_logprobs(load(TINY_MODEL), batch, rows, 1.0)
        # k3 of the samples' log-ratio estimates KL(engine || trainer) without bias.
        ratio = (scores - batch.behavior_logprobs)[batch.mask]
        kl = float((ratio.exp() - 1 - ratio).mean())
        record.add(
            f"engine_against_trainer_in_{name}",
            {
                "tokens": int(batch.mask.sum()),
                "kl": kl,
                "logprob_mean": float(ratio.abs().mean()),
                "logprob_max": float(ratio.abs().max()),
                # The engine computes in bfloat16 on a GPU, so only `bf16` is the same arithmetic.
                **(
                    {"tolerance": {"kl": MISMATCH_KL}, "within_tolerance": kl <= MISMATCH_KL}
                    if name == "bf16"
                    else {}
                ),
            },
        )
