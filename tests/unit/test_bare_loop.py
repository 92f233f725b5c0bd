"""The bare loop is short, stands alone, and samples and updates as the services do."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from bapo_core.config import RunConfig, load_config
from bapo_core.tasks import Payload, Verdict
from bapo_core.tasks.countdown import CountdownTask
from bapo_core.types import BatchMember, GroupSummary, Source, TrainingBatch
from benchmarks.stack import ServiceLearner, sample_with_engine
from examples import bare_loop
from tests.micro import micro_model
from tools.tiny_models.text import build_tokenizer

STEPS = 4


class RandomTask(CountdownTask):
    """Countdown whose verdicts are arbitrary, so that random weights have mixed rewards."""

    def verify(self, payload: Payload, response: str) -> Verdict:  # noqa: ARG002
        return Verdict(float(sum(map(ord, response)) % 3 == 0), "ok")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tokenizer = build_tokenizer()
    micro_model(vocab_size=len(tokenizer)).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    monkeypatch.setattr(bare_loop, "get_task", lambda _, **options: RandomTask(**options))
    return load_config(
        None,
        [
            "task={options: {template: short}, train_prompts: 24, test_prompts: 4}",
            f"steps={STEPS}",
            "rollout={prompts_per_step: 8, group_size: 4, max_response_tokens: 8}",
            "rollout.max_prompt_tokens=32",
            "sync={every: 2, reevaluate_every: 2}",
            "reevaluate.c1=0.25",
            "replay.window={c2_range: [0.25, 0.5], c3_range: [0.5, 0.75]}",
            "optimizer={learning_rate: 1.0e-3, minibatch_prompts: 4, warmup_steps: 2}",
        ],
    )


def prompts_of(directory: Path) -> list[list[int]]:
    """Returns token ids of prompts of several lengths."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    return [tokenizer.encode(text) for text in ("2 3=5:", "2 3 4=24:", "9 8 17=24:", "1 1=2:")]


def test_it_is_short_and_needs_no_service() -> None:
    text = Path(bare_loop.__file__).read_text()
    assert len(text.splitlines()) < 200
    modules = {
        (node.module or "") if isinstance(node, ast.ImportFrom) else node.names[0].name
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    packages = {module.partition(".")[0] for module in modules} - sys.stdlib_module_names
    assert packages == {"bapo_core", "torch", "transformers"}


def test_its_sampler_draws_the_tokens_of_the_rollout_engine(
    config: RunConfig, directory: Path
) -> None:
    policy, prompts = bare_loop.load_model(directory), prompts_of(directory)
    seeds = [3, 1, 4, 1]
    drawn = bare_loop.sample_groups(config, policy, prompts, seeds)
    expected = sample_with_engine(config, policy, prompts, seeds)
    for responses, references in zip(drawn, expected, strict=True):
        assert [tokens for tokens, _ in responses] == [tokens for tokens, _ in references]
        for (_, logprobs), (_, reference) in zip(responses, references, strict=True):
            assert logprobs == pytest.approx(reference, abs=1e-5)


def test_its_learner_updates_theta_as_the_trainer_does(config: RunConfig, directory: Path) -> None:
    prompts = prompts_of(directory)
    policy = bare_loop.load_model(directory)
    sampled = bare_loop.sample_groups(config, policy, prompts, [0, 1, 2, 3])
    rewards = [
        [1.0, 0.0, 0.0, 0.0],
        [1.0, 1.0, 0.0, 0.0],
        [0.0, 1.0, 1.0, 1.0],
        [0.0, 0.0, 1.0, 0.0],
    ]
    groups: list[Any] = list(zip(prompts, sampled, rewards, strict=True))
    members = [
        BatchMember(GroupSummary(index, str(index), 1, int(sum(reward)), 4, 1), Source.FRESH)
        for index, reward in enumerate(rewards)
    ]
    batch = TrainingBatch(members, 8, (0.25, 0.5), {Source.FRESH: 4})
    bare, service = bare_loop.Learner(config, directory), ServiceLearner(config, directory)
    initial = {name: value.clone() for name, value in bare.model.state_dict().items()}
    for t in (1, 2):
        bare.step(t, batch, groups)
        service.step(t, batch, groups)
    expected = service.model.state_dict()
    for name, value in bare.model.state_dict().items():
        change, difference = value - initial[name], value - expected[name]
        assert difference.norm() <= 0.01 * change.norm(), name


def test_it_makes_the_same_batches_with_the_parts_of_the_services(
    config: RunConfig, directory: Path
) -> None:
    learner = ServiceLearner(config, directory)
    loop = list(bare_loop.train(config, directory))
    assert loop == list(bare_loop.train(config, directory, sample_with_engine, learner))
    assert len(loop) == STEPS
    sources = {member.source for batch in loop for member in batch.members}
    assert sources == set(Source)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("algorithm=grpo", r"fresh\.filter: only range is implemented"),
        ("demonstrations.join=all", r"demonstrations: only .*join='none'.* is implemented"),
    ],
)
def test_a_variant_that_it_does_not_implement_is_refused(
    monkeypatch: pytest.MonkeyPatch, override: str, message: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["bare_loop.py", "examples/countdown.yaml", override])
    monkeypatch.setattr(bare_loop, "train", lambda *_: [])
    with pytest.raises(SystemExit, match=message):
        bare_loop.main()
