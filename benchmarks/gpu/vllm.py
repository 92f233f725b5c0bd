"""vLLM on the GPU: whether it loads, what replica and collector cost, parity, and a weight sync.

The figures are those of `benchmarks.rollouts`, with 512 responses of 512 tokens at a time and the
weights of a Qwen3-0.6B shape, which are random: responses hardly ever end early.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bapo_core.config import config_from
from bapo_core.errors import BapoError
from benchmarks import rollouts
from benchmarks.gpu.device import GPU
from benchmarks.gpu.models import save_random_model
from benchmarks.gpu.record import Record
from benchmarks.rollouts import Workload, running, sync, throughput
from services.cli.doctor import measure_parity
from services.model.resolve import TINY_MODEL
from services.rollout.vllm.server import VllmOptions, VllmServer, find_python, installed
from services.stack.stack import running_stack
from tools.tiny_models.text import build_tokenizer

EXTENSIONS = (
    "vllm._C_stable_libtorch",
    "vllm._moe_C_stable_libtorch",
    "vllm.vllm_flash_attn._vllm_fa3_C",
    "vllm.entrypoints.openai.api_server",
)
EAGER = ("--enforce-eager",)
MEMORY = ("--gpu-memory-utilization", "0.6")
COMPILED_WORKLOAD, EAGER_WORKLOAD = (
    Workload(
        prompts=64,
        group=8,
        response=512,
        vllm_args=("--max-num-seqs", "512", *MEMORY, *arguments),
    )
    for arguments in ((), EAGER)
)
TOY_WORKLOAD = Workload(prompts=4, response=8)
LOG_CHARACTERS = 6_000
"""Characters of the log of a vLLM that does not start that the result keeps."""


def measure(record: Record) -> None:
    # Its sampler imports FlashInfer, which is not installed, to see whether it could use it.
    os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    python = find_python()
    record.add("installed", dict(zip(("package", "version"), installed(python), strict=True)))
    # vLLM for CPUs has other extensions.
    record.add("imports", import_errors(python) if GPU else {})
    repeats = 1 if record.toy else 2
    with (
        tempfile.TemporaryDirectory(prefix="bapo-bench-") as directory,
        running_stack(Path(directory) / "home", 0) as stack,
    ):
        home = Path(directory)
        record.add("starts", start(python, home))
        model = make_model(home, record.toy)
        record.add("parity", parity(prompts=4 if record.toy else 64))
        eager = TOY_WORKLOAD if record.toy else EAGER_WORKLOAD
        with running("eager", 1, 1_000, model, stack, home, eager) as run:
            record.add("throughput", throughput(run, repeats=repeats, steps=1))
        with running("sync", 1, 1, model, stack, home, eager) as run:
            record.add("sync", sync(run, repeats=repeats))
        if GPU:
            # Last, because this vLLM was built for a newer PyTorch than it may find.
            try:
                with running("compiled", 1, 1_000, model, stack, home, COMPILED_WORKLOAD) as run:
                    record.add("throughput_compiled", throughput(run, repeats=1, steps=1))
            except BapoError as error:
                record.add("throughput_compiled", {"failed": str(error)})


def start(python: str, home: Path) -> dict[str, Any]:
    """Starts vLLM with the tiny model; returns the seconds until it answers.

    Raises `BapoError` with the end of its log if it does not.
    """
    options = VllmOptions(
        python=python,
        longest_sequence=64,
        dtype="bfloat16" if GPU else "float32",
        log=home / "vllm.log",
        arguments=(*EAGER, *(MEMORY if GPU else ())),
    )
    started = time.perf_counter()
    server = VllmServer(options, TINY_MODEL)

    async def until_ready() -> float:
        try:
            await server.wait_ready()
            return time.perf_counter() - started
        finally:
            await server.stop()

    try:
        return {"seconds": asyncio.run(until_ready())}
    except BapoError as error:
        log = options.log.read_text(errors="replace")[-LOG_CHARACTERS:]
        raise BapoError(f"{error}\n{log}") from error


def import_errors(python: str) -> dict[str, str | None]:
    """Returns why each extension does not import in vLLM's environment; None if it does."""
    program = (
        "import importlib, json, sys, traceback\n"
        "found = {}\n"
        "for name in sys.argv[1:]:\n"
        "    try: importlib.import_module(name); found[name] = None\n"
        "    except BaseException: found[name] = traceback.format_exc()[-1500:]\n"
        "print(json.dumps(found))"
    )
    done = subprocess.run([python, "-c", program, *EXTENSIONS], capture_output=True, text=True)
    try:
        errors: dict[str, str | None] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):  # an extension ended the process
        return dict.fromkeys(EXTENSIONS, f"exit code {done.returncode}: {done.stderr[-1_500:]}")
    return errors


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
                "engine": {"kind": "vllm", "args": [*EAGER, *(MEMORY if GPU else ())]},
                "prompts_per_step": prompts,
                "max_prompt_tokens": 32,
                "max_response_tokens": 32,
            },
            "optimizer": {"minibatch_prompts": prompts},
        }
    )
    found = measure_parity(config, TINY_MODEL, prompts=prompts)
    return {**asdict(found), "failures": found.failures()}
