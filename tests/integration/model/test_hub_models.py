"""Models of the Hugging Face hub, from a stand-in of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.support.hub import Hub, Repository, running_hub

PROGRAM = """
import sys
from pathlib import Path

from bapo_core.config import load_config
from bapo_core.errors import BapoError
from services.model.resolve import ensure_model, pin_model

home = Path(sys.argv[2])
try:
    pinned = pin_model(load_config(None, [f"model.path={sys.argv[1]}"]), home)
    print(pinned.model.path)
    print((ensure_model(pinned, home) / "config.json").read_text())
except BapoError as error:
    sys.exit(str(error))
"""
"""In a process of its own, because the library reads the hub's address when it is imported."""


@pytest.fixture
def hub() -> Iterator[Hub]:
    with running_hub() as hub:
        yield hub


def resolve(hub: Hub, path: str, home: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(home / "hub")}
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, path, str(home)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_run_keeps_the_commit_with_which_it_began(hub: Hub, tmp_path: Path) -> None:
    model = hub.repositories["acme/model"] = Repository()
    first = model.commit({"config.json": json.dumps({"number": 1}).encode()})
    began = resolve(hub, "hf://acme/model", tmp_path)
    assert began.stdout.splitlines() == [f"hf://acme/model@{first}", '{"number": 1}'], began.stderr
    second = model.commit({"config.json": json.dumps({"number": 2}).encode()})
    resumed = resolve(hub, f"hf://acme/model@{first}", tmp_path)
    assert resumed.stdout == began.stdout
    another = resolve(hub, "hf://acme/model@main", tmp_path)
    assert another.stdout.splitlines() == [f"hf://acme/model@{second}", '{"number": 2}']
    missing = resolve(hub, "hf://acme/none", tmp_path)
    assert missing.stderr.startswith("model.path hf://acme/none: "), missing.stderr
    assert "check the name" in missing.stderr
