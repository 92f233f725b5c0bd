"""The bare loop is short, stands alone, and samples and updates as the services do."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Any

import pytest

from bapo_core.config import RunConfig, load_config
from bapo_core.types import BatchMember, GroupSummary, Source, TrainingBatch
from benchmarks.stack import ServiceLearner, sample_with_engine
from examples import bare_loop
from tests.conftest import EASY

SOURCE = Path(bare_loop.__file__)


def configuration(*overrides: str) -> RunConfig:
    return load_config(
        None,
        [
            f"task.options={EASY}",
            "task.train_prompts=48",
            "task.test_prompts=8",
            "steps=4",
            "rollout={prompts_per_step: 16, group_size: 4, max_response_tokens: 16}",
            "rollout.max_prompt_tokens=32",
            "sync={every: 2, reevaluate_every: 2}",
            "reevaluate.c1=0.25",
            "replay_window={c2_range: [0.25, 0.5], c3_range: [0.5, 0.75]}",
            "optimizer={learning_rate: 1.0e-3, minibatch_prompts: 4, warmup_steps: 2}",
            *overrides,
        ],
    )


def prompts_of(config: RunConfig, directory: Path) -> list[list[int]]:
    tokenizer = bare_loop.AutoTokenizer.from_pretrained(directory)
    return [tokenizer.encode(text) for text in ("2 3=5:", "2 3 4=24:", "9 8 7=24:", "1 1=2:")]


def test_it_is_short_and_needs_no_service() -> None:
    text = SOURCE.read_text()
    assert len(text.splitlines()) < 200
    modules = {
        (node.module or "") if isinstance(node, ast.ImportFrom) else node.names[0].name
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    roots = {module.partition(".")[0] for module in modules} - sys.stdlib_module_names
    assert roots == {"bapo_core", "torch", "transformers"}


def test_it_samples_what_the_rollout_engine_samples(easy_model: Path) -> None:
    config = configuration()
    policy = bare_loop.load_model(easy_model)
    prompts = prompts_of(config, easy_model)
    seeds = [3, 1, 4, 1]
    own = bare_loop.sample_groups(config, policy, prompts, seeds)
    engine = sample_with_engine(config, policy, prompts, seeds)
    for responses, expected in zip(own, engine, strict=True):
        assert [tokens for tokens, _ in responses] == [tokens for tokens, _ in expected]
        for (_, logprobs), (_, reference) in zip(responses, expected, strict=True):
            assert logprobs == pytest.approx(reference, abs=1e-5)


def test_it_updates_theta_as_the_trainer_does(easy_model: Path) -> None:
    config = configuration()
    sampled = bare_loop.sample_groups(
        config, bare_loop.load_model(easy_model), prompts_of(config, easy_model), [0, 1, 2, 3]
    )
    rewards = [
        [1.0, 0.0, 0.0, 0.0],
        [1.0, 1.0, 0.0, 0.0],
        [0.0, 1.0, 1.0, 1.0],
        [0.0, 0.0, 1.0, 0.0],
    ]
    groups: list[Any] = list(zip(prompts_of(config, easy_model), sampled, rewards, strict=True))
    members = [
        BatchMember(GroupSummary(index, str(index), 1, int(sum(reward)), 4, 1), Source.FRESH)
        for index, reward in enumerate(rewards)
    ]
    batch = TrainingBatch(members, 16, (0.25, 0.5), {Source.FRESH: 4})
    own, service = bare_loop.Learner(config, easy_model), ServiceLearner(config, easy_model)
    before = {name: value.clone() for name, value in own.model.state_dict().items()}
    for t in (1, 2):
        own.step(t, batch, groups)
        service.step(t, batch, groups)
    expected = service.model.state_dict()
    for name, value in own.model.state_dict().items():
        change, difference = (value - before[name]).norm(), (value - expected[name]).norm()
        assert difference <= 0.01 * change, name


def test_it_makes_the_batches_of_the_services_parts(easy_model: Path) -> None:
    """Samples do not depend on the batch they are drawn in, and differ only by rounding."""
    config = configuration()
    learner = ServiceLearner(config, easy_model)
    own = bare_loop.train(config, easy_model)
    service = bare_loop.train(config, easy_model, sample_with_engine, learner)
    for batch, expected in zip(own, service, strict=True):
        assert batch == expected
        assert batch.members


def test_a_variant_that_it_does_not_implement_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["bare_loop.py", "examples/countdown.yaml", "algorithm=grpo"])
    with pytest.raises(SystemExit, match=r"fresh\.filter: only range is implemented"):
        bare_loop.main()
