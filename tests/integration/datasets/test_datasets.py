"""Data sets of S3 and of the buffer service, and runs of the pipeline that use them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bapo_core.config import config_from
from bapo_core.errors import BapoError
from bapo_core.tasks import get_task
from pipelines import steps
from pipelines.configuration import read_config
from pipelines.steps import PipelineContext
from services.buffer.api import wire
from services.buffer.api.client import BufferClient
from services.cli.commands.compare import train_and_compare
from services.cli.local_run import LocalRun, create_run
from services.cli.main import main
from services.cli.variants import PlannedRun
from services.common.errors import ServiceError
from services.common.objectstore import ObjectStore
from services.datasets import DataSources, digest_of_prompts, read_dataset
from services.model.resolve import TINY_VISION_MODEL
from services.stack.stack import Endpoints
from tests.integration.support.hub import Repository, running_hub

MATH = get_task("math")
CONFIG: dict[str, Any] = {
    "model": {"path": "tiny-vision"},
    "task": {"name": "math", "columns": {"problem": "question", "answer": "solution"}},
    "rollout": {"prompts_per_step": 4, "group_size": 4},
    "optimizer": {"minibatch_prompts": 4},
}
Bapo = Callable[..., tuple[int, str, str]]


def problems(count: int, start: int = 0) -> list[dict[str, Any]]:
    return [{"question": f"{n}+1?", "solution": [n + 1]} for n in range(start, start + count)]


def items(count: int, start: int = 0) -> list[wire.PromptItem]:
    rows = [{"problem": f"{n}+1?", "answer": str(n + 1)} for n in range(start, start + count)]
    return [wire.PromptItem(uid=MATH.uid(row), task="math", payload=row) for row in rows]


@pytest.fixture
def client(stack: Endpoints) -> BufferClient:
    return BufferClient(stack.buffer_url, stack.token)


@pytest.fixture
def sources(stack: Endpoints, client: BufferClient) -> DataSources:
    return DataSources(None, lambda: ObjectStore(stack.object_store), lambda: client)


@pytest.fixture
def bapo(
    stack: Endpoints,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Bapo:
    """Returns a function that runs a command; it returns exit code, output and errors."""
    monkeypatch.chdir(tmp_path)
    for name, value in {**stack.environment(), "COLUMNS": "200"}.items():
        monkeypatch.setenv(name, value)

    def bapo(*arguments: str) -> tuple[int, str, str]:
        code = 0
        try:
            main(arguments)
        except SystemExit as ended:
            code = int(ended.code or 0)
        return code, *capsys.readouterr()

    return bapo


def test_a_file_is_uploaded_once_and_used_by_its_name(
    bapo: Bapo, client: BufferClient, sources: DataSources, tmp_path: Path
) -> None:
    (tmp_path / "data.json").write_text(
        json.dumps([*problems(3), {"question": "?", "solution": []}])
    )
    mapping = ("--column", "problem=question", "--column", "answer=solution")
    upload = ("dataset", "upload", "data.json", "--task", "math", "--name", "Mine.1", *mapping)
    done = bapo(*upload)
    assert done == (
        0,
        "dataset Mine.1: 3 prompts, 1 rows without an answer left out\n"
        "use it as task.train_path=dataset:Mine.1\n",
        "",
    )
    assert bapo(*upload) == done, "a repeated upload changes nothing"
    state = client.dataset("Mine.1")
    assert (state.task, state.prompts, state.source) == ("math", 3, "data.json")
    read = read_dataset(MATH, "dataset:Mine.1", sources, {}, 2, split="train")
    assert [prompt.payload["problem"] for prompt in read.prompts] == ["0+1?", "1+1?"]

    (tmp_path / "data.json").write_text(json.dumps(problems(4)))
    code, _, error = bapo(*upload)
    assert code == 1
    assert f"holds other prompts, with the digest {state.digest[:12]}; choose another" in error
    assert client.dataset("Mine.1") == state
    listed = json.loads(bapo("dataset", "list", "--json")[1])
    assert state.model_dump(mode="json") in listed


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("none.jsonl", "--task", "math"), 1, "none.jsonl: No such file or directory"),
        (("none.jsonl", "--task", "sums"), 1, "no task 'sums'; known tasks: "),
        (("none.jsonl", "--task", "math", "--column", "problem"), 2, "write COLUMN=THEIRS"),
    ],
)
def test_an_invalid_upload_is_refused_in_one_line(
    bapo: Bapo, arguments: tuple[str, ...], code: int, message: str
) -> None:
    exit_code, _, error = bapo("dataset", "upload", *arguments)
    assert exit_code == code
    assert message in error


def test_an_interrupted_upload_is_noticed_and_completed(
    client: BufferClient, sources: DataSources, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = items(5)
    digest = digest_of_prompts(prompts)
    client.upload_dataset("interrupted", prompts[:3], digest=digest)
    with pytest.raises(BapoError, match=f"its 3 prompts do not have .* digest {digest[:12]}; run"):
        read_dataset(MATH, "dataset:interrupted", sources, {})
    monkeypatch.setattr("services.buffer.api.client.BYTES_PER_UPLOAD", 200)
    client.upload_dataset("interrupted", prompts, digest=digest)
    assert read_dataset(MATH, "dataset:interrupted", sources, {}).prompts == prompts


def test_a_dataset_with_a_digest_takes_no_other_prompts(client: BufferClient) -> None:
    client.upload_dataset("sealed", items(2), digest="0" * 64)
    for digest in (None, "1" * 64):
        with pytest.raises(ServiceError, match="holds other prompts, with the digest 000000000000"):
            client.upload_dataset("sealed", items(1, 7), digest=digest)
    client.upload_dataset("open", items(2))
    with pytest.raises(ServiceError, match="holds other prompts, with no recorded digest"):
        client.upload_dataset("open", items(2), digest="0" * 64)


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("dataset:absent", "dataset:absent: there is no such dataset; `bapo dataset list`"),
        ("dataset:no/name", "dataset:no/name: there is no such dataset"),
        ("dataset:numbers", "its prompts are of the task countdown, but task.name is math"),
        ("s3://bucket", "'s3://bucket' is no address; give s3://bucket/key"),
        ("s3://no-such-bucket/x.jsonl", "s3://no-such-bucket/x.jsonl: .* NoSuchBucket; check the"),
        ("s3://BUCKET/none.jsonl", "none.jsonl: .* has no such object: NoSuchKey"),
        ("s3://BUCKET/data.csv", r"data.csv: the suffix is '\.csv'; give a file"),
        ("s3://BUCKET/data.jsonl", "data.jsonl, row 1: not JSON"),
    ],
)
def test_an_unusable_address_is_explained(
    client: BufferClient, sources: DataSources, address: str, message: str
) -> None:
    store = sources.open_store()
    numbers = wire.PromptItem(uid="countdown:1-2:3", task="countdown", payload={"nums": [1, 2]})
    client.upload_dataset("numbers", [numbers])
    for key in ("data.csv", "data.jsonl"):
        store.put(key, b"problem,answer")
    with pytest.raises(BapoError, match=message):
        read_dataset(MATH, address.replace("BUCKET", store.settings.bucket), sources, {})


def test_prompts_are_listed_in_pages(client: BufferClient, stack: Endpoints) -> None:
    client.upload_dataset("paged", items(7))
    assert list(client.dataset_prompts("paged")) == items(7)
    assert [item.dataset for item in client.datasets()] == sorted(
        item.dataset for item in client.datasets()
    )


def test_a_run_of_this_machine_takes_data_of_the_services(
    bapo: Bapo,
    client: BufferClient,
    stack: Endpoints,
    home: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`bapo` sets the variables of the stack."""
    store = ObjectStore(stack.object_store)
    rows = [*problems(2, 700), {"question": "?", "solution": None}]
    store.put("local/test.json", json.dumps(rows).encode())
    client.upload_dataset("local-train", items(8, 600))
    paths = {
        "train_path": "dataset:local-train",
        "test_path": f"s3://{store.settings.bucket}/local/test.json",
    }
    config = config_from({**CONFIG, "name": "own-local", "task": {**CONFIG["task"], **paths}})
    run = LocalRun(config, stack, tmp_path, tmp_path, Console(width=200))
    create_run(run, TINY_VISION_MODEL)
    state = run.client.run_state()
    assert client.dataset(state.train_dataset).prompts == 8
    test_dataset = state.test_datasets["test"]
    assert client.dataset(test_dataset).prompts == 2
    printed = capsys.readouterr().out
    assert printed == f"note: {test_dataset}: 2 prompts, 1 rows without an answer left out\n"
    with pytest.raises(BapoError, match="run 'own-local' exists"):
        create_run(run, TINY_VISION_MODEL)

    pinned = f"hf://acme/sums@{'0' * 40}:train"
    moved = config.task.model_copy(update={"train_path": pinned})
    planned = PlannedRun("moved", config.model_copy(update={"task": moved}))
    message = f"task.train_path was dataset:local-train, and is {pinned} now"
    with pytest.raises(BapoError, match=message):
        train_and_compare(
            [planned], directory=tmp_path, home=home, console=Console(width=200), port=0
        )


# ---- runs of the pipeline ---------------------------------------------------------------------


PREPARE = """
import json, sys
from pipelines.configuration import read_config
from pipelines.steps import pipeline_step, prepare
run, config, settings = map(json.loads, sys.argv[1:])
with pipeline_step(run) as (context, _):
    print(prepare(context, read_config(run, config, None, [], settings)))
"""


def test_a_run_takes_data_of_every_source_and_refuses_other_prompts_later(
    stack: Endpoints, client: BufferClient, tmp_path: Path
) -> None:
    store = ObjectStore(stack.object_store)
    own = f"s3://{store.settings.bucket}/own"
    store.put("own/test.jsonl", "\n".join(map(json.dumps, problems(3, 900))).encode())
    store.put("own/train.json", json.dumps(problems(8)).encode())
    store.put("own/other.json", json.dumps(problems(9)).encode())
    client.upload_dataset("own-data", items(8))

    created = wire.RunCreate.model_validate_json(prepare_in_a_pod(stack, tmp_path, own))
    assert re.fullmatch(r"hf://acme/secret@\w{40}", created.config["task"]["train_path"])
    client.create_run(created)

    def prepare(run: str, address: str) -> wire.RunCreate:
        context = PipelineContext(
            BufferClient(stack.buffer_url, stack.token, run=run), store, tmp_path, print
        )
        settings = {"train_data": address, "test_data": f"{own}/test.jsonl"}
        config = read_config(run, CONFIG, None, [], settings)
        return wire.RunCreate.model_validate_json(steps.prepare(context, config))

    for address in (f"{own}/train.json", "dataset:own-data"):
        other = prepare("own-other", address)
        assert other.config["task"]["train_path"] == address
        assert other.train_dataset == created.train_dataset, "it is named by its content"
        assert prepare("own-hub", address) == created, "the run has the same prompts"
    with pytest.raises(BapoError, match="run 'own-hub' was created with other prompts") as caught:
        prepare("own-hub", f"{own}/other.json")
    assert f"{created.train_dataset} of {created.config['task']['train_path']}" in str(caught.value)
    assert f"{own}/other.json has now" in str(caught.value)


def prepare_in_a_pod(stack: Endpoints, scratch: Path, own: str) -> str:
    """Prepares the run `own-hub` in a process with a pod's variables; returns its request.

    Its training data is gated, in a mirror of the hub.
    """
    with running_hub() as hub:
        hub.repositories["acme/secret"] = Repository(token="sesame")
        hub.repositories["acme/secret"].commit({"train.json": json.dumps(problems(8)).encode()})
        variables = {
            "BAPO_LOCAL_JOBS": str(scratch / "jobs"),
            "BAPO_RELEASE": "bapo",
            "BAPO_CONNECTION": "bapo-connection",
            "BAPO_TOKEN_SECRET": "bapo-token",
            "BAPO_TRAINER_IMAGE": "trainer",
            "BAPO_TRAINER_SERVICE_ACCOUNT": "trainer",
            "BAPO_SCRATCH": str(scratch),
            "HF_ENDPOINT": hub.url,
            "HF_TOKEN": "sesame",
            "HF_HOME": str(scratch / "hub"),
        }
        settings = {"train_data": "hf://acme/secret", "test_data": f"{own}/test.jsonl"}
        done = subprocess.run(
            [sys.executable, "-c", PREPARE, *map(json.dumps, ("own-hub", CONFIG, settings))],
            env={**os.environ, **stack.environment(), **variables},
            capture_output=True,
            text=True,
            timeout=600,
        )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]
