"""A model directory, given or pointed to by somebody else, must not run code where it is read."""

from __future__ import annotations

import ast
import io
import json
import pickle
import shutil
import signal
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from bapo_core.config import RunConfig, config_from
from bapo_core.errors import BapoError
from bapo_core.tasks import Message
from services.model import rendering
from services.model.conversation import load_tokenizer, tokenize_conversation
from services.model.limits import ModelLimits
from services.model.resolve import TINY_VISION_MODEL, ensure_model
from services.model.vision import VisionProcessor, check_model, reads_images
from services.model.whole_processor import WholeProcessor
from services.rollout.errors import ModelLoadError
from services.rollout.transformers_engine import TransformersEngine
from services.rollout.vllm.weight_layout import read_layout
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


# ---- files of another shape ---------------------------------------------------------------------

DEEP = "[" * 100_000 + "]" * 100_000
"""JSON that exceeds Python's limit of recursion."""


@pytest.fixture
def damaged(small_model: Path, tmp_path: Path) -> Path:
    """Returns a copy of a model directory, to be damaged."""
    return Path(shutil.copytree(small_model, tmp_path / "damaged"))


HEADERS: dict[str, Any] = {
    "list": [],
    "null": None,
    "number": 1,
    "entry without fields": {"a": {}},
    "entry is a text": {"a": "x"},
    "offsets are no list": {"a": {"dtype": "F32", "shape": [1], "data_offsets": 1}},
    "one offset": {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0]}},
    "offsets are texts": {"a": {"dtype": "F32", "shape": [1], "data_offsets": ["0", "4"]}},
    "shape is null": {"a": {"dtype": "F32", "shape": None, "data_offsets": [0, 4]}},
    "shape of objects": {"a": {"dtype": "F32", "shape": [{}], "data_offsets": [0, 4]}},
    "unknown type": {"a": {"dtype": [], "shape": [1], "data_offsets": [0, 4]}},
    "deep": DEEP,
}


@pytest.mark.parametrize("header", HEADERS.values(), ids=HEADERS.keys())
def test_a_header_of_weights_of_another_shape_is_refused(damaged: Path, header: Any) -> None:
    text = header if header is DEEP else json.dumps(header)
    data = struct.pack("<Q", len(text)) + text.encode() + bytes(4)
    (damaged / "model.safetensors").write_bytes(data)
    with pytest.raises(ModelLoadError, match="publish the weights again"):
        read_layout(damaged)
    with pytest.raises(ModelLoadError, match=str(damaged)):
        TransformersEngine().load(damaged, 1)


def refusal_of(read: Callable[[Path], object], directory: Path) -> str | None:
    """Returns the message of the `BapoError` that reading raises, which is the only error."""
    try:
        read(directory)
    except BapoError as error:
        return str(error)
    return None


CONTENTS: list[Any] = [[1, 2], None, "x", 1, DEEP]


@pytest.mark.parametrize("content", CONTENTS, ids=["list", "null", "text", "number", "deep"])
@pytest.mark.parametrize("name", ["config", "generation_config", "tokenizer_config", "tokenizer"])
def test_a_file_without_an_object_is_refused(damaged: Path, name: str, content: Any) -> None:
    text = content if content is DEEP else json.dumps(content)
    (damaged / f"{name}.json").write_text(text)
    with pytest.raises(ModelLoadError, match=str(damaged)):
        read_layout(damaged)
    with pytest.raises(ModelLoadError, match=str(damaged)):
        TransformersEngine().load(damaged, 1)


def _check_of_the_command(directory: Path) -> object:
    model = {"path": str(directory)}
    return ensure_model(config_from({"model": model, "rollout": {"engine": "vllm"}}), directory)


VALUES: dict[str, dict[str, Any]] = {
    "text_config": {"text_config": [1]},
    "rope": {"rope_parameters": [1]},
    "older rope": {"rope_parameters": None, "rope_scaling": "x"},
    "vocabulary": {"vocab_size": "x"},
    "no vocabulary": {"vocab_size": None},
    "vocabulary of lists": {"vocab_size": []},
    "large vocabulary": {"vocab_size": 1 << 62},
    "end tokens": {"eos_token_id": {}},
    "nested end tokens": {"eos_token_id": [[]]},
    "type of the model": {"model_type": []},
    "layer types": {"layer_types": [[]]},
    "negative layers": {"num_hidden_layers": -1},
    "no head": {"num_attention_heads": 0},
}


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES.keys())
def test_a_configuration_of_another_shape_ends_with_an_error_of_ours(
    damaged: Path, values: dict[str, Any]
) -> None:
    """The replica reports such an error and waits for other weights; others end it."""
    file = damaged / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
    reads: list[Callable[[Path], object]] = [
        read_layout,
        lambda directory: TransformersEngine().load(directory, 1),
        ModelLimits.read,
        _check_of_the_command,
    ]
    refusals = [refusal for read in reads if (refusal := refusal_of(read, damaged))]
    assert refusals, "nothing reads this value"
    assert all(str(damaged) in refusal for refusal in refusals)


@pytest.mark.parametrize(
    "content",
    [*CONTENTS, {"model_type": {}}],
    ids=["list", "null", "text", "number", "deep", "type of the model"],
)
def test_a_command_reports_a_damaged_configuration(damaged: Path, content: Any) -> None:
    text = content if content is DEEP else json.dumps(content)
    (damaged / "config.json").write_text(text)
    assert not reads_images(damaged)
    with pytest.raises(BapoError, match=str(damaged)):
        check_model(damaged)
    for read in (load_tokenizer, ModelLimits.read):
        refusal = refusal_of(read, damaged)
        assert refusal is None or str(damaged) in refusal


# ---- chat templates -----------------------------------------------------------------------------

NESTED = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def test_a_template_that_does_not_end_is_interrupted(
    small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendering, "LONGEST_RENDERING_S", 0.2)
    before = signal.getsignal(signal.SIGVTALRM)
    tokenizer = load_tokenizer(small_model)
    honest = tokenizer.get_chat_template()
    messages: list[Message] = [{"role": "user", "content": "1+2"}]
    tokenizer.chat_template = NESTED
    with pytest.raises(BapoError, match=r"has not rendered a prompt within .* choose another"):
        tokenize_conversation(tokenizer, messages)
    tokenizer.chat_template = honest
    assert tokenize_conversation(tokenizer, messages)
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGVTALRM) == before


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ messages.append({}) }}",
        "{{ range(10 ** 9) | list }}",
        "{{ 1 // 0 }}",
        "{{ 'a' + 1 }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        "{{ 'a' * 10 ** 18 }}",
    ],
)
def test_what_the_sandbox_refuses_is_an_error_of_one_line(small_model: Path, template: str) -> None:
    tokenizer = load_tokenizer(small_model)
    tokenizer.chat_template = template
    with pytest.raises(
        BapoError, match=r"the model's chat template (refuses|cannot render) a prompt"
    ) as caught:
        tokenize_conversation(tokenizer, [{"role": "user", "content": "1+2"}])
    assert "\n" not in str(caught.value)
