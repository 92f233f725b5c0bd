"""vLLM on the GPU: whether it loads, what replica and collector cost, parity, and a weight sync.

The figures are those of `benchmarks.rollouts`, with 512 responses of 1,024 tokens at a time and the
weights of a Qwen3-0.6B shape, which are random: responses hardly ever end early.
"""

from __future__ import annotations

import subprocess
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bapo_core.config import config_from
from benchmarks import rollouts
from benchmarks.gpu.device import GPU
from benchmarks.gpu.models import save_random_model
from benchmarks.gpu.record import Record
from benchmarks.rollouts import Workload, running, sync, throughput
from services.cli.doctor import measure_parity
from services.model.resolve import TINY_MODEL
from services.model.tiny import build_tokenizer
from services.rollout.vllm.server import find_python, installed
from services.stack.stack import running_stack

EXTENSIONS = (
    "vllm._C_stable_libtorch",
    "vllm._moe_C_stable_libtorch",
    "vllm.vllm_flash_attn._vllm_fa3_C",
    "vllm.entrypoints.openai.api_server",
)
WORKLOAD = Workload(
    prompts=64,
    group=8,
    response=1_024,
    vllm_args=("--max-num-seqs", "512", "--gpu-memory-utilization", "0.6"),
)
TOY_WORKLOAD = Workload(prompts=4, response=8)
EAGER = ("--enforce-eager", "--gpu-memory-utilization", "0.4")


def measure(record: Record) -> None:
    python = find_python()
    record.add("installed", dict(zip(("package", "version"), installed(python), strict=True)))
    # vLLM for CPUs has other extensions.
    record.add("imports", {name: import_error(python, name) for name in EXTENSIONS if GPU})
    workload = TOY_WORKLOAD if record.toy else WORKLOAD
    repeats = 1 if record.toy else 2
    with (
        tempfile.TemporaryDirectory(prefix="bapo-bench-") as directory,
        running_stack(Path(directory) / "home", 0) as stack,
    ):
        home = Path(directory)
        model = make_model(home, record.toy)
        record.add("parity", parity(prompts=4 if record.toy else 64))
        with running("sync", 1, 1, model, stack, home, workload) as run:
            record.add("sync", sync(run, repeats=repeats))
        with running("speed", 1, 1_000, model, stack, home, workload) as run:
            record.add("throughput", throughput(run, repeats=repeats, steps=1))


def import_error(python: str, module: str) -> str | None:
    """Returns why a module does not import in vLLM's environment; None if it does."""
    done = subprocess.run([python, "-c", f"import {module}"], capture_output=True, text=True)
    return None if done.returncode == 0 else done.stderr[-1_500:]


def make_model(home: Path, toy: bool) -> Path:
    if toy:
        return rollouts.make_model(home / "model", "small")
    save_random_model("qwen3-0.6b", home / "model")
    build_tokenizer().save_pretrained(home / "model")
    return home / "model"


def parity(prompts: int) -> dict[str, Any]:
    """Compares vLLM's log-probs of the tiny model's responses with the trainer's."""
    config = config_from(
        {
            "model": {"path": "tiny"},
            "task": {"options": {"template": "short"}, "train_prompts": prompts},
            "rollout": {
                "engine": "vllm",
                "vllm_args": list(EAGER if GPU else EAGER[:1]),
                "prompts_per_step": prompts,
                "max_prompt_tokens": 32,
                "max_response_tokens": 32,
            },
            "optimizer": {"minibatch_prompts": prompts},
        }
    )
    found = measure_parity(config, TINY_MODEL, prompts=prompts)
    return {**asdict(found), "failures": found.failures()}
