"""vLLM is started with an import path and an environment that belong to it alone."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from services.model.vision import WITH_VLLM
from services.rollout.vllm.server import NodePlace, VllmOptions, compiler_environment
from services.rollout.vllm.weight_layout import read_layout
from tests.micro import save_micro_vision_model

SOCKET = Path("/sockets/api.sock")
MODULES = {"bapo_vllm_worker.py", "bapo_vllm_headless.py", "bapo_vllm_images.py"}


@pytest.fixture
def options(tmp_path: Path) -> VllmOptions:
    return VllmOptions("python", 96, "float32", tmp_path / "vllm.log", arguments=["--seed", "1"])


def test_without_a_compiler_that_works_vllm_compiles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    off = {"TORCHDYNAMO_DISABLE": "1"}
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert compiler_environment() == off
    assert "(g++: [Errno 2] No such file or directory: 'g++'): vLLM runs without" in caplog.text
    compiler = tmp_path / "g++"
    compiler.write_text("#!/bin/sh\nread -r line && test \"$line\" = '#include <vector>'\n")
    compiler.chmod(0o755)
    assert compiler_environment() == {}
    compiler.write_text("#!/bin/sh\necho \"g++: cannot execute 'cc1plus'\" >&2; exit 1\n")
    assert compiler_environment() == off
    assert "(g++: g++: cannot execute 'cc1plus'): vLLM runs without" in caplog.text
    monkeypatch.setenv("CXX", "clang++")
    assert compiler_environment() == off


def test_the_command_names_the_model_and_ends_with_the_users_arguments(
    options: VllmOptions,
) -> None:
    command = options.command(Path("/weights/v3"), SOCKET)
    assert command[:3] == ["python", "-m", "vllm.entrypoints.openai.api_server"]
    for flag, value in (
        ("--model", "/weights/v3"),
        ("--uds", "/sockets/api.sock"),
        ("--max-model-len", "96"),
        ("--dtype", "float32"),
        ("--worker-extension-cls", "bapo_vllm_worker.LoadsPolicies"),
    ):
        assert command[command.index(flag) + 1] == value
    assert "--host" not in command, "it listens on no port"
    assert "--port" not in command
    assert command[-2:] == ["--seed", "1"]


def test_a_worker_node_runs_the_model_of_its_leader_without_a_server(
    options: VllmOptions, tmp_path: Path
) -> None:
    leader, worker = (NodePlace(rank, 2, "leader.example", 29_999) for rank in (0, 1))
    command = options.command(Path("/leader/v3"), SOCKET, leader)
    headless = options.headless_command(Path("/worker/v3"), worker)
    assert headless[:4] == ["python", "-m", "bapo_vllm_headless", "--headless"]
    assert "--uds" not in headless
    for flag, value in (
        ("--nnodes", "2"),
        ("--master-addr", "leader.example"),
        ("--master-port", "29999"),
        ("--distributed-executor-backend", "mp"),
    ):
        assert command[command.index(flag) + 1] == headless[headless.index(flag) + 1] == value
    assert command[command.index("--node-rank") + 1] == "0"
    assert headless[headless.index("--node-rank") + 1] == "1"
    model, other = (words[words.index("--model") + 2 :] for words in (command, headless))
    assert model == other
    assert "--nnodes" not in options.command(tmp_path, SOCKET)


def test_the_import_path_of_vllm_has_the_modules_of_this_project_and_nothing_else(
    options: VllmOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["/app", "/site-packages"]))
    options.install_modules()
    (directory,) = options.variables()["PYTHONPATH"].split(os.pathsep)
    assert {path.name for path in Path(directory).iterdir()} == MODULES


def test_vllm_gets_no_secret_and_the_users_variables_come_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BAPO_TOKEN", "secret")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    more = {"HF_HUB_OFFLINE": "0"}
    variables = VllmOptions(
        "python", 96, "float32", tmp_path / "vllm.log", environment=more
    ).variables()
    assert not [name for name in variables if name.startswith("BAPO_")]
    assert variables["OMP_NUM_THREADS"] == "3"
    assert variables["VLLM_SERVER_DEV_MODE"] == "1"
    assert variables["HF_HUB_OFFLINE"] == "0"


def test_the_worker_extension_is_importable_without_this_project(options: VllmOptions) -> None:
    options.install_modules()
    code = (
        "import sys, bapo_vllm_headless, bapo_vllm_worker\n"
        "assert callable(bapo_vllm_worker.LoadsPolicies.load_policy)\n"
        "assert not {'services', 'bapo_core', 'torch'} & set(sys.modules)\n"
    )
    # -S leaves site-packages off the path, where this project may be installed.
    subprocess.run([sys.executable, "-S", "-P", "-c", code], env=options.variables(), check=True)


def test_the_worker_extension_may_be_installed_again(options: VllmOptions) -> None:
    options.install_modules()
    options.install_modules()
    assert {path.name for path in options.module_directory.iterdir()} == MODULES


WITHOUT_MODELS = """
import sys
from pathlib import Path

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
import services.rollout.server
from services.rollout.vllm.driver import VllmDriver
from services.rollout.vllm.weight_layout import read_layout
from services.rollout.vllm.server import NodePlace, VllmOptions

directory = Path(sys.argv[1])
options = VllmOptions("python", 96, "float32", directory / "vllm.log")
VllmDriver(options, None, lambda digest: b"")
print(read_layout(directory).image_token)
print(*options.command(directory, Path("/api.sock")))
print(*options.headless_command(directory, NodePlace(1, 2, "leader.example", 29_999)))
"""
"""A program for an environment with neither torch nor transformers, as the rollout image has."""


@pytest.mark.parametrize("architecture", ["qwen2_5_vl", "gemma3", "vipllava", "qwen3_5"])
def test_vllm_is_started_without_torch_and_transformers(architecture: str, tmp_path: Path) -> None:
    directory = save_micro_vision_model(tmp_path, architecture)
    token, *commands = subprocess.run(
        [sys.executable, "-c", WITHOUT_MODELS, str(directory)],
        capture_output=True,
        check=True,
        text=True,
    ).stdout.splitlines()
    assert token == "3"
    for command in commands:
        assert "--skip-tokenizer-init" not in command, "the image processor needs the tokenizer"
    assert ("--middleware" in commands[0]) == (architecture in WITH_VLLM)


def test_models_with_recurrent_layers_have_arguments_of_their_own(tmp_path: Path) -> None:
    options = VllmOptions(
        "python", 96, "float32", tmp_path / "vllm.log", recurrent_arguments=["--of-recurrent"]
    )
    recurrent = save_micro_vision_model(tmp_path / "recurrent", "qwen3_5")
    other = save_micro_vision_model(tmp_path / "other", "qwen3_vl")
    assert "--of-recurrent" in options.command(recurrent, SOCKET)
    assert "--of-recurrent" not in options.command(other, SOCKET)


def test_the_tokens_that_end_a_response_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = save_micro_vision_model(tmp_path)
    with caplog.at_level(logging.INFO):
        ends = read_layout(directory).ends
    said = f"responses end with the tokens {', '.join(map(str, ends))}"
    assert [record.getMessage() for record in caplog.records] == [said]
