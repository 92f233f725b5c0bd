"""Data sets of the hub, read by the real library from a stand-in of the hub."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bapo_core.tasks.diagrams import Diagram, draw
from tests.integration.support.hub import Hub, Repository, running_hub

datasets = pytest.importorskip("datasets", reason="needs datasets: run `make install`")

Answer = dict[str, Any]
Read = Callable[..., Answer]


CARD = """---
configs:
- {config_name: main, data_files: a.json}
- {config_name: b, data_files: b.json}
---
"""


def problems(count: int, start: int = 0) -> list[dict[str, str]]:
    return [
        {"question": f"{n}+1?", "solution": str(n + 1), "thoughts": os.urandom(2000).hex()}
        for n in range(start, start + count)
    ]


def parquet(rows: list[dict[str, str]]) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), buffer, row_group_size=50)
    return buffer.getvalue()


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with running_hub() as hub:
        sums = hub.repositories["acme/sums"] = Repository()
        sums.commit({"data/train-00000-of-00001.parquet": parquet(problems(5))}, "v1")
        sums.commit(
            {
                "README.md": b"# Sums\n",
                "data/train-00000-of-00002.parquet": parquet(problems(100)),
                "data/train-00001-of-00002.parquet": parquet(problems(100, 100)),
                "data/test-00000-of-00001.parquet": parquet(problems(3, 5000)),
            }
        )
        one = hub.repositories["acme/one"] = Repository()
        one.commit({"test.jsonl": "\n".join(map(json.dumps, problems(3))).encode()})
        broken = b'{"question": "1+1?", "solution": "2"}\n{"question": 7, "solution": "2"'
        hub.repositories["acme/broken"] = Repository()
        hub.repositories["acme/broken"].commit({"train.jsonl": broken})
        hub.repositories["acme/empty"] = Repository()
        hub.repositories["acme/empty"].commit({"README.md": b"# Nothing\n"})
        gated = hub.repositories["acme/gated"] = Repository(token="sesame")
        gated.commit({"train.json": json.dumps(problems(2)).encode()})
        several = hub.repositories["acme/several"] = Repository()
        several.commit(
            {
                "README.md": CARD.encode(),
                "a.json": json.dumps(problems(2)).encode(),
                "b.json": json.dumps(problems(3)).encode(),
            }
        )
        yield hub


@pytest.fixture(scope="module")
def read(hub: Hub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Read]:
    """Yields a function that reads an address in a process whose hub is the stand-in."""
    directory = tmp_path_factory.mktemp("hub")
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(directory / "home")}
    environment.pop("HF_TOKEN", None)
    command = [
        sys.executable,
        "-m",
        "tests.integration.support.read_dataset_program",
        str(directory / "rows"),
    ]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdin is not None
    assert process.stdout is not None

    def read(
        address: str, limit: int | None = None, *, task: str = "math", **changes: str
    ) -> Answer:
        request = {"address": address, "limit": limit, "task": task, "environment": changes}
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        answer: Answer = json.loads(process.stdout.readline())
        return answer

    yield read
    process.kill()
    process.wait()


def test_a_split_is_streamed_and_kept(hub: Hub, read: Read) -> None:
    hub.requests.clear()
    answer = read("hf://acme/sums:train", 60)
    assert len(answer["prompts"]) == 60
    assert answer["prompts"][59] == {"problem": "59+1?", "answer": "60"}
    fetched = [request for request in hub.requests if "bytes=" in request]
    assert any("train-00000-of-00002" in request for request in fetched)
    assert not any("train-00001-of-00002" in request for request in fetched), "it is not needed"
    hub.requests.clear()
    assert read(answer["address"], 60) == answer
    assert hub.requests == [], "a pinned data set needs no network the second time"


def test_a_task_may_take_all_columns_of_the_hub(hub: Hub, read: Read) -> None:
    answer = read("hf://acme/one", task="function")
    again = read(answer["address"], task="function")
    for payload in (answer["prompts"][2], again["prompts"][2]):
        assert payload["prompt"] == "2+1?"
        assert payload["columns"].keys() == {"solution", "thoughts"}
    assert read(answer["address"])["prompts"][2] == {"problem": "2+1?", "answer": "3"}


def test_images_of_the_hub_stay_the_files_that_they_are(hub: Hub, read: Read) -> None:
    files = [draw(Diagram(segments=[(0j, complex(1, n))]), 56).png for n in (1, 2)]
    rows = [
        {"images": [file], "problem": "<image>Find x.", "answer": str(number)}
        for number, file in enumerate(files)
    ]
    features = datasets.Features(
        {
            "images": datasets.List(datasets.Image()),
            "problem": datasets.Value("string"),
            "answer": datasets.Value("string"),
        }
    )
    rows = [{**row, "images": [{"bytes": row["images"][0], "path": None}]} for row in rows]
    buffer = io.BytesIO()
    datasets.Dataset.from_list(rows, features=features).to_parquet(buffer)
    hub.repositories["acme/diagrams"] = Repository()
    hub.repositories["acme/diagrams"].commit({"data/train-0.parquet": buffer.getvalue()})
    answer = read("hf://acme/diagrams", task="geometry")
    digests = [prompt["images"][0]["digest"] for prompt in answer["prompts"]]
    assert digests == [hashlib.sha256(file).hexdigest() for file in files]
    hub.requests.clear()
    assert read(answer["address"], task="geometry") == answer, "from the rows that were kept"
    assert hub.requests == []


@pytest.mark.parametrize(
    ("name", "column", "answers"),
    [
        ("floats", pa.array([33.3, 0.1], pa.float32()), ["33.3", "0.1"]),
        (
            "alternatives",
            pa.array([[33.3, 0.1], [2.5, 7.7]], pa.list_(pa.float32())),
            [["33.3", "0.1"], ["2.5", "7.7"]],
        ),
        (
            "decimals",
            pa.array([Decimal("33.30"), Decimal("-1")], pa.decimal128(6, 2)),
            ["33.30", "-1.00"],
        ),
    ],
)
def test_answers_of_the_hub_keep_their_decimals(
    hub: Hub, read: Read, name: str, column: pa.Array, answers: list[Any]
) -> None:
    buffer = io.BytesIO()
    pq.write_table(pa.table({"question": ["a", "b"], "solution": column}), buffer)
    hub.repositories[f"acme/{name}"] = Repository()
    hub.repositories[f"acme/{name}"].commit({"data/train-0.parquet": buffer.getvalue()})
    answer = read(f"hf://acme/{name}")
    assert [prompt["answer"] for prompt in answer["prompts"]] == answers
    hub.requests.clear()
    assert read(answer["address"]) == answer, "from the rows that were kept"
    assert hub.requests == []


def test_a_revision_is_recorded_as_its_commit(hub: Hub, read: Read) -> None:
    sums = hub.repositories["acme/sums"]
    former = read("hf://acme/sums@v1:train")
    assert former["address"] == f"hf://acme/sums@{sums.branches['v1']}:train"
    assert len(former["prompts"]) == 5
    moved = sums.commit({"train.parquet": parquet(problems(4))}, "v1")
    assert read("hf://acme/sums@v1:train")["address"] == f"hf://acme/sums@{moved}:train"
    assert read(former["address"]) == former


def test_the_only_split_need_not_be_named(read: Read) -> None:
    assert len(read("hf://acme/one")["prompts"]) == 3
    error = read("hf://acme/sums")["error"]
    assert error.endswith("the data set has several splits; add one: train, test")


def test_one_of_several_configurations_is_named(read: Read) -> None:
    assert len(read("hf://acme/several:b/train")["prompts"]) == 3
    error = read("hf://acme/several:train")["error"]
    assert "pick one among the available configs: ['main', 'b']" in error
    assert "hf://acme/several:CONFIGURATION/SPLIT" in error


def test_a_gated_data_set_needs_a_token(read: Read) -> None:
    error = read("hf://acme/gated:train")["error"]
    assert "the data set is gated; accept its conditions" in error
    assert "set HF_TOKEN" in error
    assert len(read("hf://acme/gated:train", HF_TOKEN="sesame")["prompts"]) == 2


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("hf://acme/none:train", "hf://acme/none:train: the hub has no such data set"),
        ("hf://acme/sums@v9:train", "the data set has no revision v9"),
        ("hf://acme/sums:dev", "the data set has no split dev; give one that it has: train, test"),
        ("hf://acme/several:c/train", r"'c' not found\. Available: \['main', 'b'\]"),
        ("hf://acme/empty", "doesn't contain any data files"),
        ("hf://acme/broken", r"hf://acme/broken@\w{40}: cannot be read: Unexpected character"),
        ("hf://acme/sums/data:train", "is no address of a data set; write hf://organisation/name"),
        ("hf://acme/sums:train[:10]", "the data set has no split"),
        ("hf://ac me/sums:train", "Repo id must use alphanumeric chars"),
    ],
)
def test_an_unusable_address_is_explained_in_one_line(
    read: Read, address: str, message: str
) -> None:
    error = read(address)["error"]
    assert re.search(message, error), error
    assert "\n" not in error


def test_the_error_of_a_missing_column_lists_the_present_ones(hub: Hub, read: Read) -> None:
    hub.repositories["acme/other"] = Repository()
    rows = [{"prompt": "1+1?", "solution": "2"}]
    for number, (name, data) in enumerate(
        {"train.parquet": parquet(rows), "train.json": json.dumps(rows).encode()}.items()
    ):
        hub.repositories["acme/other"].commit({name: data}, f"v{number}")
        error = read(f"hf://acme/other@v{number}")["error"]
        assert "no column question (there are prompt, solution)" in error


def test_a_hub_that_does_not_answer_is_named(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "services.cli",
            "dataset",
            "upload",
            "hf://acme/sums:train",
            "--task",
            "math",
        ],
        env={**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    assert "hf://acme/sums:train: cannot be read from the hub" in done.stderr
    assert done.stderr.count("\n") == 1
