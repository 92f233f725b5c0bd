"""Every kernel of attention gets what it takes, gives equal results, and is chosen by a trial."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen

from bapo_core.config.training import TrainerConfig
from services.buffer.api.trajectories import table_of
from services.trainer import attention, attention_kernels, shard
from services.trainer.attention_kernels import (
    KERNELS,
    PADDED,
    Choice,
    Kernel,
    Needs,
    choose_kernel,
    choose_kernels,
    forget_choices,
    kernel_for,
    kernel_order,
    try_kernel,
)
from services.trainer.data import collate
from services.trainer.load_policy import load_policy
from services.trainer.policy import Policy
from services.trainer.ranks import Ranks
from services.trainer.sequences import Sequences
from tests.micro import micro_model
from tests.stand_in_gpu import CPU, GPU, compare_with_cpu, stand_in_gpu
from tests.unit.trainer.test_attention import MODELS, group_of

META = torch.device("meta")
FAST = [name for name in KERNELS if name != "padded"]


def needs(**changes: Any) -> Needs:
    kind: dict[str, Any] = {
        "head_size": 16,
        "value_size": 16,
        "groups": 2,
        "windowed": False,
        "dtype": torch.float32,
    }
    return Needs(**(kind | changes))


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    forget_choices()
    yield
    forget_choices()


# ---- results


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("model", ["qwen3", "mistral_window", "gpt2"])
def test_scores_and_gradients_are_those_of_a_cpu_with_every_kernel(name: str, model: str) -> None:
    """With grouped queries, a window, and one key head for each query head."""
    torch.manual_seed(0)
    policy = Policy(MODELS[model]()).eval()
    policy.model.set_attn_implementation(attention.IMPLEMENTATION)
    groups = [group_of([2, 3, 4, 5, 6, 7], lengths=(3, 7, 1)), group_of([8, 9], lengths=(5, 2))]
    kernel = KERNELS[name]

    def choose(kind: Needs, device: torch.device) -> Kernel:
        return kernel if kernel.refusal(kind, device) is None else KERNELS["varlen"]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "kernel_for", lambda *_: PADDED)
        with pytest.MonkeyPatch.context() as on_gpu:
            on_gpu.setattr(
                attention,
                "kernel_for",
                lambda kind, device: choose(kind, device) if device.type == "cuda" else PADDED,
            )
            gpu = compare_with_cpu(policy, collate(None, table_of(groups)), 0.9)
    expected = name.removesuffix("-repeated")
    if model == "gpt2" and name.endswith("-repeated"):
        expected = "varlen"  # there is nothing to repeat
    assert set(gpu.kernels) == {expected}


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("windowed", [False, True])
def test_a_kernel_passes_its_trial_where_it_takes_the_attention(
    name: str, groups: int, windowed: bool
) -> None:
    kernel, kind = KERNELS[name], needs(groups=groups, windowed=windowed)
    with stand_in_gpu() as gpu:
        if kernel.refusal(kind, GPU) is None:
            assert try_kernel(kernel, kind, GPU) is None
            assert gpu.kernels == [name.removesuffix("-repeated")]
        else:
            assert windowed or groups == 1


# ---- shapes, strides and dtypes, with tensors without data


def inputs_without_data(
    heads: int, key_heads: int, size: int, dtype: torch.dtype
) -> tuple[list[Tensor], Sequences]:
    """Returns queries, keys and values as a model gives them, (T, heads, D) with strides of
    (heads, T, D), and bounds of sequences that share a prompt."""
    sequences = Sequences.of(torch.tensor([7, 9, 5])).share_prompts(
        torch.tensor([3, 3, 2]), torch.tensor([0, 0, 1])
    )
    count = len(sequences.position_ids) - 3
    leaves = [
        torch.empty(number, count, size, device=META, dtype=dtype, requires_grad=True)
        for number in (heads, key_heads, key_heads)
    ]
    return leaves, sequences.to(META)


@pytest.mark.parametrize("window", [None, 4])
def test_varlen_gets_groups_of_heads_without_repetition(window: int | None) -> None:
    leaves, sequences = inputs_without_data(8, 2, 64, torch.bfloat16)
    query, key, value = (leaf.transpose(0, 1) for leaf in leaves)
    output = KERNELS["varlen"].compute(query, key, value, sequences, 0.1, window)
    assert output.shape == (18, 8, 64)
    output.sum().backward()  # type: ignore[no-untyped-call]
    assert leaves[1].grad is not None
    assert leaves[1].grad.shape == (2, 18, 64)


def test_a_torch_without_the_argument_passes_the_groups_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch 2.11 has no `enable_gqa`, and no check that would refuse groups."""
    seen = []

    def older(
        query: Tensor, key: Tensor, value: Tensor, *bounds: Any, scale: Any, window_size: Any
    ) -> Tensor:
        seen.append((query.shape[1], key.shape[1]))
        return torch.empty_like(query)

    monkeypatch.setattr(varlen, "varlen_attn", older)
    leaves, sequences = inputs_without_data(8, 2, 64, torch.bfloat16)
    query, key, value = (leaf.transpose(0, 1) for leaf in leaves)
    KERNELS["varlen"].compute(query, key, value, sequences, None, None)
    KERNELS["varlen-repeated"].compute(query, key, value, sequences, None, None)
    assert seen == [(8, 2), (8, 8)]


# ---- the choice


def test_a_cpu_has_the_padded_kernel_alone() -> None:
    for name in ("auto", "varlen", "flash4"):
        (choice,) = choose_kernels([needs(dtype=torch.bfloat16)], CPU, name)
        assert choice.kernel is PADDED
        assert all(reason == "needs a GPU" for _, reason in choice.passed_over)


@pytest.mark.parametrize(
    ("changes", "name", "chosen"),
    [
        ({}, "auto", "flash4"),
        ({}, "varlen", "varlen"),
        ({}, "flash4", "flash4"),
        ({}, "padded", "padded"),
        ({"windowed": True}, "flash4", "flash4"),
        ({"masked": True}, "auto", "padded"),
        ({"head_size": 192, "value_size": 128}, "auto", "flash4"),
        ({"head_size": 192, "value_size": 128}, "varlen", "flash4"),
        ({"head_size": 512, "value_size": 512}, "flash4", "padded"),
        ({"head_size": 12, "value_size": 12}, "auto", "padded"),
        ({"dtype": torch.float64}, "auto", "padded"),
    ],
)
def test_the_first_kernel_that_takes_the_attention_is_chosen(
    changes: dict[str, Any], name: str, chosen: str
) -> None:
    with stand_in_gpu():
        kind = needs(**changes)
        (choice,) = choose_kernels([kind], GPU, name)
        assert choice.kernel.name == chosen
        assert kernel_for(kind, GPU) is choice.kernel


@pytest.mark.parametrize("fault", ["raises", "is wrong", "is wrong backward", "is not finite"])
def test_a_kernel_that_fails_its_trial_is_passed_over_and_the_reason_is_one_line(
    fault: str,
) -> None:
    class HalfGradient(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, tensor: Tensor) -> Tensor:
            return tensor.clone()

        @staticmethod
        def backward(_: Any, gradient: Tensor) -> Tensor:
            return 0.5 * gradient

    def compute(*arguments: Any) -> Tensor:
        output = PADDED.compute(*arguments)
        match fault:
            case "raises":
                raise AssertionError("SM 12.0 is not supported\nat line 3")
            case "is wrong":
                return output.flip(0)
            case "is wrong backward":
                halved: Tensor = HalfGradient.apply(output)  # type: ignore[no-untyped-call]
                return halved
        return output * torch.nan

    faulty = Kernel("faulty", compute, lambda *_: None)
    choice = choose_kernel(needs(), CPU, [faulty, PADDED])
    assert choice.kernel is PADDED
    ((name, reason),) = choice.passed_over
    assert name == "faulty"
    assert "trial" in reason
    line = str(choice)
    assert len(line.splitlines()) == 1
    assert line.startswith("padded for heads of 16 in float32, 2 query heads a key head (faulty ")


def test_an_extra_that_does_not_import_is_passed_over() -> None:
    def broken_import() -> Any:
        raise ImportError("libcutlass.so: cannot open shared object file")

    with stand_in_gpu(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_kernels, "_flash4_function", broken_import)
        (choice,) = choose_kernels([needs()], GPU, "flash4")
    assert choice.kernel.name == "varlen"
    assert choice.passed_over[0][0] == "flash4"
    assert "libcutlass.so" in choice.passed_over[0][1]
    assert "bapo[flash4]" in choice.passed_over[0][1]


def test_an_old_gpu_gets_no_kernel_of_newer_ones() -> None:
    with stand_in_gpu(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
        (choice,) = choose_kernels([needs()], GPU, "flash4")
    assert choice.kernel.name == "varlen"
    assert choice.passed_over == (
        ("flash4", "needs compute capability 9.0, and the device has 8.0"),
    )


@pytest.mark.parametrize(("head", "value"), [(80, 80), (96, 96), (128, 64), (16, 16)])
def test_heads_whose_results_were_not_seen_to_be_right_get_another_kernel(
    head: int, value: int
) -> None:
    """FlashAttention 4 computed a wrong gradient for heads of 80 on an H200, and said nothing."""
    flash4 = KERNELS["flash4"]
    kind = needs(head_size=head, value_size=value, dtype=torch.bfloat16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
        assert flash4.refusal(kind, GPU) == "takes heads of 64, 128 and 256 alone"


def test_kernels_are_named_by_the_configuration() -> None:
    names = TrainerConfig.model_fields["attention"].annotation.__args__  # type: ignore[union-attr]
    assert set(names) - {"auto"} == {name for name in KERNELS if not name.endswith("-repeated")}
    assert [kernel.name for kernel in kernel_order("varlen")] == [
        *("varlen", "varlen-repeated", "flash4", "padded"),
    ]
    assert [kernel.name for kernel in kernel_order("auto")] == list(KERNELS)


def test_a_loaded_model_says_what_its_attention_needs(tmp_path: Any) -> None:
    """With a window both kinds, because sequences may be shorter than it."""
    MODELS["mistral_window"]().save_pretrained(tmp_path)
    assert load_policy(tmp_path).attention_kinds == {
        needs(head_size=8, value_size=8, windowed=windowed) for windowed in (False, True)
    }


def test_the_choice_is_made_for_the_precision_of_the_gpu_and_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    chosen: list[Any] = []

    def choose(kinds: Any, device: torch.device, name: str) -> list[Choice]:
        chosen.append((list(kinds), device, name))
        return [Choice(kind, KERNELS["varlen"]) for kind in chosen[-1][0]]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(shard, "choose_kernels", choose)
    with caplog.at_level(logging.INFO):
        shard.choose_attention([needs()], "flash4", Ranks(0, 1))
        shard.choose_attention([needs()], "flash4", Ranks(1, 2))
    kinds, device, name = chosen[0]
    assert kinds == [needs(dtype=torch.bfloat16)]
    assert (device.type, name) == ("cuda", "flash4")
    lines = [record.getMessage() for record in caplog.records]
    assert lines == ["attention: varlen for heads of 16 in bfloat16, 2 query heads a key head"]


def test_the_model_of_the_tests_has_groups() -> None:
    config = micro_model(vocab_size=40).config
    assert config.num_attention_heads > config.num_key_value_heads
