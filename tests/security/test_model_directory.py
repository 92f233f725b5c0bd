"""A model directory, given or pointed to by somebody else, must not run code where it is read."""

from __future__ import annotations

import ast
import io
import json
import pickle
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from bapo_core.config import RunConfig
from bapo_core.errors import BapoError
from services.model.conversation import load_tokenizer
from services.model.resolve import TINY_VISION_MODEL
from services.model.vision import VisionProcessor
from services.model.whole_processor import WholeProcessor
from services.rollout.transformers_engine import TransformersEngine
from services.trainer.demonstrations import DemonstrationEncoder
from services.trainer.load_policy import empty_policy, load_policy

ROOT = Path(__file__).parents[2]
AUTO_CLASSES = (
    "AutoConfig",
    "AutoImageProcessor",
    "AutoModelForCausalLM",
    "AutoModelForImageTextToText",
    "AutoProcessor",
    "AutoTokenizer",
)
MODULE = """
import pathlib
pathlib.Path({marker!r}).touch()
from transformers import PretrainedConfig

class Hostile(PretrainedConfig):
    model_type = "hostile"
"""


def load_demonstrations(directory: Path) -> None:
    _ = DemonstrationEncoder(RunConfig(), directory)._tokenizer


def load_whole_processor(directory: Path) -> None:
    class Config:
        model_type = "hostile"

        def get_text_config(self) -> Config:
            return self

    WholeProcessor.load(directory, Config(), None, None)  # type: ignore[arg-type]


LOADERS: dict[str, Callable[[Path], object]] = {
    "tokenizer": load_tokenizer,
    "images": VisionProcessor.load,
    "processor": load_whole_processor,
    "policy": load_policy,
    "shards": empty_policy,
    "demonstrations": load_demonstrations,
    "engine": lambda directory: TransformersEngine().load(directory, 1),
}
"""What reads the files of a model directory, in the processes of bapo."""


def edit_json(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(content | changes))


def point_to_code(directory: Path, place: str, *, known_type: bool) -> None:
    """Names code at `place` in all the files of a directory that may name code."""
    auto_map: dict[str, Any] = dict.fromkeys(AUTO_CLASSES, f"{place}.Hostile")
    auto_map["AutoTokenizer"] = [f"{place}.Hostile", None]
    for name in (
        "config.json",
        "tokenizer_config.json",
        "preprocessor_config.json",
        "processor_config.json",
    ):
        edit_json(directory / name, auto_map=auto_map)
    if not known_type:
        edit_json(directory / "config.json", model_type="hostile", architectures=["Hostile"])
        edit_json(directory / "tokenizer_config.json", tokenizer_class="Hostile")
        edit_json(
            directory / "preprocessor_config.json",
            image_processor_type="Hostile",
            processor_class="Hostile",
        )
        edit_json(directory / "processor_config.json", processor_class="Hostile")
        (directory / "tokenizer.json").unlink()


@pytest.fixture(params=["text", "images"])
def directory(
    request: pytest.FixtureRequest, tmp_path: Path, small_model: Path, marker: Path
) -> Path:
    """Returns a model directory with a module that leaves a mark when it is run."""
    source = small_model if request.param == "text" else TINY_VISION_MODEL
    directory = tmp_path / "model"
    shutil.copytree(source, directory)
    (directory / "mod.py").write_text(MODULE.format(marker=str(marker)))
    (directory / "custom_generate").mkdir()
    (directory / "custom_generate" / "generate.py").write_text(MODULE.format(marker=str(marker)))
    return directory


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    """Returns the file that the hostile code would create."""
    return tmp_path / "code-was-run"


@pytest.fixture(autouse=True)
def consenting_terminal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Answers every question with yes, as a user who wants to get on does."""
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 50))
    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules")
    )


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("place", ["mod", "hostile/repository--mod"])
def test_code_of_an_unknown_type_is_refused_without_a_question(
    directory: Path, marker: Path, loader: str, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    point_to_code(directory, place, known_type=False)
    with pytest.raises(BapoError, match="code of models"):
        LOADERS[loader](directory)
    assert not marker.exists()
    assert "Do you wish" not in capsys.readouterr().out


@pytest.mark.parametrize("loader", LOADERS)
def test_code_beside_a_known_type_is_left_alone(
    directory: Path, marker: Path, loader: str, capsys: pytest.CaptureFixture[str]
) -> None:
    point_to_code(directory, "mod", known_type=True)
    with suppress(BapoError):  # Not every loader reads every directory.
        LOADERS[loader](directory)
    assert not marker.exists()
    assert "Do you wish" not in capsys.readouterr().out


class Pickled:
    """Leaves a mark when it is read back."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.marker,))


@pytest.mark.parametrize("loader", ["policy", "engine"])
def test_pickled_weights_are_not_read(directory: Path, marker: Path, loader: str) -> None:
    (directory / "model.safetensors").unlink()
    (directory / "pytorch_model.bin").write_bytes(pickle.dumps(Pickled(marker)))
    with pytest.raises(BapoError, match="safetensors"):
        LOADERS[loader](directory)
    assert not marker.exists()


def calls_without_refusal(source: str) -> list[int]:
    """Returns the lines where a model directory may be read without `trust_remote_code=False`.

    A method that is passed on instead of called may be called without the argument elsewhere.
    """
    tree = ast.parse(source)
    refused = {
        node.func
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and any(
            keyword.arg == "trust_remote_code"
            and isinstance(keyword.value, ast.Constant)
            and keyword.value.value is False
            for keyword in node.keywords
        )
    }
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr in ("from_pretrained", "from_config")
        and not (isinstance(node.value, ast.Name) and node.value.id == "ScriptDirectory")
        and node not in refused
    ]


def test_every_call_that_reads_a_model_refuses_its_code() -> None:
    offenders = [
        f"{path.relative_to(ROOT)}:{line}"
        for package in ("bapo_core", "benchmarks", "examples", "pipelines", "services", "tools")
        for path in sorted((ROOT / package).rglob("*.py"))
        if "from_" in (source := path.read_text())
        for line in calls_without_refusal(source)
    ]
    assert offenders == [], "pass trust_remote_code=False: bapo runs no code of models"


@pytest.mark.parametrize(
    "source",
    [
        "AutoTokenizer.from_pretrained(directory)",
        "AutoTokenizer.from_pretrained(directory, trust_remote_code=True)",
        "AutoTokenizer.from_pretrained(directory, trust_remote_code=trust)",
        "AutoTokenizer.from_pretrained(directory, **arguments)",
        "load = AutoTokenizer.from_pretrained",
        "auto.from_config(config)",
    ],
)
def test_the_search_finds_calls_that_leave_the_question_open(source: str) -> None:
    assert calls_without_refusal(source) == [1]
