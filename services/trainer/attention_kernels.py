"""Kernels of causal attention over packed sequences, and the choice among them.

A kernel is chosen once, at the start of a process, for each kind of attention that the model has
(`Needs`): by device and dtype, by what the kernel takes, and by a trial on a few short sequences,
forward and backward, whose results must be those of `padded`. So an extra that does not import, an
old PyTorch or a kernel that refuses a shape costs speed and never a result: the next kernel of the
order is used, and one line of the log says which and why.

All kernels compute the same function: query (T, heads, D), key and value (T, key heads, D), each
query head with its key head (grouped-query attention), each sequence by itself.
"""

from __future__ import annotations

import importlib
import inspect
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from services.common.errors import first_line
from services.trainer.sequences import Sequences

KERNEL_DTYPES = (torch.bfloat16, torch.float16)
"""Data types that the kernels for variable lengths take."""
TRIAL_LENGTHS = (5, 130, 33)
"""Tokens of the sequences of a kernel's trial."""
TRIAL_TOLERANCE = 0.03
"""Largest norm of a difference to `padded` in fp32, relative to the norm: 7 steps of bfloat16."""

Compute = Callable[[Tensor, Tensor, Tensor, Sequences, float | None, int | None], Tensor]
"""Function of (query, key, value, sequences, scale, window), which returns (T, heads, D of value).

window: number of tokens that a token attends to, itself included; None is all before it.
"""


@dataclass(frozen=True, slots=True)
class Needs:
    """What the attention of a layer needs of a kernel."""

    head_size: int
    """Size of the heads of queries and keys."""
    value_size: int
    """Size of the heads of values."""
    groups: int
    """Query heads for each key head."""
    windowed: bool
    """Whether a token attends to a window of the tokens before it."""
    dtype: torch.dtype
    masked: bool = False
    """Whether some tokens attend to later ones, as those of an image."""

    def __str__(self) -> str:
        sizes = str(self.head_size)
        if self.value_size != self.head_size:
            sizes += f" and {self.value_size}"
        extras = f", {self.groups} query heads a key head" if self.groups > 1 else ""
        extras += ", sliding window" if self.windowed else ""
        extras += ", images" if self.masked else ""
        return f"heads of {sizes} in {str(self.dtype).removeprefix('torch.')}{extras}"


@dataclass(frozen=True, slots=True)
class Kernel:
    """A way to compute attention over packed sequences."""

    name: str
    compute: Compute
    refusal: Callable[[Needs, torch.device], str | None]
    """Function that returns why the kernel does not take such attention, or None if it does."""


# ---- padded: every device, every kind


def _padded(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sequences: Sequences,
    scale: float | None,
    window: int | None,
) -> Tensor:
    """Pads the sequences for the time of the attention alone."""
    query, key, value = (
        packed[sequences.pad_indices].transpose(1, 2) for packed in (query, key, value)
    )
    mask = None
    if window is not None or sequences.images is not None:
        distance = torch.arange(sequences.max_seqlen, device=query.device)
        distance = distance[:, None] - distance[None, :]
        mask = distance >= 0
        if window is not None:
            mask &= distance < window
        if sequences.images is not None:
            image = sequences.images[sequences.pad_indices]
            within = (image[:, :, None] == image[:, None, :]) & (image > 0)[:, :, None]
            if window is not None and sequences.images_in_window:
                within &= distance < window
            mask = (mask | within)[:, None]
    groups = query.shape[1] // key.shape[1]
    if groups > 1 and (mask is not None or query.is_cuda):
        # On GPUs, the fast kernel for what the other kernels do not take has no groups of heads.
        key, value = (heads.repeat_interleave(groups, dim=1) for heads in (key, value))
    output = scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output.transpose(1, 2).flatten(0, 1)[sequences.unpad_indices]


def _refuses_nothing(needs: Needs, device: torch.device) -> str | None:  # noqa: ARG001
    return None


# ---- varlen: FlashAttention 2 in PyTorch


def _varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sequences: Sequences,
    scale: float | None,
    window: int | None,
) -> Tensor:
    """Calls PyTorch's attention of variable lengths, whose kernel is FlashAttention 2."""
    from torch.nn.attention import varlen

    options: dict[str, Any] = {}
    # PyTorch 2.11 passes fewer key heads on to the kernel, which takes them, and has no argument.
    if query.shape[1] != key.shape[1] and _takes_argument(varlen.varlen_attn, "enable_gqa"):
        options["enable_gqa"] = True
    query, key, value = (sequences.spread(packed) for packed in (query, key, value))
    output = varlen.varlen_attn(
        query,
        key,
        value,
        sequences.cu_seqlens,
        sequences.cu_seqlens,
        sequences.max_seqlen,
        sequences.max_seqlen,
        scale=scale,
        window_size=(-1, 0) if window is None else (window - 1, 0),
        **options,
    )
    assert isinstance(output, Tensor)
    return sequences.keep(output)


@lru_cache
def _takes_argument(function: Callable[..., Any], name: str) -> bool:
    return name in inspect.signature(function).parameters


def _refusal_of_varlen(needs: Needs, device: torch.device) -> str | None:
    # The global heads of Gemma 4 have 512, and those of DeepSeek-V3 192 in keys and 128 in values.
    return _refusal_of_lengths(needs, device, largest_head=256) or (
        "takes keys and values of one head size alone"
        if needs.value_size != needs.head_size
        else None
    )


def _refusal_of_lengths(needs: Needs, device: torch.device, *, largest_head: int) -> str | None:
    """Returns why no kernel for variable lengths takes such attention, or None."""
    sizes = (needs.head_size, needs.value_size)
    refusals = {
        "needs a GPU": device.type != "cuda",
        "takes bfloat16 and float16 alone": needs.dtype not in KERNEL_DTYPES,
        "takes no masks, which images need": needs.masked,
        f"takes heads of at most {largest_head}": max(sizes) > largest_head,
        "takes heads of a multiple of 8": any(size % 8 for size in sizes),
    }
    return next((reason for reason, refused in refusals.items() if refused), None)


def _refusal_of_age(device: torch.device, oldest: int) -> str | None:
    """Returns why a kernel does not run on a device older than compute capability `oldest`."""
    major, minor = torch.cuda.get_device_capability(device)
    if major >= oldest:
        return None
    return f"needs compute capability {oldest}.0, and the device has {major}.{minor}"


# ---- flash4: the package flash-attn-4


def _flash4(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sequences: Sequences,
    scale: float | None,
    window: int | None,
) -> Tensor:
    """Calls FlashAttention 4, of the package flash-attn-4."""
    query, key, value = (sequences.spread(packed) for packed in (query, key, value))
    output = _flash4_function()(
        query,
        key,
        value,
        cu_seqlens_q=sequences.cu_seqlens,
        cu_seqlens_k=sequences.cu_seqlens,
        max_seqlen_q=sequences.max_seqlen,
        max_seqlen_k=sequences.max_seqlen,
        softmax_scale=scale,
        causal=window is None,
        window_size=(None, None) if window is None else (window - 1, 0),
        # Its backward pass sums gradients of queries in any order otherwise.
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    attended: Tensor = output[0] if isinstance(output, tuple) else output
    return sequences.keep(attended)


@lru_cache
def _flash4_function() -> Callable[..., Any]:
    # The package compiles a kernel for each shape of heads, and its compiler warns of an argument
    # that is a constant.
    warnings.filterwarnings("ignore", "Argument aux_data .* cannot be converted", UserWarning)
    function: Callable[..., Any] = importlib.import_module("flash_attn.cute").flash_attn_varlen_func
    return function


FLASH4_HEADS = {(size, size) for size in (64, 128, 256)} | {(192, 128)}
"""Sizes of the heads of keys and of values whose results were right on a Hopper GPU. With heads of
80, the gradient of the queries was wrong (4.0.0b36)."""


def _refusal_of_flash4(needs: Needs, device: torch.device) -> str | None:
    refusal = _refusal_of_lengths(needs, device, largest_head=256) or _refusal_of_age(device, 9)
    if refusal is not None:
        return refusal
    if (needs.head_size, needs.value_size) not in FLASH4_HEADS:
        return "takes heads of 64, 128 and 256 alone"
    try:
        _flash4_function()
    except Exception as error:  # noqa: BLE001 - a broken package may raise anything
        reason = first_line(error)
        return f"cannot be imported ({reason}); install the extra bapo[flash4]"
    return None


# ---- the registry


def _repeated(kernel: Kernel) -> Kernel:
    """Returns a kernel whose keys and values are repeated for the query heads of their group."""

    def compute(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sequences: Sequences,
        scale: float | None,
        window: int | None,
    ) -> Tensor:
        groups = query.shape[1] // key.shape[1]
        key, value = (heads.repeat_interleave(groups, dim=1) for heads in (key, value))
        return kernel.compute(query, key, value, sequences, scale, window)

    def refusal(needs: Needs, device: torch.device) -> str | None:
        if needs.groups == 1:
            return "repeats nothing, because each query head has its own key head"
        return kernel.refusal(replace(needs, groups=1), device)

    return Kernel(f"{kernel.name}-repeated", compute, refusal)


_VARLEN = Kernel("varlen", _varlen, _refusal_of_varlen)
_FLASH4 = Kernel("flash4", _flash4, _refusal_of_flash4)
PADDED = Kernel("padded", _padded, _refuses_nothing)
KERNELS = {
    kernel.name: kernel
    for kernel in (
        _FLASH4,
        _VARLEN,
        _repeated(_VARLEN),
        PADDED,
    )
}
"""All kernels by name."""
DEFAULT_ORDER = tuple(KERNELS)
"""The kernels that are tried without `trainer.attention`, the fastest on a Hopper GPU first."""


def kernel_order(name: str) -> list[Kernel]:
    """Returns the kernels to try, in order, if `trainer.attention` is `name`."""
    names = [] if name == "auto" else [name, f"{name}-repeated"]
    order = dict.fromkeys([*names, *DEFAULT_ORDER])
    return [KERNELS[name] for name in order if name in KERNELS]


# ---- the choice


@dataclass(frozen=True, slots=True)
class Choice:
    """The kernel that was chosen for attention of a kind."""

    needs: Needs
    kernel: Kernel
    passed_over: tuple[tuple[str, str], ...] = ()
    """Names of the kernels before it in the order, and why each was not chosen."""

    def __str__(self) -> str:
        reasons = "; ".join(f"{name} {reason}" for name, reason in self.passed_over)
        return f"{self.kernel.name} for {self.needs}" + (f" ({reasons})" if reasons else "")


_chosen: dict[tuple[Needs, str], Choice] = {}
"""The choices of this process, by needs and type of the device."""


def choose_kernels(
    kinds: Iterable[Needs], device: torch.device, name: str = "auto"
) -> list[Choice]:
    """Chooses the kernel of each kind of attention on `device`, for the rest of the process.

    name: `trainer.attention`, which comes first if it takes the attention and passes its trial.
    """
    choices = []
    for needs in sorted(set(kinds), key=str):
        choice = choose_kernel(needs, device, kernel_order(name))
        _chosen[needs, device.type] = choice
        choices.append(choice)
    return choices


def choose_kernel(needs: Needs, device: torch.device, order: Sequence[Kernel]) -> Choice:
    """Returns the first kernel of `order` that takes such attention and passes its trial.

    `padded` takes all, and needs no trial.
    """
    passed_over: list[tuple[str, str]] = []
    for kernel in order:
        refusal = kernel.refusal(needs, device)
        if refusal is None and kernel is not PADDED:
            refusal = try_kernel(kernel, needs, device)
        if refusal is None:
            return Choice(needs, kernel, tuple(passed_over))
        if not refusal.startswith("repeats nothing"):
            passed_over.append((kernel.name, refusal))
    return Choice(needs, PADDED, tuple(passed_over))


def kernel_for(needs: Needs, device: torch.device) -> Kernel:
    """Returns the kernel that was chosen for `needs`, or else the first that says it takes them."""
    choice = _chosen.get((needs, device.type))
    if choice is None:
        order = kernel_order("auto")
        kernel = next(kernel for kernel in order if kernel.refusal(needs, device) is None)
        choice = _chosen[needs, device.type] = Choice(needs, kernel)
    return choice.kernel


def current_choices() -> list[Choice]:
    """Returns the choices that this process has made."""
    return list(_chosen.values())


def forget_choices() -> None:
    """Forgets all choices, so that the next attention is decided anew."""
    _chosen.clear()


def try_kernel(kernel: Kernel, needs: Needs, device: torch.device) -> str | None:
    """Returns how `kernel` failed on a few sequences, forward and backward, or None if it did not.

    Its output and gradients must be those of `padded` in fp32, within `TRIAL_TOLERANCE`.
    """
    try:
        expected = _trial(PADDED, replace(needs, dtype=torch.float32), device)
        results = _trial(kernel, needs, device)
        differences = [
            float((result.float() - right).norm() / right.norm())
            for result, right in zip(results, expected, strict=True)
        ]
    except Exception as error:  # noqa: BLE001 - kernels of other projects may raise anything
        return f"failed its trial ({first_line(error)})"
    for difference in differences:
        if not difference <= TRIAL_TOLERANCE:
            return f"gave wrong results in its trial (off by {difference:.2g} of their norm)"
    return None


def _trial(kernel: Kernel, needs: Needs, device: torch.device) -> list[Tensor]:
    """Returns output and gradients of query, key and value on random sequences."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor(TRIAL_LENGTHS)
    count, key_heads = int(lengths.sum()), 2

    def draw(heads: int, size: int) -> Tensor:
        values = torch.randn(count, heads, size, generator=generator)
        # Rounded to the kernel's dtype on both sides, which leaves the kernels' own differences.
        return values.to(torch.bfloat16).to(device, needs.dtype)

    heads = key_heads * needs.groups
    query = draw(heads, needs.head_size).requires_grad_()
    key = draw(key_heads, needs.head_size).requires_grad_()
    value = draw(key_heads, needs.value_size).requires_grad_()
    direction = draw(heads, needs.value_size)
    sequences = Sequences.of(lengths).to(device)
    with torch.enable_grad():
        output = kernel.compute(query, key, value, sequences, None, 16 if needs.windowed else None)
        gradients = torch.autograd.grad(output, [query, key, value], direction)
    return [output.detach(), *gradients]
