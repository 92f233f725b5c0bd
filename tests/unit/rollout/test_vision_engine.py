"""The transformers engine generates for prompts with images."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForImageTextToText,
    AutoTokenizer,
    Gemma3Processor,
    Idefics3Processor,
    LlavaNextProcessor,
    LlavaProcessor,
)
from transformers.models.gemma4.processing_gemma4 import Gemma4Processor
from transformers.models.internvl.processing_internvl import InternVLProcessor

from bapo_core.errors import BapoError
from services.common.images import ImageReference, decode_image
from services.model.conversation import tokenize_conversation
from services.model.vision import (
    ARCHITECTURES,
    BIDIRECTIONAL,
    IN_ROWS,
    ON_A_GRID,
    SUBSTITUTE,
    WITH_VLLM,
    Pixels,
    VisionProcessor,
    check_model,
)
from services.model.whole_processor import WholeProcessor
from services.rollout.api.wire import GenerateRequest, PromptRequest, Sampling
from services.rollout.transformers_engine import TransformersEngine
from tests.image_prompts import IMAGES, TASK, payload, prompts_of
from tests.micro import OF_LLAVA, VISION_MODELS, micro_model, save_micro_vision_model
from tools.tiny_models.vision import IMAGE, build_tokenizer

PLACEHOLDER = "<|image_pad|>"


@pytest.fixture(scope="module", params=VISION_MODELS)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_micro_vision_model(tmp_path_factory.mktemp("model"), request.param)


def loaded(directory: Path, version: int = 1) -> TransformersEngine:
    engine = TransformersEngine(open_image=IMAGES.__getitem__)
    engine.load(directory, version)
    return engine


def sampling(max_tokens: int = 10, group_size: int = 4) -> Sampling:
    return Sampling(temperature=0.9, max_tokens=max_tokens, group_size=group_size)


def teacher_forced(directory: Path, prompt: PromptRequest, response: Sequence[int]) -> Tensor:
    """Returns log-probs of one pass of transformers over one sequence, positions included."""
    model: Any = AutoModelForImageTextToText.from_pretrained(directory)
    fed = [SUBSTITUTE if token == model.config.image_token_id else token for token in response]
    ids = torch.tensor([[*prompt.prompt_token_ids, *fed]])
    images: dict[str, Tensor] = {}
    if prompt.images:
        pixels = VisionProcessor.load(directory).pixels([IMAGES[d] for d in prompt.images])
        images = pixels.inputs_of(model)
    if model.config.model_type in ON_A_GRID:
        images["mm_token_type_ids"] = (ids == model.config.image_token_id).int()
    if model.config.model_type in BIDIRECTIONAL and prompt.images:
        name = "token_type_ids" if model.config.model_type == "gemma3" else "mm_token_type_ids"
        images[name] = (ids == model.config.image_token_id).int()
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False, **images).logits
    start = len(prompt.prompt_token_ids) - 1
    logprobs = torch.log_softmax(logits[0, start:-1].float() / 0.9, dim=-1)
    return logprobs.gather(1, torch.tensor(response)[:, None])[:, 0]


def assert_equal_pixels(mine: Pixels, theirs: Pixels) -> None:
    assert mine.arguments.keys() == theirs.arguments.keys()
    for name, tensor in mine.arguments.items():
        assert torch.equal(tensor, theirs.arguments[name])


def _name(directory: Path) -> str:
    """Returns the name of a model among `VISION_MODELS`."""
    config = json.loads((directory / "config.json").read_text())
    pixtral = config["vision_config"].get("model_type") == "pixtral"
    return "pixtral" if pixtral and config["model_type"] == "llava" else config["model_type"]


def test_a_prompt_has_a_token_for_each_patch_that_the_model_sees(directory: Path) -> None:
    prompts = prompts_of(directory)
    config: Any = AutoConfig.from_pretrained(directory)
    counts = [prompt.prompt_token_ids.count(config.image_token_id) for prompt in prompts]
    # Images of 112, 56, 168 and 112 pixels: 28 a token; all scaled to 56; up to 6 tiles of 56, of
    # which one shows the whole image; all scaled to 112, and always the whole image; or at most
    # 112. The tokens of LLaVA-NeXT are 14 pixels, with one for each end of a row.
    expected = {
        "llava": [16, 2 * 16, 0, 16],
        "internvl": [20, 4 + 20, 0, 20],
        "idefics3": [20, 2 * 20, 0, 20],
        "smolvlm": [20, 2 * 20, 0, 20],
        "gemma3": [4, 2 * 4, 0, 4],
        "llava_next": [16 + 8 * 9, 16 + 4 * 5 + 16 + 8 * 9, 0, 16 + 8 * 9],
        "mistral3": [16, 4 + 16, 0, 16],
        "pixtral": [16, 4 + 16, 0, 16],
        "gemma4": [64, 2 * 64, 0, 64],
        "vipllava": [16, 2 * 16, 0, 16],
        "idefics2": [4, 2 * 4, 0, 4],
    }
    assert counts == expected.get(_name(directory), [16, 4 + 36, 0, 16])


def _processor(directory: Path, architecture: str, tokenizer: Any) -> Any:
    """Returns the processor of transformers."""
    images: Any = AutoImageProcessor.from_pretrained(directory, backend="pil")
    token = PLACEHOLDER
    if architecture == "gemma3":
        tokenizer.boi_token, tokenizer.eoi_token = "<start_of_image>", "<end_of_image>"
        tokenizer.image_token, tokenizer.image_token_id = token, IMAGE
        tokenizer.boi_token_id = tokenizer.convert_tokens_to_ids("<start_of_image>")
        return Gemma3Processor(images, tokenizer, image_seq_length=4)
    if architecture in IN_ROWS:
        processor: Any = Idefics3Processor(images, tokenizer, image_seq_len=4)
        processor.image_token, processor.image_token_id = token, IMAGE
        return processor
    processor_class: Any = {"llava": LlavaProcessor, "llava_next": LlavaNextProcessor}[architecture]
    return processor_class(
        images,
        tokenizer,
        **OF_LLAVA,
    )


@pytest.mark.parametrize("architecture", ["gemma3", "idefics3", "llava", "llava_next", "smolvlm"])
def test_tokens_and_pixels_are_those_of_the_processor(architecture: str, tmp_path: Path) -> None:
    directory = save_micro_vision_model(tmp_path, architecture)
    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    vision = VisionProcessor.load(directory)
    files = list(IMAGES.values())
    images = [payload([digest], "")["images"][0] for digest in IMAGES]
    mark = "<start_of_image>" if architecture == "gemma3" else PLACEHOLDER
    text = f"A{mark}b{mark}{mark}\nc{mark}"
    expanded = tokenizer.encode(vision.expand(text, images))
    inputs = _processor(directory, architecture, tokenizer)(
        images=[decode_image(data) for data in files], text=text, return_tensors="pt"
    )
    assert inputs["input_ids"][0].tolist() == expanded
    pixels = vision.pixels(files)
    values, sizes = inputs["pixel_values"], inputs.get("image_sizes")
    expected = {"pixel_values": values[0] if architecture in IN_ROWS else values}
    if sizes is not None:
        expected["image_sizes"] = torch.as_tensor(sizes)
    assert_equal_pixels(pixels, Pixels(expected))


def test_the_tokens_of_internvl_are_those_of_its_processor(tmp_path: Path) -> None:
    """The whole processor contains one of videos, which needs torchvision."""
    directory = save_micro_vision_model(tmp_path, "internvl")
    vision = VisionProcessor.load(directory)
    parts = SimpleNamespace(
        start_image_token="<img>",
        end_image_token="</img>",
        image_token=PLACEHOLDER,
        image_seq_length=4,
    )
    for digest, data in IMAGES.items():
        tiles = len(vision.pixels([data]).arguments["pixel_values"])
        expected = InternVLProcessor.replace_image_token(parts, {"num_patches": [tiles]}, 0)
        images = payload([digest], "")["images"]
        assert vision.expand("A<|image_pad|>b", images) == f"A{expected}b"


def test_the_tokens_of_gemma4_are_those_of_its_processor(tmp_path: Path) -> None:
    """The whole processor contains one of videos, which needs torchvision."""
    directory = save_micro_vision_model(tmp_path, "gemma4")
    vision = VisionProcessor.load(directory)
    images: Any = AutoImageProcessor.from_pretrained(directory, backend="pil")
    parts: Any = SimpleNamespace(
        boi_token="<|image>", eoi_token="<image|>", image_token=PLACEHOLDER
    )
    for width, height in ((112, 112), (300, 20), (20, 300), (57, 640), (1000, 999)):
        prepared = images(images=[Image.new("RGB", (width, height))], return_tensors="pt")
        expected = Gemma4Processor.replace_image_token(parts, prepared, 0)
        reference = ImageReference(digest="", width=width, height=height)
        assert vision.expand(f"A{PLACEHOLDER}b", [reference]) == f"A{expected}b"


@pytest.mark.parametrize("architecture", ["mistral3", "pixtral"])
def test_the_tokens_of_a_row_of_patches_end_with_a_mark(architecture: str, tmp_path: Path) -> None:
    """Transformers cannot load this processor without torchvision."""
    vision = VisionProcessor.load(save_micro_vision_model(tmp_path, architecture))
    for (width, height), rows, columns in (
        ((112, 56), 2, 4),
        ((29, 100), 4, 2),
        ((300, 150), 2, 4),
        ((57, 5), 1, 3),
    ):
        row = PLACEHOLDER * columns
        expected = "[IMG_BREAK]".join([row] * rows) + "[IMG_END]"
        reference = ImageReference(digest="", width=width, height=height)
        assert vision.expand(f"A{PLACEHOLDER}b", [reference]) == f"A{expected}b"


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, "llava", "llava_next", "pixtral"])
def test_images_that_are_joined_are_those_of_one_call(architecture: str, tmp_path: Path) -> None:
    vision = VisionProcessor.load(save_micro_vision_model(tmp_path, architecture))
    files = list(IMAGES.values())
    together = vision.pixels(files)
    joined = Pixels.join([vision.pixels([data]) for data in files])
    assert_equal_pixels(joined, together)


def test_logprobs_are_those_of_transformers(directory: Path) -> None:
    prompts = prompts_of(directory)
    groups = loaded(directory).generate(prompts, sampling(), policy_version=1)
    for prompt, group in zip(prompts, groups, strict=True):
        for response in group.responses:
            expected = teacher_forced(directory, prompt, response.token_ids)
            assert torch.tensor(response.logprobs) == pytest.approx(expected, abs=2e-5)


def test_samples_depend_on_the_image(directory: Path) -> None:
    first, _, _, fourth = IMAGES
    (prompt,) = prompts_of(directory)[:1]
    other = prompt.model_copy(update={"images": [fourth]})
    engine = loaded(directory)
    same, again, changed = (
        engine.generate([p], sampling(), policy_version=1)[0].responses
        for p in (prompt, prompt, other)
    )
    assert prompt.images == [first]
    assert same == again
    assert same != changed


def test_new_weights_are_loaded_in_place(directory: Path, tmp_path: Path) -> None:
    newer = tmp_path / "newer"
    shutil.copytree(directory, newer)
    weights = load_file(newer / "model.safetensors")
    save_file(
        {name: tensor * 1.01 for name, tensor in weights.items()}, newer / "model.safetensors"
    )
    prompts = prompts_of(directory)
    engine = loaded(directory)
    model = engine._model
    engine.load(newer, 2)
    assert engine._model is model
    groups = engine.generate(prompts, sampling(), policy_version=2)
    assert groups == loaded(newer, 2).generate(prompts, sampling(), policy_version=2)


def test_the_digest_of_a_request_counts_images(directory: Path) -> None:
    def request(**changes: Any) -> GenerateRequest:
        prompt = PromptRequest(prompt_token_ids=[5], seed=1).model_copy(update=changes)
        settings = sampling().model_dump()
        return GenerateRequest(policy_version=1, manifest_digest="", prompts=[prompt], **settings)

    assert request().digest() != request(images=["a"]).digest()
    assert request(images=["b"]).digest() != request(images=["a"]).digest()


# ---- what is wrong ------------------------------------------------------------------------------


def test_a_model_that_reads_no_images_is_refused_in_one_line(tmp_path: Path) -> None:
    micro_model().save_pretrained(tmp_path)
    with pytest.raises(BapoError, match="a model of the type qwen3 has no vision tower that bapo"):
        check_model(tmp_path)
    engine = TransformersEngine(open_image=IMAGES.__getitem__)
    engine.load(tmp_path, 1)
    prompt = PromptRequest(prompt_token_ids=[3], images=list(IMAGES)[:1], seed=0)
    with pytest.raises(BapoError, match=r"the model that is served reads none; set model\.path"):
        engine.generate([prompt], sampling(), policy_version=1)


def test_a_model_whose_images_vllm_does_not_take_is_refused_in_one_line(directory: Path) -> None:
    check_model(directory)
    if _name(directory) in WITH_VLLM:
        check_model(directory, "vllm")
        return
    with pytest.raises(BapoError, match="together with token ids; set rollout"):
        check_model(directory, "vllm")


def test_a_tokenizer_without_the_marks_of_images_is_refused_in_one_line(tmp_path: Path) -> None:
    directory = save_micro_vision_model(tmp_path, "internvl")
    build_tokenizer().save_pretrained(directory)
    with pytest.raises(BapoError, match="its tokenizer has no token <img>, which stands beside"):
        check_model(directory)


def test_a_model_without_its_image_processor_is_refused_in_one_line(
    directory: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(directory, copy)
    for name in ("preprocessor_config.json", "processor_config.json"):
        (copy / name).unlink(missing_ok=True)
    with pytest.raises(BapoError, match="its image processor cannot be loaded: ") as error:
        check_model(copy)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "architecture",
    # The placeholder of Idefics2 is that of problems, so no text can hold it.
    [architecture for architecture in VISION_MODELS if architecture != "idefics2"],
)
def test_a_placeholder_in_the_text_of_a_problem_is_refused(
    architecture: str, tmp_path: Path
) -> None:
    directory = save_micro_vision_model(tmp_path, architecture)
    tokenizer, vision = AutoTokenizer.from_pretrained(directory), VisionProcessor.load(directory)
    problem = payload(list(IMAGES)[:1], "<image>What is <|image_pad|>?")
    with pytest.raises(BapoError, match="has 2 placeholders for 1 images; give a model whose"):
        tokenize_conversation(tokenizer, TASK.render(problem), vision)


@pytest.mark.parametrize("architecture", IN_ROWS)
@pytest.mark.parametrize("size", [(30, 200), (57, 56), (90, 113), (224, 20), (168, 111)])
def test_rows_of_tiles_are_as_many_as_the_processor_makes(
    architecture: str, size: tuple[int, int], tmp_path: Path
) -> None:
    directory = save_micro_vision_model(tmp_path, architecture)
    processor: Any = AutoImageProcessor.from_pretrained(directory, backend="pil")
    tiles = processor(images=[Image.new("RGB", size)], return_tensors="pt")["pixel_values"][0]
    vision = VisionProcessor.load(directory)
    width, height = size
    reference = ImageReference(digest="", width=width, height=height)
    assert vision.expand(PLACEHOLDER, [reference]).count(PLACEHOLDER) == 4 * len(tiles)


def test_tiles_that_do_not_divide_an_image_evenly_are_refused(tmp_path: Path) -> None:
    """Transformers then counts other rows than it makes."""
    directory = save_micro_vision_model(tmp_path, "smolvlm")
    file = directory / "preprocessor_config.json"
    settings = json.loads(file.read_text())
    settings["size"]["longest_edge"] = 150
    file.write_text(json.dumps(settings))
    with pytest.raises(BapoError, match="to 150 pixels, of which tiles of 56 are no divisor"):
        check_model(directory)


def test_an_image_processor_that_cuts_further_tiles_is_refused(tmp_path: Path) -> None:
    directory = save_micro_vision_model(tmp_path, "gemma3")
    file = directory / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"do_pan_and_scan": True}))
    with pytest.raises(BapoError, match="set do_pan_and_scan of"):
        check_model(directory)


def test_another_model_with_positions_in_three_dimensions_is_refused(tmp_path: Path) -> None:
    directory = save_micro_vision_model(tmp_path, "vipllava")
    file = directory / "config.json"
    config = json.loads(file.read_text())
    config["text_config"]["rope_parameters"]["mrope_section"] = [2, 1, 1]
    file.write_text(json.dumps(config))
    with pytest.raises(BapoError, match="type vipllava has positions in three dimensions"):
        check_model(directory)


def test_a_chat_template_without_images_is_refused(tmp_path: Path) -> None:
    directory = save_micro_vision_model(tmp_path, "vipllava")
    (directory / "chat_template.jinja").write_text("{{ messages[0]['role'] }}")
    with pytest.raises(BapoError, match="its chat template does not render an image as its proc"):
        check_model(directory)


class _Numbered:
    """A processor that writes the number of each image before it."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __call__(self, *, text: str, images: Sequence[Image.Image], **_: Any) -> dict[str, Any]:
        for number in range(1, len(images) + 1):
            text = text.replace(PLACEHOLDER, f"{number}<image>", 1)
        return {"input_ids": torch.tensor([self._tokenizer.encode(text)])}


class _Cropping:
    """A processor whose images depend on the length of the text."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __call__(self, *, text: str, images: Sequence[Image.Image], **_: Any) -> dict[str, Any]:
        return {
            "input_ids": torch.tensor([self._tokenizer.encode(text)]),
            "mask_of_text": torch.ones(len(images), len(text)),
        }


@pytest.mark.parametrize(
    ("processor_class", "reason"),
    [
        (_Numbered, "the tokens of an image depend on the text beside it"),
        (_Cropping, "mask_of_text depends on the text"),
    ],
)
def test_a_processor_whose_images_depend_on_the_text_is_refused(
    processor_class: Any, reason: str, tmp_path: Path
) -> None:
    tokenizer = build_tokenizer()
    whole = WholeProcessor(processor_class(tokenizer), tokenizer, PLACEHOLDER)
    with pytest.raises(BapoError, match=reason):
        whole.check(tmp_path)


def test_an_image_of_a_single_token_is_refused_for_mistral3(tmp_path: Path) -> None:
    """Transformers drops a dimension of it, so that the model fails."""
    for architecture in ("pixtral", "mistral3"):
        vision = VisionProcessor.load(
            save_micro_vision_model(tmp_path / architecture, architecture)
        )
        reference = ImageReference(digest="", width=28, height=5)
        if architecture == "pixtral":
            assert vision.expand(PLACEHOLDER, [reference]) == f"{PLACEHOLDER}[IMG_END]"
            continue
        with pytest.raises(BapoError, match="an image of 28 x 5 pixels is too small for the model"):
            vision.expand(PLACEHOLDER, [reference])


@pytest.mark.parametrize("architecture", ["mistral3", "llava"])
def test_patches_that_attend_to_each_other_are_bounded(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory grows with the square of the patches that the tower of Pixtral computes together."""
    directory = save_micro_vision_model(tmp_path, architecture)
    prompts = prompts_of(directory)
    engine = loaded(directory)

    def sampled() -> list[list[int]]:
        groups = engine.generate(prompts, sampling(), policy_version=1)
        return [response.token_ids for group in groups for response in group.responses]

    expected = sampled()
    tower: Any = engine._model.base_model.vision_tower
    counts: list[int] = []
    tower.register_forward_hook(
        lambda _, __, output: counts.append(output.last_hidden_state.shape[1])
    )
    # 64 and 80 patches in the first two prompts, and 64 in the last one.
    monkeypatch.setattr("services.rollout.transformers_engine.MAX_DENSE_PATCHES", 100)
    assert sampled() == expected
    assert len(counts) == (3 if architecture == "mistral3" else 1)
    monkeypatch.setattr("services.rollout.transformers_engine.MAX_DENSE_PATCHES", 10)
    assert sampled() == expected
