"""Reward files are stored by their digests, and runs and pipelines name them by these."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from bapo_core.config import RunConfig, config_from
from bapo_core.errors import BapoError, ConfigError
from bapo_core.reward_files import LARGEST_FILE, digest_of_text
from pipelines.parameters import config_of, parameters_of
from services.buffer.api.client import BufferClient
from services.cli.main import bapo
from services.cli.reward_files import pin_reward, store_parameters, store_reward
from services.common.errors import ServiceError
from services.datasets import DataSources, prepare_run
from services.model.resolve import TINY_MODEL
from services.stack.stack import Endpoints

SOURCE = '''
def score(completions, answer, **columns):
    """The length of a response."""
    return [float(len(text)) for text in completions]


def length(completions, **columns):
    return [-float(len(text)) for text in completions]
'''


@pytest.fixture
def client(stack: Endpoints) -> BufferClient:
    return BufferClient(stack.buffer_url, stack.token)


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory of a user, with a reward file and data."""
    monkeypatch.chdir(tmp_path)
    # Unlike the file of another test, so that it is not stored yet.
    (tmp_path / "rewards.py").write_text(f"# {tmp_path}\n{SOURCE}")
    rows = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(12)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows[:8])))
    (tmp_path / "test.jsonl").write_text("\n".join(map(json.dumps, rows[8:])))
    return tmp_path


def values(**task: Any) -> dict[str, Any]:
    return {
        "name": "reward",
        "task": {
            "reward": "rewards.py:score",
            "train_path": "train.jsonl",
            "test_path": "test.jsonl",
            **task,
        },
        "rollout": {"prompts_per_step": 4, "group_size": 2},
        "optimizer": {"minibatch_prompts": 2},
    }


def prepare(config: RunConfig, client: BufferClient) -> None:
    prepare_run(config, TINY_MODEL, DataSources(), client, show=lambda _: None)


def test_a_file_is_stored_under_its_digest_alone(client: BufferClient) -> None:
    digest = client.upload_reward_file(SOURCE)
    assert client.upload_reward_file(SOURCE) == digest == digest_of_text(SOURCE)
    assert client.reward_file(digest) == SOURCE
    for other in ("0" * 64, digest_of_text("other")):
        with pytest.raises(ServiceError, match=f"has the digest {digest}"):
            client._send("PUT", f"/v1/reward-files/{other}", json={"text": SOURCE})
        with pytest.raises(ServiceError, match="there is no reward file"):
            client.reward_file(other)


def test_a_file_has_a_limit_in_bytes(client: BufferClient) -> None:
    text = "#" * (LARGEST_FILE - 1)
    assert client.reward_file(client.upload_reward_file(text + "#")) == text + "#"
    with pytest.raises(ServiceError, match=f"has {LARGEST_FILE + 1} bytes"):
        client.upload_reward_file(text + "é")
    with pytest.raises(ServiceError):
        client.upload_reward_file("\0")


def test_a_run_needs_a_stored_file(directory: Path, client: BufferClient) -> None:
    config = config_from(values())
    with pytest.raises(
        ConfigError, match=r"without the digest of a stored one; start the run with"
    ):
        prepare(config, client)
    pinned = pin_reward(config)
    with pytest.raises(ServiceError, match="there is no reward file"):
        prepare(pinned, client)
    store_reward(pinned, client)
    request = prepare_run(pinned, TINY_MODEL, DataSources(), client, show=lambda _: None)
    digest = digest_of_text((directory / "rewards.py").read_text())
    for reward, reason in (
        ("rewards.py:score", "without the digest"),
        (f"rewards.py:score@{'0' * 64}", "which is not stored"),
    ):
        request.config["task"]["reward"] = reward
        with pytest.raises(ServiceError, match=reason):
            client.create_run(request)
    request.config["task"]["reward"] = f"rewards.py:score@{digest}"
    client.run = request.name
    assert client.create_run(request).config.task.functions == pinned.task.functions
    client.delete_run()


def test_a_changed_or_missing_file_is_not_taken_for_the_stored_one(
    directory: Path, client: BufferClient
) -> None:
    pinned = pin_reward(config_from(values()))
    store_reward(pinned, client)
    (directory / "rewards.py").unlink()
    store_reward(pinned, client)  # It is stored, wherever the file is now.
    (directory / "rewards.py").write_text("def score(completions): ...")
    other = config_from(values(reward=f"rewards.py:score@{'0' * 64}"))
    with pytest.raises(ConfigError, match="has changed since it was stored"):
        store_reward(other, client)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "rewards.py: No such file or directory; give the path of the file from the"),
        (b"\xff", "rewards.py: is no text in UTF-8"),
        (b"#" * (LARGEST_FILE + 1), f"has more than {LARGEST_FILE} bytes"),
        (b"def scores(completions): ...", "did you mean scores?"),
        (b"def score(text): ...", "score has no argument completions"),
    ],
)
def test_a_file_that_cannot_be_used_is_explained(
    directory: Path, content: bytes | None, reason: str
) -> None:
    (directory / "rewards.py").unlink()
    if content is not None:
        (directory / "rewards.py").write_bytes(content)
    with pytest.raises(ConfigError, match=re.escape(reason)):
        pin_reward(config_from(values()))


def test_a_prompt_without_a_column_of_the_function_is_named(
    directory: Path, client: BufferClient
) -> None:
    rows = [{"prompt": f"{n}+1=", "answer": "1"} for n in range(8)]
    del rows[5]["answer"]
    (directory / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    pinned = pin_reward(config_from(values()))
    store_reward(pinned, client)
    with pytest.raises(BapoError) as refused:
        prepare(pinned, client)
    assert (
        "rewards.py: score needs the column answer, which prompt 6 of train.jsonl has not (it has "
        "prompt)"
    ) in str(refused.value)


# ---- commands -----------------------------------------------------------------------------------


def check(directory: Path, **task: Any) -> tuple[int, str]:
    (directory / "run.yaml").write_text(yaml.safe_dump(values(**task)))
    done = CliRunner().invoke(bapo, ["config", "check", "run.yaml"])
    return done.exit_code, str(done.exception) if done.exit_code else done.output


def test_config_check_tries_the_functions_on_the_first_rows(directory: Path) -> None:
    code, output = check(directory)
    assert code == 0, output
    assert "rewards.py: score gave rewards to the 3 rows that were tried" in output


def test_config_check_finds_a_search_for_numbers_that_finds_a_full_stop(directory: Path) -> None:
    """On a sentence that ends with ` .`, it fails, as it does on half of a model's responses."""
    (directory / "rewards.py").write_text(
        "import re\n\n"
        "def score(completions, **columns):\n"
        "    found = [re.findall(r'[\\d.]+', text) for text in completions]\n"
        "    return [float(each[-1]) if each else 0.0 for each in found]\n"
    )
    code, message = check(directory)
    assert code == 1
    assert "could not convert string to float: '.'" in message


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("return [None for text in completions]", "rewards.py:score returned [None]; return a"),
        ("return sum(map(len, completions))", "rewards.py:score returned 0; return a list"),
        ("return [1.0] * 2", "rewards.py:score returned 2 rewards for 1 completion"),
        ("return [len(text) / 0 for text in completions]", "raised ZeroDivisionError"),
        (
            "return [float(columns['solution'][0])]",
            "raised KeyError: 'solution' (rewards.py, line 2)",
        ),
    ],
)
def test_config_check_names_function_row_and_response(
    directory: Path, source: str, reason: str
) -> None:
    (directory / "rewards.py").write_text(f"def score(completions, **columns):\n    {source}\n")
    code, message = check(directory)
    assert code == 1
    assert reason in message
    assert "tried with row 1 ('0+1=') and the response ''" in message


def test_a_pushed_configuration_names_the_stored_file(
    directory: Path, stack: Endpoints, client: BufferClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BAPO_BUFFER_URL", stack.buffer_url)
    monkeypatch.setenv("BAPO_TOKEN", stack.token)
    file = directory / "run.yaml"
    comment = "# the reward of rewards.py:score_it and of others\n"
    task = values(reward=["rewards.py:score", "rewards.py:length"])
    file.write_text(comment + yaml.safe_dump({**task, "reward": {"weights": {"length": 0.1}}}))
    done = CliRunner().invoke(bapo, ["config", "push", "run.yaml"])
    assert done.exit_code == 0, done.exception
    text = client.config("reward").text
    assert text.startswith(comment)
    functions = config_from(yaml.safe_load(text)).task.functions
    assert functions is not None
    assert functions.names == ("score", "length")
    assert functions.digest is not None
    assert client.reward_file(functions.digest) == (directory / "rewards.py").read_text()


def test_parameters_of_a_pipeline_name_the_stored_file(
    directory: Path, client: BufferClient
) -> None:
    (directory / "run.yaml").write_text(yaml.safe_dump(values()))
    parameters = store_parameters(parameters_of("run.yaml", ["steps=3"]), lambda: client)
    functions = config_of(parameters).task.functions
    assert functions is not None
    assert functions.digest is not None
    assert client.reward_file(functions.digest) == (directory / "rewards.py").read_text()
    never: Callable[[], BufferClient] = lambda: pytest.fail("asked for a service")  # noqa: E731
    assert store_parameters(parameters, never) == parameters
    assert store_parameters({"stored_config": "mine"}, never) == {"stored_config": "mine"}
