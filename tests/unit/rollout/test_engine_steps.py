"""Token steps of the transformers engine on a GPU: few shapes, few waits, and captured graphs.

There is no GPU here. `stand_in_gpu` counts what a host waits for, and `RecordedGraphs` repeats the
operations of a function with the same tensors, as a CUDA graph does.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

from services.rollout import captured_step, transformers_engine
from services.rollout.api.wire import GeneratedGroup, PromptRequest, Sampling
from services.rollout.captured_step import FEW, why_not_captured
from services.rollout.transformers_engine import NonFiniteLogprobs, TransformersEngine
from tests.image_prompts import IMAGES, prompts_of
from tests.micro import VISION_MODELS, micro_model, save_micro_vision_model
from tests.stand_in_gpu import stand_in_gpu

RAGGED = [[2], [3, 4, 5, 6, 7, 8, 9], [10, 11, 12], [5, 5, 5, 5]]
EQUAL = [[2, 3, 4], [5, 6, 7], [8, 9, 10]]

_aten: Any = torch.ops.aten
_READS = {
    "aten::_local_scalar_dense",
    "aten::item",
    "aten::is_nonzero",
    "aten::nonzero",
    "aten::masked_select",
    "aten::equal",
    "aten::_unique2",
}


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records operations, and undoes afterwards what they did to tensors from before."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Any, Any, Any, list[Tensor], set[int]]] = []
        self._made: set[int] = set()
        self._before: dict[int, tuple[Any, Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _refuse_read(func, args)
        options = dict(kwargs or {})
        for argument, schema in zip(args, func._schema.arguments, strict=False):
            if schema.alias_info is not None and schema.alias_info.is_write:
                self._save(argument)
        result = func(*args, **options)
        inputs = {_storage(leaf) for leaf in tree_leaves((args, options)) if _is_tensor(leaf)}
        outputs = [leaf for leaf in tree_leaves(result) if _is_tensor(leaf)]
        self._made |= {_storage(output) for output in outputs} - inputs
        self.calls.append((func, args, options, outputs, inputs))
        return result

    def _save(self, tensor: Tensor) -> None:
        place = _storage(tensor)
        if place not in self._made and place not in self._before:
            storage = tensor.untyped_storage()
            self._before[place] = (storage, storage.clone())

    def undo(self) -> None:
        for storage, content in self._before.values():
            storage.copy_(content)

    def replay(self) -> None:
        for func, args, options, outputs, inputs in self.calls:
            results = [leaf for leaf in tree_leaves(func(*args, **options)) if _is_tensor(leaf)]
            for output, result in zip(outputs, results, strict=True):
                if _storage(output) not in inputs:
                    output.copy_(result)


class _NoReads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _refuse_read(func, args)
        return func(*args, **(kwargs or {}))


def _refuse_read(func: Any, args: Sequence[Any]) -> None:
    indices = args[1] if func is _aten.index.Tensor else []
    if func.name().split(".")[0] in _READS or any(
        index is not None and index.dtype == torch.bool for index in indices
    ):
        raise RuntimeError(f"operation not permitted when stream is capturing: {func}")


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class RecordedGraphs:
    """Captures functions of tensors of the CPU, as `CudaCapture` does those of a GPU."""

    def __init__(self) -> None:
        self.captured = self.replayed = 0

    def __call__(self, function: Callable[[], None]) -> Callable[[], None]:
        with _NoReads():  # type: ignore[no-untyped-call]
            function()
        recorder = _Recorder()
        with recorder:
            function()
        recorder.undo()
        self.captured += 1

        def replay() -> None:
            self.replayed += 1
            recorder.replay()

        return replay


@contextmanager
def captured_by(capture: Any) -> Iterator[Any]:
    """Lets engines for the CPU take the steps that they would take on a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers_engine, "capture_for", lambda _: lambda: capture)
        patch.setattr(transformers_engine, "shapes_for", lambda _: FEW)
        yield capture


@pytest.fixture
def graphs() -> Iterator[RecordedGraphs]:
    with captured_by(RecordedGraphs()) as graphs:
        yield graphs


def engine_of(model: Any) -> TransformersEngine:
    engine = TransformersEngine(device="cpu")
    engine.use(model.eval().requires_grad_(False), 1)
    return engine


def generate(
    engine: TransformersEngine,
    prompts: Sequence[Sequence[int]] = RAGGED,
    *,
    seed: int = 100,
    max_tokens: int = 40,
    group_size: int = 8,
    **options: Any,
) -> list[GeneratedGroup]:
    requests = [
        PromptRequest(prompt_token_ids=list(prompt), seed=seed + index)
        for index, prompt in enumerate(prompts)
    ]
    sampling = Sampling(
        **({"temperature": 1.0} | options), max_tokens=max_tokens, group_size=group_size
    )
    return engine.generate(requests, sampling, policy_version=engine.version)


def plain_samples(model: Any, prompts: Sequence[Sequence[int]] = RAGGED, **options: Any) -> Any:
    """Returns what an engine for the CPU generates."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers_engine, "capture_for", lambda _: None)
        patch.setattr(transformers_engine, "shapes_for", lambda _: captured_step.EXACT)
        return generate(engine_of(model), prompts, **options)


def assert_same_samples(groups: Sequence[GeneratedGroup], others: Sequence[GeneratedGroup]) -> None:
    for group, other in zip(groups, others, strict=True):
        for response, expected in zip(group.responses, other.responses, strict=True):
            assert response.token_ids == expected.token_ids
            assert response.finish_reason == expected.finish_reason
            assert response.logprobs == pytest.approx(expected.logprobs, abs=1e-5)


class ShapesOfModel:
    """Records the shapes (rows, tokens) that a model is called with, and the length of its keys."""

    def __init__(self, model: Any) -> None:
        self.shapes: list[tuple[int, int]] = []
        model.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, _: nn.Module, __: Any, inputs: dict[str, Any]) -> None:
        self.shapes.append(tuple(inputs["input_ids"].shape))

    @property
    def steps(self) -> list[tuple[int, int]]:
        return [shape for shape in self.shapes if shape[1] == 1]


# ---- shapes and waits ---------------------------------------------------------------------------


def test_rows_and_places_come_from_small_sets() -> None:
    rows = {FEW.rows(count) for count in range(1, 1025)}
    assert sorted(rows)[:6] == [8, 12, 16, 24, 32, 48]
    assert len(rows) == 15
    places = {FEW.visible(count) for count in range(1, 4097)}
    assert sorted(places)[:6] == [64, 80, 96, 112, 128, 160]
    assert len(places) == 25
    for count in range(1, 4097):
        assert count <= FEW.visible(count) <= max(64, 1.25 * count)


@pytest.mark.parametrize("prompts", [RAGGED, EQUAL], ids=["ragged", "equal"])
def test_a_host_waits_for_the_gpu_once_in_a_chunk_of_steps(prompts: list[list[int]]) -> None:
    """They are 6 in 46 steps.

    A host that reads each step's ends and mask, and makes lists of rows, waits 189 times in them
    with ragged prompts (4.1 times a step), and 142 times with equal ones.
    """
    model: Any = micro_model().eval()
    expected = plain_samples(model, prompts, max_tokens=47, group_size=16)
    seen = ShapesOfModel(model)
    with stand_in_gpu() as gpu:
        engine = engine_of(model.to("cuda"))
        generate(engine, prompts, max_tokens=1)  # finds that nothing can be captured
        waits = []
        for max_tokens in (1, 47):
            gpu.waits.clear()
            groups = generate(engine, prompts, max_tokens=max_tokens, group_size=16)
            waits.append(len(gpu.waits))
    assert_same_samples(groups, expected)
    assert len(seen.steps) == 46
    assert waits[1] - waits[0] <= math.ceil(46 / FEW.chunk)
    assert waits[0] <= 12, "prompts to the GPU, the mask of the prompts, and samples back"


def test_a_gpu_sees_few_batch_sizes() -> None:
    """There are 7; dropping exactly the finished rows, once they are a fifth, takes 25 here."""
    model: Any = micro_model().eval()
    seen = ShapesOfModel(model)
    with stand_in_gpu():
        engine = engine_of(model.to("cuda"))
        for seed in range(100, 900, 100):
            prompts = [[2 + seed // 100] * (1 + index % 7) for index in range(4)]
            generate(engine, prompts, seed=seed, group_size=16)
    steps, prompts_shapes = set(seen.steps), set(seen.shapes) - set(seen.steps)
    assert {rows for rows, _ in steps} <= {8, 12, 16, 24, 32, 48, 64}
    assert len(prompts_shapes) == 1


# ---- captured steps -----------------------------------------------------------------------------


@pytest.mark.parametrize("prompts", [RAGGED, EQUAL], ids=["ragged", "equal"])
@pytest.mark.parametrize("group_size", [1, 3, 16])
def test_captured_steps_sample_what_steps_on_a_cpu_do(
    graphs: RecordedGraphs, prompts: list[list[int]], group_size: int
) -> None:
    engine = engine_of(micro_model())
    for seed in (100, 200, 300, 400):
        groups = generate(engine, prompts, seed=seed, group_size=group_size)
        assert_same_samples(
            groups, plain_samples(micro_model(), prompts, seed=seed, group_size=group_size)
        )
    assert engine._captured is not None
    assert graphs.captured > 0
    assert graphs.replayed > 3 * graphs.captured


def test_captured_steps_call_the_model_no_more(graphs: RecordedGraphs) -> None:
    """All inputs of a captured step are tensors that it got when it was captured."""
    model: Any = micro_model()
    engine = engine_of(model)
    for seed in range(100, 120):
        generate(engine, seed=seed)
    captured, seen = graphs.captured, ShapesOfModel(model)
    other = [[7, 6], [2, 2, 3, 4, 11, 12, 3], [9], [8, 8]]
    groups = generate(engine, other, seed=7)
    assert seen.shapes == [(4, 7)], "the prompts, and no step"
    assert graphs.captured == captured
    assert_same_samples(groups, plain_samples(model, other, seed=7))


def test_repeated_calls_have_equal_bits_before_and_after_steps_are_captured(
    graphs: RecordedGraphs,
) -> None:
    engine = engine_of(micro_model())
    first = generate(engine)
    assert graphs.replayed < 20
    for _ in range(3):
        replayed = graphs.replayed
        assert generate(engine) == first
    assert graphs.replayed > replayed + 20


@pytest.mark.parametrize(
    "options", [{"temperature": 0.7}, {"top_p": 0.8}, {"max_tokens": 90}], ids=str
)
def test_other_sampling_has_captured_steps_of_its_own(
    graphs: RecordedGraphs, options: dict[str, Any]
) -> None:
    model = micro_model()
    engine = engine_of(model)
    for seed in (100, 200):
        generate(engine, seed=seed)
    before = graphs.captured
    for seed in (100, 200, 300):
        assert_same_samples(
            generate(engine, seed=seed, **options), plain_samples(model, seed=seed, **options)
        )
    assert graphs.captured > before


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_captured_steps_keep_to_a_sliding_window(
    graphs: RecordedGraphs, attention: str, tmp_path: Path
) -> None:
    kinds = ["sliding_attention", "full_attention"]
    micro_model(sliding_window=4, use_sliding_window=True, layer_types=kinds).save_pretrained(
        tmp_path
    )
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=attention)
    engine = engine_of(model)
    for seed in (100, 200):
        groups = generate(engine, seed=seed, max_tokens=90)
        assert_same_samples(groups, plain_samples(model, seed=seed, max_tokens=90))
    assert graphs.captured > 0


def test_new_weights_are_used_by_steps_captured_before(
    graphs: RecordedGraphs, tmp_path: Path
) -> None:
    engine = TransformersEngine(device="cpu")
    for version, seed in enumerate((0, 1), start=1):
        directory = tmp_path / str(version)
        micro_model(seed=seed).save_pretrained(directory)
        engine.load(directory, version)
        for sample_seed in (100, 200):
            groups = generate(engine, seed=sample_seed)
            expected = plain_samples(micro_model(seed=seed), seed=sample_seed)
            for group, other in zip(groups, expected, strict=True):
                assert [r.token_ids for r in group.responses] == [
                    r.token_ids for r in other.responses
                ]
        if version == 1:
            captured = graphs.captured
    assert graphs.captured < 2 * captured, "most steps of the second version were captured before"


def test_weights_at_other_addresses_are_captured_again(graphs: RecordedGraphs) -> None:
    model: Any = micro_model()
    engine = engine_of(model)
    for seed in (100, 200):
        generate(engine, seed=seed)
    assert graphs.captured > 0
    other: Any = micro_model(seed=1)
    for name, parameter in other.named_parameters():
        module, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(module), attribute, nn.Parameter(parameter.data, False))
    for seed in (100, 200):
        assert_same_samples(generate(engine, seed=seed), plain_samples(other, seed=seed))


def test_broken_weights_are_refused_by_captured_steps_too(graphs: RecordedGraphs) -> None:
    model: Any = micro_model()
    engine = engine_of(model)
    generate(engine)
    sound = model.lm_head.weight.clone()
    model.lm_head.weight.fill_(float("nan"))
    for _ in range(2):
        with pytest.raises(NonFiniteLogprobs):
            generate(engine)
    model.lm_head.weight.copy_(sound)
    assert engine._captured is not None, "they are no reason to capture nothing"
    assert_same_samples(generate(engine), plain_samples(model))


NOT_CAPTURED = {"qwen3_5", "qwen3_5_moe", "idefics2", "idefics3", "smolvlm"}
"""Recurrent layers, and types whose steps depend on values according to transformers."""


@pytest.mark.parametrize("architecture", VISION_MODELS)
def test_captured_steps_follow_images(architecture: str, tmp_path: Path) -> None:
    directory = save_micro_vision_model(tmp_path, architecture)
    prompts = prompts_of(directory)
    settings = Sampling(temperature=0.9, max_tokens=30, group_size=4)

    def sampled() -> list[GeneratedGroup]:
        engine = TransformersEngine(device="cpu", open_image=IMAGES.__getitem__)
        engine.load(directory, 1)
        return [g for _ in range(2) for g in engine.generate(prompts, settings, policy_version=1)]

    expected = sampled()
    with captured_by(RecordedGraphs()) as graphs:
        assert_same_samples(sampled(), expected)
    assert (graphs.captured == 0) == (architecture in NOT_CAPTURED)
    assert graphs.replayed >= 10 * graphs.captured


# ---- what cannot be captured --------------------------------------------------------------------


def capture_without_memory(function: Callable[[], None]) -> Callable[[], None]:
    function()
    raise RuntimeError("CUDA error: out of memory\nand more")


def capture_nothing(function: Callable[[], None]) -> Callable[[], None]:
    function()
    return lambda: None


@pytest.mark.parametrize(
    ("capture", "reason"),
    [
        (capture_without_memory, "run kernel by kernel: CUDA error: out of memory"),
        (capture_nothing, "one step sampled other tokens in "),
    ],
)
def test_a_step_that_cannot_be_captured_runs_kernel_by_kernel(
    capture: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = micro_model()
    with captured_by(capture), caplog.at_level(logging.WARNING):
        engine = engine_of(model)
        for seed in (100, 200):
            assert_same_samples(generate(engine, seed=seed), plain_samples(model, seed=seed))
    (message,) = caplog.messages
    assert reason in message
    assert "\n" not in message


def test_a_captured_step_with_other_logprobs_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    graphs, model = RecordedGraphs(), micro_model()

    def capture(function: Callable[[], None]) -> Callable[[], None]:
        replay = graphs(function)

        def replay_wrongly() -> None:
            replay()
            assert engine._captured is not None
            assert engine._captured._batch is not None
            engine._captured._batch.logprobs += 0.01

        return replay_wrongly

    with captured_by(capture), caplog.at_level(logging.WARNING):
        engine = engine_of(model)
        groups = generate(engine)
    assert_same_samples(groups, plain_samples(model))
    assert "in 0 of 16 rows than without, and its log-probs differed by 0.01 nats" in caplog.text


def test_a_model_that_reads_values_is_found_before_it_is_captured(
    graphs: RecordedGraphs, caplog: pytest.LogCaptureFixture
) -> None:
    model: Any = micro_model()
    model.model.norm.register_forward_hook(lambda _, __, output: output * bool((output > 0).any()))
    with caplog.at_level(logging.WARNING):
        assert_same_samples(generate(engine_of(model)), plain_samples(model))
    assert graphs.captured == 0
    assert "operation not permitted" in caplog.text


def test_a_model_that_attends_to_hidden_places_is_found_at_its_first_step(
    graphs: RecordedGraphs, caplog: pytest.LogCaptureFixture
) -> None:
    model: Any = micro_model()

    def ignore_mask(_: nn.Module, arguments: Any, inputs: dict[str, Any]) -> Any:
        return arguments, inputs | {"attention_mask": None}

    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(ignore_mask, with_kwargs=True)
    with caplog.at_level(logging.WARNING):
        groups = generate(engine_of(model), EQUAL)
    assert graphs.captured == 0
    assert "one step sampled other tokens in" in caplog.text
    assert_same_samples(groups, plain_samples(model, EQUAL))


def test_kinds_of_models_that_are_not_captured_say_why(
    graphs: RecordedGraphs, caplog: pytest.LogCaptureFixture
) -> None:
    model: Any = micro_model()
    assert why_not_captured(model) is None
    with pytest.MonkeyPatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(type(model), "_can_compile_fullgraph", False)
        assert_same_samples(generate(engine_of(model)), plain_samples(model))
    assert graphs.captured == 0
    assert "computes Qwen3ForCausalLM in ways that depend on values" in caplog.text
    model.config._attn_implementation = "flash_attention_2"
    assert "its attention is flash_attention_2" in str(why_not_captured(model))
    model.config.layer_types = ["linear_attention", "full_attention"]
    assert "it has recurrent layers" in str(why_not_captured(model))


def test_without_cuda_graphs_a_gpu_generates_all_the_same(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model: Any = micro_model().eval()
    expected = plain_samples(model)
    with stand_in_gpu(), caplog.at_level(logging.WARNING):
        engine = engine_of(model.to("cuda"))
        for _ in range(2):
            assert_same_samples(generate(engine), expected)
    (message,) = caplog.messages
    assert "not captured as CUDA graphs but run kernel by kernel: " in message
