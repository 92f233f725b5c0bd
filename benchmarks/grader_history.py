"""Grades the responses of a model to a set of problems with this grader of `math` and earlier ones.

    make real-lm
    python -m benchmarks.grader_history --model models/smollm2-135m-instruct \\
        --data math500.json --earlier a6bdfdd --responses responses.jsonl

The responses are greedy, so they depend on the model and the limits alone. `--responses` keeps
them, and another call with the same file grades them again without sampling. An earlier grader is
read from a commit of this repository and runs in a process of its own. The result lists every
response on which two graders differ.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bapo_core.config import RunConfig
from bapo_core.config.evaluation import GREEDY_TEMPERATURE
from bapo_core.metrics import mean_score
from bapo_core.seeding import derive_seed
from bapo_core.tasks.mathematics import MathTask
from benchmarks.harness import make_parser, report
from benchmarks.machine import machine
from services.model.conversation import decode_response, load_tokenizer, tokenize_conversation
from services.rollout.api.wire import PromptRequest, Sampling
from services.rollout.transformers_engine import TransformersEngine

ROOT = Path(__file__).parents[1]
PROMPTS_AT_ONCE = 50
GRADE = """
import json, sys
from services.verifier.pool import VerifierPool
pool = VerifierPool(workers=1, deadline_s=30.0)
work = [({"answer": pair["answer"]}, pair["response"]) for pair in json.load(sys.stdin)]
found = pool.verify("math", json.loads(sys.argv[1]), work)
verdicts = [[verdict.status == "ok", verdict.extracted] for verdict in found]
pool.close()
json.dump(verdicts, sys.stdout)
"""
"""Grades pairs of the standard input; it runs in this tree and in the trees of earlier commits."""
OPTIONS: dict[str, dict[str, bool]] = {"boxed": {}, "anywhere": {"boxed_only": False}}
"""Options of the task by where it looks for the answer. A small model rarely writes a box."""


def sample_responses(
    model: Path, problems: Sequence[dict[str, Any]], max_tokens: int, file: Path
) -> list[dict[str, Any]]:
    """Returns the greedy response to each problem, and appends the missing ones to `file`."""
    kept = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    if len(kept) >= len(problems):
        return kept[: len(problems)]
    tokenizer, task, rollout = load_tokenizer(model), MathTask(), RunConfig().rollout
    engine = TransformersEngine()
    engine.load(model, 1)
    sampling = Sampling(
        temperature=GREEDY_TEMPERATURE, top_p=1.0, max_tokens=max_tokens, group_size=1
    )
    for start in range(len(kept), len(problems), PROMPTS_AT_ONCE):
        part = problems[start : start + PROMPTS_AT_ONCE]
        requests = [
            PromptRequest(
                prompt_token_ids=tokenize_conversation(
                    tokenizer, task.render(problem), None, rollout.prompt_date
                ),
                seed=derive_seed(0, "evaluation", 1, str(index)),
            )
            for index, problem in enumerate(part, start)
        ]
        groups = engine.generate(requests, sampling, policy_version=1)
        for problem, group in zip(part, groups, strict=True):
            (response,) = group.responses
            ended = response.finish_reason == "stop"
            text = decode_response(tokenizer, response.token_ids, ended=ended)
            kept.append(
                {
                    "answer": str(problem["answer"]),
                    "response": text,
                    "tokens": len(response.token_ids),
                    "cut_off": not ended,
                }
            )
        file.write_text("".join(f"{json.dumps(response)}\n" for response in kept))
        print(f"{len(kept)} of {len(problems)} responses", file=sys.stderr, flush=True)
    return kept


Verdicts = dict[str, list[tuple[bool, str | None]]]
"""For each of `OPTIONS`, (whether it is correct, the extracted answer) of each response."""


def grade_with(tree: Path, responses: Sequence[dict[str, Any]]) -> Verdicts:
    """Returns the verdicts of the grader of a tree."""
    verdicts: Verdicts = {}
    for name, options in OPTIONS.items():
        done = subprocess.run(
            [sys.executable, "-c", GRADE, json.dumps(options)],
            input=json.dumps(responses),
            capture_output=True,
            text=True,
            check=True,
            cwd=tree,
            env={**os.environ, "PYTHONPATH": str(tree)},
        )
        verdicts[name] = [(correct, extracted) for correct, extracted in json.loads(done.stdout)]
    return verdicts


def grade_with_commit(commit: str, responses: Sequence[dict[str, Any]]) -> Verdicts:
    """Returns the verdicts of the grader of a commit of this repository."""
    archive = ["git", "archive", commit, "bapo_core", "services"]
    sources = subprocess.run(archive, cwd=ROOT, capture_output=True, check=True).stdout
    with tempfile.TemporaryDirectory(prefix="bapo-bench-") as directory:
        with tarfile.open(fileobj=io.BytesIO(sources)) as packed:
            packed.extractall(directory, filter="data")
        return grade_with(Path(directory), responses)


def summarise(verdicts: Sequence[tuple[bool, str | None]]) -> dict[str, Any]:
    """Returns how many responses are correct, and the accuracy with its 95% interval."""
    score = mean_score("mean", 1, [float(correct) for correct, _ in verdicts])
    return {
        "correct": sum(correct for correct, _ in verdicts),
        "accuracy": score.value,
        "interval": [score.low, score.high],
    }


def main() -> None:
    """Samples what is missing, grades everything, and writes the result."""
    parser = make_parser(__doc__, "grader_history")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True, help="a JSON list of problem, answer")
    parser.add_argument("--responses", type=Path, required=True, help="keeps the responses")
    parser.add_argument("--earlier", nargs="+", default=["a6bdfdd"], metavar="COMMIT")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--prompts", type=int, help="the first ones alone")
    arguments = parser.parse_args()
    problems = json.loads(arguments.data.read_text())[: arguments.prompts]
    responses = sample_responses(
        arguments.model, problems, arguments.max_tokens, arguments.responses
    )
    verdicts = {"now": grade_with(ROOT, responses)}
    for commit in arguments.earlier:
        verdicts[commit] = grade_with_commit(commit, responses)
    scores = {
        grader: {name: summarise(of_options) for name, of_options in by_options.items()}
        for grader, by_options in verdicts.items()
    }
    differences = [
        {
            "options": name,
            "row": row,
            "answer": response["answer"],
            "end": response["response"][-200:],
            "verdicts": {grader: given[name][row] for grader, given in verdicts.items()},
        }
        for name in OPTIONS
        for row, response in enumerate(responses)
        if len({given[name][row][0] for given in verdicts.values()}) > 1
    ]
    result = {
        "machine": machine("torch", "transformers", "math-verify", "sympy"),
        "model": arguments.model.name,
        "data": arguments.data.name,
        "responses": len(responses),
        "max_tokens": arguments.max_tokens,
        "cut_off": sum(response["cut_off"] for response in responses),
        "mean_tokens": sum(response["tokens"] for response in responses) / len(responses),
        "graders": scores,
        "differences": differences,
    }
    report(result, arguments.out)


if __name__ == "__main__":
    main()
