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
PACKAGES = ("bapo_core", "pipelines", "services")

pytestmark = pytest.mark.slow


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


def test_the_wheel_has_the_data_files(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for path in (
        "services/dashboard",
        "services/buffer/migrations",
        "services/model/tiny_model",
        "services/model/tiny_vision_model",
    ):
        files = {file for file in (ROOT / path).rglob("*") if file.is_file()}
        expected = {
            str(file.relative_to(ROOT)) for file in files if "__pycache__" not in file.parts
        }
        assert expected <= names
    assert {f"{package}/py.typed" for package in PACKAGES} <= names


def test_help_and_checking_work_from_any_directory(bapo: Path, hostile: Path) -> None:
    assert "bapo run examples/countdown.yaml" in run(bapo, hostile, "--help")
    assert "is valid" in run(
        bapo, hostile, "config", "check", str(ROOT / "examples/countdown.yaml")
    )


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
