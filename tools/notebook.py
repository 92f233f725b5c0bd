"""Executes examples/notebook.ipynb and writes it with its outputs: `python -m tools.notebook`.

The text of the cells is in this file, so that a change of it is reviewed as text.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import nbclient
import nbformat

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOK = ROOT / "examples/notebook.ipynb"
CELLS = (
    (
        "markdown",
        "# Training with a reward function of your own\n\n"
        "`bapo.train` starts Postgres, an object store and the services on this machine, trains, "
        "and returns the run; they end with the kernel. The tiny model, which writes "
        "arithmetic expressions, learns to multiply. It takes two cores a minute or two.",
    ),
    ("code", "import bapo"),
    (
        "markdown",
        "A reward is a function with TRL's signature. It runs in the verifier's process, so it "
        "imports what it needs. The configuration is a YAML file or its values.",
    ),
    (
        "code",
        "def score(completions, **columns):\n"
        '    """The share of the operators that are multiplications."""\n'
        "    import re\n\n"
        "    rewards = []\n"
        "    for completion in completions:\n"
        '        operators = re.findall(r"[-+*/]", completion)\n'
        '        rewards.append(operators.count("*") / max(len(operators), 1))\n'
        "    return rewards",
    ),
    (
        "code",
        "config = {\n"
        '    "name": "notebook",\n'
        '    "algorithm": "grpo",\n'
        '    "task": {"train_path": "data/numbers-train.jsonl",\n'
        '             "test_path": "data/numbers-test.jsonl"},\n'
        '    "rollout": {"prompts_per_step": 32, "max_prompt_tokens": 32,\n'
        '                "max_response_tokens": 32},\n'
        '    "optimizer": {"learning_rate": 1e-4, "minibatch_prompts": 16},\n'
        '    "evaluation": {"every": 10},\n'
        "}\n"
        "run = bapo.train(config, reward=score, steps=STEPS, new=True, port=0)",
    ),
    ("markdown", "The run shows its reward, of each training step and on held-out prompts."),
    ("code", "run"),
    ("code", 'run.metrics()[["reward", "entropy", "response_length"]].tail()'),
    ("markdown", "Which prompts are hardest, and what did the model write to the first of them?"),
    ("code", 'prompts = run.prompts(order="hardest", limit=5)\nprompts[["attempts", "last_mean"]]'),
    (
        "code",
        "attempts = run.attempts(prompts.index[0])\n"
        'run.group(attempts.index[-1])[["text", "reward"]]',
    ),
    ("markdown", "Why was it in the batch of that step, or why not?"),
    ("code", 'run.why(prompts.index[0], int(attempts["step"].iloc[-1]))[["outcome", "reason"]]'),
    ("markdown", "`run.export(DIRECTORY)` writes the model, and `run.dashboard` has its page."),
)
"""Kind and text of each cell. `STEPS` stands for the number of training steps."""


def build_notebook(steps: int) -> Any:
    """Returns the notebook without outputs, with runs of so many training steps."""
    v4: Any = nbformat.v4
    make = {"markdown": v4.new_markdown_cell, "code": v4.new_code_cell}
    cells = [
        make[kind](text.replace("STEPS", str(steps)), id=f"cell-{number}")
        for number, (kind, text) in enumerate(CELLS)
    ]
    return v4.new_notebook(
        cells=cells, metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}}
    )


def execute_notebook(steps: int, timeout_s: float = 1200.0) -> Any:
    """Returns the notebook with the outputs of its cells, run in `examples`.

    Raises `nbclient.exceptions.CellExecutionError` if a cell fails.
    """
    notebook = build_notebook(steps)
    client = nbclient.NotebookClient(
        notebook,
        timeout=timeout_s,
        kernel_name="python3",
        resources={"metadata": {"path": str(NOTEBOOK.parent)}},
    )
    # Kernels without widgets have no bars of tqdm, which warns about it by the path of its file.
    client.execute(env={**os.environ, "PYTHONWARNINGS": "ignore:IProgress"})
    return notebook


def main() -> None:
    """Executes the notebook and writes it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=40, help="training steps of its run")
    write: Any = nbformat.write
    write(execute_notebook(parser.parse_args().steps), NOTEBOOK)


if __name__ == "__main__":
    main()
