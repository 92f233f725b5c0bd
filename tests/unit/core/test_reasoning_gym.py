"""The task `reasoning_gym` generates, renders and scores the entries of reasoning-gym."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bapo_core.config import RunConfig
from bapo_core.errors import BapoError, PayloadError, TaskError
from bapo_core.selection import check_selection
from bapo_core.tasks import SyntheticTask, Verdict, get_task
from bapo_core.tasks.reasoning_gym import (
    CODE_SCORERS,
    MAX_ANSWER,
    REFUSED,
    ReasoningGymTask,
)
from services.datasets import load_datasets

pytest.importorskip("reasoning_gym", reason="`make install-reasoning-gym` installs it")

SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
"""Options of sums and differences of two digits, of which there are some hundred questions."""
MIXTURE = {
    "datasets": [
        {"name": "chain_sum", "weight": 1},
        {"name": "leg_counting", "weight": 3, "config": {"max_animals": 4}},
    ]
}


def task(dataset: str = "chain_sum", **options: Any) -> ReasoningGymTask:
    return ReasoningGymTask(dataset, **options)


def answered(problem: ReasoningGymTask, answer: str, dataset_seed: int = 0) -> Verdict:
    payload = problem.generate(dataset_seed, 1)[0]
    return problem.verify(payload, f"<think>Hm.</think><answer>{answer}</answer>")


# ---- prompts ------------------------------------------------------------------------------------


def test_reasoning_gym_is_a_task_that_generates_problems() -> None:
    assert isinstance(get_task("reasoning_gym", dataset="chain_sum"), SyntheticTask)


def test_a_payload_names_its_entry() -> None:
    payload = task(config=SUMS).generate(3, 1)[0]
    assert (payload["dataset"], payload["config"]) == ("chain_sum", SUMS)
    assert set(payload) == {"dataset", "config", "seed", "index", "question", "answer"}
    assert json.loads(json.dumps(payload)) == payload


@pytest.mark.parametrize(
    ("template", "roles", "words"),
    [
        ("short", ["user"], []),
        ("think", ["user"], ["<think> </think>", "<answer> </answer>"]),
        ("prefilled", ["user", "assistant"], ["<answer> </answer>"]),
        ("system", ["system", "user"], []),
    ],
)
def test_templates_of_prompts(template: Any, roles: list[str], words: list[str]) -> None:
    problem = task(template=template)
    payload = problem.generate(0, 1)[0]
    messages = problem.render(payload)
    assert [message["role"] for message in messages] == roles
    posed = next(message["content"] for message in messages if message["role"] == "user")
    assert posed.startswith(payload["question"])
    assert all(word in posed for word in words)
    if template == "short":
        assert posed == payload["question"]
    if template == "system":
        assert "<answer>answer here</answer>" in messages[0]["content"]


def test_problems_are_a_function_of_the_seed() -> None:
    # list_functions draws from Python's global generator, and pool_matrix from NumPy's.
    names = ["chain_sum", "list_functions", "pool_matrix"]
    program = (
        "import json, sys; from bapo_core.tasks import get_task\n"
        "tasks = [get_task('reasoning_gym', dataset=name) for name in sys.argv[1:]]\n"
        "print(json.dumps([task.generate_split(5, train=4, test=3) for task in tasks]))"
    )
    elsewhere = subprocess.run(
        [sys.executable, "-c", program, *names],
        env={**os.environ, "PYTHONHASHSEED": "9"},
        capture_output=True,
        text=True,
        check=True,
    )
    splits = [task(name).generate_split(5, train=4, test=3) for name in names]
    assert json.loads(elsewhere.stdout) == json.loads(json.dumps(splits))
    others = [task(name).generate_split(6, train=4, test=3) for name in names]
    assert all(other != split for other, split in zip(others, splits, strict=True))


def test_training_and_test_problems_are_distinct() -> None:
    problem = task(config=SUMS)
    train, test = problem.generate_split(0, train=100, test=40)
    assert (len(train), len(test)) == (100, 40)
    assert len({problem.uid(payload) for payload in train + test}) == 140
    assert len({payload["question"] for payload in train + test}) == 140
    assert problem.generate_split(0, train=7, test=40)[1] == test


def test_more_problems_than_a_generator_prepares_come_from_another_seed() -> None:
    payloads = task("acre").generate(0, 1_010)
    assert len({payload["seed"] for payload in payloads}) == 2
    assert max(payload["index"] for payload in payloads) < 1_000


def test_generating_leaves_the_global_generator_and_the_output_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    import random

    state = random.getstate()
    task("list_functions").generate(8, 2)
    task("bf").generate(8, 2)
    assert random.getstate() == state
    assert capsys.readouterr().out == ""


def test_too_few_distinct_problems_are_an_error() -> None:
    with pytest.raises(
        ValueError, match=r"found \d+ distinct problems .* in 1,000 draws, with dataset=chain_sum"
    ):
        task(config=SUMS).generate(0, 10_000)


def test_a_mixture_draws_from_several_generators() -> None:
    payloads = task("composite", config=MIXTURE).generate(0, 40)
    legs = sum("legs" in payload["question"] for payload in payloads)
    assert 20 < legs < 40


def test_a_question_is_one_problem_alone_and_in_a_mixture() -> None:
    mixed = task("composite", config=MIXTURE)
    payload = mixed.generate(0, 1)[0]
    assert mixed.uid(payload) == task().uid({"question": payload["question"]})


# ---- scores -------------------------------------------------------------------------------------


def test_a_correct_answer_is_ok_and_a_part_of_it_gets_partial_credit() -> None:
    problem = task(config=SUMS)
    reference = problem.generate(0, 1)[0]["answer"]
    right = answered(problem, f" {reference}\n")
    assert (right.reward, right.status, right.answer) == (1.0, "ok", reference)
    assert right.parts == {"format": 1.0}
    padded = answered(problem, f"{reference} or so")
    assert padded.status == "wrong_value"
    assert padded.reward == pytest.approx(len(reference) / len(f"{reference} or so"))
    assert padded.detail == f"the score is {padded.reward:g}"
    assert answered(problem, "x").reward == 0.0


def test_the_score_of_the_library_is_the_reward() -> None:
    floor = answered(task("power_function"), "1")
    assert (floor.reward, floor.status) == (0.01, "wrong_value")


def test_a_score_that_lacks_a_rounding_error_is_correct(monkeypatch: pytest.MonkeyPatch) -> None:
    from reasoning_gym.arithmetic.chain_sum import ChainSumDataset

    for score, status in ((0.1 * 3 + 0.7 - 1e-12, "ok"), (1 - 1e-6, "wrong_value")):
        monkeypatch.setattr(ChainSumDataset, "score_answer", lambda *_, score=score: score)
        verdict = answered(task(), "1")
        assert (verdict.reward, verdict.status) == (score, status)


def test_a_scorer_does_not_change_the_entry_of_the_next_response(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from reasoning_gym.arithmetic.chain_sum import ChainSumDataset

    seen: list[bool] = []

    def score(self: object, answer: str, entry: dict[str, Any]) -> float:
        seen.append("changed" in entry["metadata"])
        entry["metadata"]["changed"] = True
        return 0.0

    monkeypatch.setattr(ChainSumDataset, "score_answer", score)
    answered(task(), "1")
    answered(task(), "1")
    assert seen == [False, False]


@pytest.mark.parametrize(
    ("response", "status"),
    [
        ("42", "no_answer"),
        ("<answer>42", "no_answer"),
        ("<answer> </answer>", "no_answer"),
        (f"<answer>{'9' * (MAX_ANSWER + 1)}</answer>", "too_large"),
        ("<answer>" * 30_000, "no_answer"),
    ],
)
def test_responses_without_an_answer(response: str, status: str) -> None:
    verdict = task().verify(task().generate(0, 1)[0], response)
    assert (verdict.reward, verdict.status, verdict.answer) == (0.0, status, None)
    assert verdict.parts == {"format": 0.0}


def test_the_last_answer_counts_and_short_responses_are_the_answer() -> None:
    payload = task(config=SUMS).generate(0, 1)[0]
    reference = payload["answer"]
    twice = f"In <answer> tags: <answer>x</answer><answer>{reference}</answer>"
    assert task(config=SUMS).verify(payload, twice).status == "ok"
    assert task(config=SUMS, template="short").verify(payload, f" {reference}").status == "ok"


def test_an_answer_that_the_scorer_cannot_read_is_a_parse_error() -> None:
    verdict = answered(task("coin_flip"), "1e999")
    assert (verdict.reward, verdict.status, verdict.detail) == (0.0, "parse_error", "OverflowError")


def test_another_entry_than_that_of_the_prompt_is_an_error_and_no_score() -> None:
    payload = dict(task().generate(0, 1)[0])
    for key in ("question", "answer"):
        other = payload | {key: "another"}
        with pytest.raises(PayloadError, match=rf"has another {key} than the prompt.*install"):
            task().verify(other, "<answer>1</answer>")
        with pytest.raises(PayloadError, match="install the version of reasoning-gym"):
            task().load(other)
        with pytest.raises(ValueError, match="install the version of reasoning-gym"):
            task().parse_row(other)


def test_a_row_that_names_no_valid_entry_is_refused() -> None:
    payload = task().generate(0, 1)[0]
    assert task().parse_row(payload) == payload
    with pytest.raises(ValueError, match="index is -1; make it a whole number"):
        task().parse_row({**payload, "index": -1})
    with pytest.raises(ValueError, match="dataset countdown evaluates responses"):
        task().parse_row({**payload, "dataset": "countdown"})


# ---- options ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "dataset is ''; name a generator of reasoning-gym, for example chain_sum"),
        ({"dataset": ["a", "b"]}, "dataset is ['a', 'b']; name a generator"),
        (
            {"dataset": "chain_sun"},
            "reasoning-gym has no dataset 'chain_sun'; did you mean chain_sum or decimal_chain_sum",
        ),
        (
            {"dataset": "chain_sum", "config": {"min_term": 1}},
            "dataset chain_sum has no option 'min_term'; did you mean min_terms or max_terms?; its "
            "options are allow_negation, max_digits, max_terms, min_digits, min_terms",
        ),
        (
            {"dataset": "chain_sum", "config": {"min_terms": 9, "max_terms": 2}},
            'dataset chain_sum refuses config {"max_terms": 2, "min_terms": 9}: AssertionError: '
            "max_terms must be >= min_terms",
        ),
        (
            {"dataset": "chain_sum", "config": {"min_terms": "many"}},
            'dataset chain_sum refuses config {"min_terms": "many"}: TypeError: \'>\'',
        ),
        (
            {"dataset": "chain_sum", "config": {"seed": 1}},
            "dataset chain_sum gets its seed from task.data_seed and the numbers of prompts",
        ),
        ({"dataset": "chain_sum", "config": [1]}, "config is [1]; make it a mapping"),
        ({"dataset": "chain_sum", "template": "plain"}, "template is 'plain'; choose think"),
        (
            {"dataset": "composite"},
            "config.datasets is None; list the generators of the mixture",
        ),
        (
            {"dataset": "composite", "config": {"datasets": ["chain_sum"]}},
            "config.datasets lists 'chain_sum'; give a name, and if needed a weight and a config",
        ),
        (
            {"dataset": "composite", "config": {"datasets": [{"name": "puzzle24"}]}},
            "dataset puzzle24 evaluates responses as Python code",
        ),
        (
            {"dataset": "composite", "config": {"datasets": [{"name": "gcd", "weight": 0}]}},
            "AssertionError: Weight must be positive",
        ),
        (
            {"dataset": "word_ladder"},
            "dataset word_ladder generates other entries in every process",
        ),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TaskError) as caught:
        get_task("reasoning_gym", **options)
    assert str(caught.value).startswith("task reasoning_gym: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dataset", sorted(CODE_SCORERS - REFUSED.keys()))
def test_generators_that_evaluate_answers_need_consent(dataset: str) -> None:
    with pytest.raises(TaskError, match=r"Python code.*set allow_code to true"):
        get_task("reasoning_gym", dataset=dataset)
    problem = task(dataset, allow_code=True)
    reference = problem.generate(0, 1)[0]["answer"]
    assert answered(problem, reference).status == "ok"


def test_only_the_scorers_that_need_consent_evaluate_answers(tmp_path: Path) -> None:
    program = Path(__file__).with_name("audit_scorers_program.py")
    output = tmp_path / "compiling.json"
    subprocess.run([sys.executable, program, output], check=True, capture_output=True)
    assert set(json.loads(output.read_text())) == CODE_SCORERS


def test_the_refused_generators_still_have_the_fault_for_which_they_are_refused() -> None:
    from reasoning_gym.factory import DATASETS

    # In these two, a few entries in a hundred differ: each range (seed, start, stop) has some.
    ranges = {"codeio": (1, 0, 200), "intermediate_integration": (1565351893, 1, 2)}
    program = (
        "import hashlib, json, sys; from reasoning_gym.factory import DATASETS\n"
        "for name, (seed, start, stop) in json.loads(sys.argv[1]).items():\n"
        "    generator, config = DATASETS[name]\n"
        "    made = generator(config(seed=seed, size=200))\n"
        "    entries = [made[n] for n in range(start, stop)]\n"
        "    print('\\n' + name, hashlib.sha256(repr(entries).encode()).hexdigest())"
    )
    names = tuple(name for name in REFUSED if "in every process" in REFUSED[name])
    arguments = json.dumps({name: ranges.get(name, (1, 0, 2)) for name in names})
    outputs = [
        subprocess.run(
            [sys.executable, "-c", program, arguments],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.splitlines()
        for hash_seed in ("1", "2")
    ]
    one, other = ({line for line in lines if line.startswith(names)} for lines in outputs)
    assert len(one) == len(other) == len(names)
    assert not one & other
    generator, config = DATASETS["game_of_life_halting"]
    made = generator(config(seed=1, size=1))
    assert made.score_answer("nonsense", made[0]) == 1.0


def test_without_the_library_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    with pytest.raises(TaskError, match=r"pip install -e '\.\[reasoning-gym\]'.*C compiler"):
        get_task("reasoning_gym", dataset="gcd", config={"max_value": 77})


def test_other_tasks_do_not_import_the_library() -> None:
    program = (
        "import sys; from bapo_core.tasks import get_task;"
        "get_task('countdown'); get_task('math').warm_up();"
        "sys.exit('reasoning_gym' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


# ---- runs ---------------------------------------------------------------------------------------


def run_config(**changes: Any) -> RunConfig:
    section = {
        "name": "reasoning_gym",
        "options": {"dataset": "chain_sum", "config": SUMS},
        "train_prompts": 40,
        "test_prompts": 10,
    }
    rollout = {"prompts_per_step": 8}
    small = {"optimizer": {"minibatch_prompts": 8}}
    return RunConfig.model_validate({"task": section, "rollout": rollout, **changes, **small})


def test_several_generators_can_be_evaluation_sets_of_a_run() -> None:
    sets = {
        "same": {},
        "longer": {"options": {"config": SUMS | {"max_terms": 4}}, "prompts": 5},
        "legs": {"options": {"dataset": "leg_counting", "config": {}}},
    }
    datasets = load_datasets(run_config(evaluation={"sets": sets}))
    sizes = {name: len(dataset.prompts) for name, dataset in datasets.test.items()}
    assert sizes == {"same": 10, "longer": 5, "legs": 10}
    assert len(datasets.train.prompts) == 40
    held_out = {prompt.uid for set_ in datasets.test.values() for prompt in set_.prompts}
    assert not held_out & {prompt.uid for prompt in datasets.train.prompts}


def test_options_of_an_evaluation_set_are_checked_before_its_prompts_are_made() -> None:
    sets = {"a": {}, "b": {"options": {"dataset": "leg_counting"}}}
    config = run_config(evaluation={"sets": sets})
    message = "evaluation.sets.b: task reasoning_gym: dataset leg_counting has no option 'm"
    with pytest.raises(BapoError, match=message):
        check_selection(config)
    with pytest.raises(BapoError, match=message):
        load_datasets(config)
