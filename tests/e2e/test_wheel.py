"""The wheel, installed into an empty environment, works from any directory."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
import yaml

from tests.conftest import EASY
from tests.e2e.test_run import configuration

ROOT = Path(__file__).parents[2]
PACKAGES = ("bapo", "bapo_core", "pipelines", "services")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds the wheel from a copy, because setuptools leaves files beside the sources."""
    sources = tmp_path_factory.mktemp("sources")
    for package in PACKAGES:
        shutil.copytree(
            ROOT / package, sources / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, sources)
    output = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--wheel-dir", output, "."], cwd=sources, check=True)
    (built,) = output.glob("bapo-*.whl")
    return built


@pytest.fixture(scope="module")
def bapo(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command of an environment that has the wheel, and this environment's dependencies.

    A `.pth` file adds the dependencies without the `.pth` files among them: the project itself
    comes from the wheel, not from the checkout.
    """
    directory = tmp_path_factory.mktemp("environment")
    venv.create(directory, with_pip=False, symlinks=True)
    paths = sysconfig.get_paths(vars={"base": str(directory), "platbase": str(directory)})
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    python = directory / "bin/python"
    subprocess.run([*pip[:3], "--python", python, *pip[3:], wheel], check=True)
    (Path(paths["purelib"]) / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return directory / "bin/bapo"


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A directory with packages of the same names as ours, which cannot be imported."""
    for package in PACKAGES:
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("raise RuntimeError('not this one')\n")
    return tmp_path


def run(bapo: Path, directory: Path, *arguments: str, home: Path | None = None) -> str:
    scripts = Path(sys.executable).parent
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    # `weed` is a script of the dependencies.
    environment["PATH"] = f"{environment['PATH']}{os.pathsep}{scripts}"
    if home is not None:
        environment["BAPO_HOME"] = str(home)
    done = subprocess.run(
        [bapo, *arguments], cwd=directory, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_has_the_files_of_the_packages_and_no_other(wheel: Path) -> None:
    files = {file for package in PACKAGES for file in (ROOT / package).rglob("*") if file.is_file()}
    expected = {str(file.relative_to(ROOT)) for file in files if "__pycache__" not in file.parts}
    # Compiled from the code; an installed `bapo pipeline compile` writes it anywhere.
    expected.remove("pipelines/bapo_pipeline.yaml")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name for name in names if ".dist-info/" not in name} == expected


def test_help_and_checking_work_from_any_directory(bapo: Path, hostile: Path) -> None:
    assert "bapo run examples/countdown.yaml" in run(bapo, hostile, "--help")
    assert "is valid" in run(
        bapo, hostile, "config", "check", str(ROOT / "examples/countdown.yaml")
    )


def test_a_run_works_from_an_empty_directory(bapo: Path, tmp_path: Path, home: Path) -> None:
    """It needs no file: the tiny model, the task and the defaults are in the wheel."""
    keys = (
        *("name=installed", "steps=2", "evaluation.samples=1", "rollout.group_size=4"),
        *("task.train_prompts=64", "task.test_prompts=4", "rollout.prompts_per_step=8"),
        *("rollout.max_prompt_tokens=32", "rollout.max_response_tokens=32"),
        *("task.options={template: short}", "optimizer.minibatch_prompts=4"),
    )
    shown = run(bapo, tmp_path, "run", *keys, "--port", "0", home=home)
    assert "held-out accuracy" in shown
    assert {path.name for path in (tmp_path / "runs/installed").iterdir()} >= {
        *("config.yaml", "summary.json", "report.html"),
    }


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_works_from_a_directory_with_packages_of_our_names(
    bapo: Path, hostile: Path, tmp_path_factory: pytest.TempPathFactory, processes: int, home: Path
) -> None:
    from tools.tiny_models import text as tiny

    model = tmp_path_factory.mktemp("model") / "model"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny, "EXAMPLES", 256)
        tiny.build_tiny_model(model, seed=0, steps=2, task=tiny.CountdownTask(**EASY))
    config = configuration("installed", model)
    config |= {"steps": 2, "trainer": {"processes": processes}}
    # The environment of the wheel does not have the tests' plug-in.
    config["task"] = {**config["task"], "name": "countdown", "options": EASY}
    (hostile / "run.yaml").write_text(yaml.safe_dump(config))
    shown = run(bapo, hostile, "run", "run.yaml", "--new", "--port", "0", home=home)
    assert "held-out accuracy" in shown
    (summary,) = hostile.glob("runs/*/summary.json")
    assert summary.is_file()
    assert "pass@k" in run(bapo, hostile, "eval", str(model), "run.yaml", home=home)
