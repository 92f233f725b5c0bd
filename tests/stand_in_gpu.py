"""A stand-in for a GPU: tensors say that they are on it, and a CPU computes their values.

What code decides by the device of a tensor is decided as on a GPU, and an operation on tensors of
both devices raises `MixedDevices`, as it fails there. It has no CUDA kernels: attention of variable
lengths is computed by a reference, which takes what the kernel takes. It counts what makes a host
wait for a GPU (`StandInGpu.waits`) and what is copied to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import varlen
from torch.nn.utils import clip_grad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from services.trainer import attention_kernels, logprobs
from services.trainer.data import Batch
from services.trainer.policy import Policy, response_logprobs

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
COMPUTE_CAPABILITY = (9, 0)
"""That of an H100."""

_aten: Any = torch.ops.aten
_INDEXING = (
    _aten.index.Tensor,
    _aten.index_put.default,
    _aten.index_put_.default,
    _aten._index_put_impl_.default,
)


class MixedDevices(Exception):
    """An operation got tensors of the CPU and of the GPU."""


class OnGpu(Tensor):
    """A tensor of the stand-in. C++, which has no CUDA here, takes it for one of the CPU."""

    value: Tensor

    @staticmethod
    def __new__(cls, value: Tensor) -> OnGpu:
        make: Any = Tensor._make_wrapper_subclass
        made: OnGpu = make(
            cls,
            value.shape,
            strides=value.stride(),
            storage_offset=value.storage_offset(),
            dtype=value.dtype,
        )
        made.value = value
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return GPU

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return False

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        with _Operations():  # type: ignore[no-untyped-call]
            return func(*args, **(kwargs or {}))


def value_of(tensor: Any) -> Any:
    """Returns the tensor's values on the CPU; anything else as it is."""
    return tensor.value if isinstance(tensor, OnGpu) else tensor


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Computes the operations of PyTorch on the CPU, and says where their results are."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        tensors = [leaf for leaf in tree_leaves((args, options)) if isinstance(leaf, Tensor)]
        if any(isinstance(tensor, OnGpu) for tensor in tensors) and _makes_host_wait(func, args):
            _note_wait(func.name())
        on_gpu = _is_result_on_gpu(func, args, options, tensors)
        if options.get("device") is not None and torch.device(options["device"]).type == "cuda":
            options["device"] = CPU
        options.pop("pin_memory", None)
        result = func(*tree_map(value_of, args), **tree_map(value_of, options))
        in_place = {id(tensor.value): tensor for tensor in tensors if isinstance(tensor, OnGpu)}

        def place(tensor: Any) -> Any:
            if not on_gpu or not isinstance(tensor, Tensor):
                return tensor
            return in_place[id(tensor)] if id(tensor) in in_place else OnGpu(tensor)

        return tree_map(place, result)


_READS = {
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::masked_select",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::unique_consecutive",
    "aten::is_nonzero",
    "aten::equal",
}
"""Operations that return values, or tensors whose shapes are values, of a tensor of the GPU."""


def _makes_host_wait(func: Any, args: Sequence[Any]) -> bool:
    """Returns whether the host must know values of the GPU before the operation returns."""
    if func is _aten.repeat_interleave.Tensor:
        return True  # the sum of the repeats; an `output_size` is another argument
    if func in _INDEXING:
        return any(
            isinstance(index, OnGpu) and index.dtype == torch.bool
            for index in args[1]
            if index is not None
        )
    return func.name().split(".")[0] in _READS


def _note_wait(what: str) -> None:
    for gpu in _active:
        gpu.waits.append(what)


def _is_result_on_gpu(
    func: Any, args: Sequence[Any], options: dict[str, Any], tensors: list[Tensor]
) -> bool:
    any_on_gpu = any(isinstance(tensor, OnGpu) for tensor in tensors)
    device = None if options.get("device") is None else torch.device(options["device"])
    asked = device is not None and device.type == "cuda"
    if torch._C._current_autograd_node() is not None:
        return any_on_gpu or asked  # C++ makes new tensors on what it takes for the device.
    if func is _aten._to_copy.default or func.name().startswith("aten::new_"):
        return any_on_gpu or asked  # `_Calls` moves what goes to the CPU.
    if func is _aten.copy_.default:
        return isinstance(args[0], OnGpu)
    if func in _INDEXING:
        indexed = isinstance(args[0], OnGpu)
        if any_on_gpu and not indexed:
            raise MixedDevices(f"{func}: a tensor of the CPU with indices or values of the GPU")
        values = args[2] if func is not _aten.index.Tensor else None
        if indexed and values is not None and values.dim() > 0 and not isinstance(values, OnGpu):
            raise MixedDevices(f"{func}: a tensor of the GPU gets values of the CPU")
        return indexed
    if device is not None:
        return asked
    for tensor in tensors:
        if any_on_gpu and tensor.dim() > 0 and not isinstance(tensor, OnGpu):
            raise MixedDevices(f"{func}: a tensor of the CPU, {tuple(tensor.shape)}")
    return any_on_gpu


def _destination(
    args: Sequence[Any], options: dict[str, Any]
) -> tuple[torch.device | None, torch.dtype | None]:
    device: torch.device | None = None
    dtype: torch.dtype | None = None
    for value in (*args, *options.values()):
        if isinstance(value, Tensor):
            device, dtype = value.device, value.dtype
        elif isinstance(value, torch.device | str):
            device = torch.device(value)
        elif isinstance(value, torch.dtype):
            dtype = value
    return device, dtype


def _move(
    tensor: Tensor, device: torch.device, dtype: torch.dtype, *, blocking: bool = True
) -> Tensor:
    if isinstance(tensor, OnGpu) != (device.type == "cuda"):
        _note_copy(tensor, blocking)
        move: Any = _Move
        tensor = move.apply(tensor)
    return tensor.to(dtype)


def _note_copy(tensor: Tensor, blocking: bool) -> None:
    """Notes a copy between the devices, which the host waits for unless it is asynchronous.

    A read of the GPU is always waited for, because the host wants its values.
    """
    to_gpu = not isinstance(tensor, OnGpu)
    for gpu in _active:
        gpu.copies_to_gpu += to_gpu
        if blocking or not to_gpu:
            gpu.waits.append("copy to the GPU" if to_gpu else "copy to the CPU")


def _copy_to_other_device(tensor: Tensor) -> Tensor:
    with _disable_current_modes():
        copy: Tensor = value_of(tensor).detach().clone()
        return copy if isinstance(tensor, OnGpu) else OnGpu(copy)


class _Move(torch.autograd.Function):
    """Copies a tensor to the other device."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:  # noqa: ARG004
        return _copy_to_other_device(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # noqa: ARG004
        return _copy_to_other_device(gradient)


class _OnCpu(torch.autograd.Function):
    """Computes a function of tensors of the GPU on the CPU, and its gradients."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Tensor], *tensors: Tensor | None) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(*tensors)
        with _disable_current_modes():
            return OnGpu(function(*map(_detached, tensors)))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        with _disable_current_modes(), torch.enable_grad():
            inputs = [_detached(tensor) for tensor in ctx.saved_tensors]
            trained = [
                tensor.requires_grad_()
                for tensor in inputs
                if tensor is not None and tensor.is_floating_point()
            ]
            output = ctx.function(*inputs)
            gradients = iter(torch.autograd.grad(output, trained, value_of(gradient)))
            return (
                None,
                *(
                    OnGpu(next(gradients)) if tensor is not None and tensor.requires_grad else None
                    for tensor in inputs
                ),
            )


def _compute_on_cpu(function: Callable[..., Tensor], *tensors: Tensor | None) -> Tensor:
    apply: Any = _OnCpu.apply
    result: Tensor = apply(function, *tensors)
    return result


def _detached(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else value_of(tensor).detach()


class _Calls(TorchFunctionMode):
    """Handles calls in which C++ decides by the device of its arguments."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        handler = _HANDLERS.get(func)
        if handler is None:
            return func(*args, **(kwargs or {}))
        return handler(func, *args, **(kwargs or {}))


def _to(func: Any, tensor: Tensor, *args: Any, **options: Any) -> Tensor:
    device, dtype = (CPU, None) if func is Tensor.cpu else _destination(args, options)
    if device is None:
        result: Tensor = func(tensor, *args, **options)
        return result
    blocking = not options.get("non_blocking", False)
    return _move(tensor, device, dtype or tensor.dtype, blocking=blocking)


def _read(func: Any, tensor: Tensor, *args: Any) -> Any:
    if isinstance(tensor, OnGpu):
        _note_wait(func.__name__)
    return func(value_of(tensor), *args)


def _numpy(func: Any, tensor: Tensor, **options: Any) -> Any:
    if isinstance(tensor, OnGpu):
        raise MixedDevices("a tensor of the GPU has no array")
    return func(tensor, **options)


def _new_tensor(func: Any, data: Any, *, device: Any = None, **options: Any) -> Tensor:
    made: Tensor = func(_plain(data), **options)
    return made if device is None else _move(made, torch.device(device), made.dtype)


def _plain(values: Any) -> Any:
    if isinstance(values, list | tuple):
        return [_plain(value) for value in values]
    return values.item() if isinstance(values, OnGpu) else values


def _one_hot(func: Any, tensor: Tensor, *args: Any, **options: Any) -> Tensor:
    result: Tensor = func(value_of(tensor), *args, **options)
    return OnGpu(result) if isinstance(tensor, OnGpu) else result


def _histc(func: Any, tensor: Tensor, *args: Any, **options: Any) -> Tensor:
    # A CPU counts floating-point numbers alone.
    counts: Tensor = func(tensor.float(), *args, **options)
    return counts.to(tensor.dtype)


def _scaled_dot_product_attention(
    func: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    **options: Any,
) -> Tensor:
    tensors = [tensor for tensor in (query, key, value, attn_mask) if tensor is not None]
    on_gpu = {isinstance(tensor, OnGpu) for tensor in tensors}
    if on_gpu == {True, False}:
        raise MixedDevices("attention of tensors of both devices")

    def compute(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        result: Tensor = func(query, key, value, mask, **options)
        return result

    if on_gpu == {False}:
        return compute(query, key, value, attn_mask)
    return _compute_on_cpu(compute, query, key, value, attn_mask)


_HANDLERS: dict[Any, Callable[..., Any]] = {
    Tensor.cpu: _to,
    Tensor.to: _to,
    Tensor.pin_memory: lambda _, tensor: tensor,
    Tensor.tolist: _read,
    Tensor.__format__: _read,
    Tensor.__repr__: _read,
    Tensor.numpy: _numpy,
    torch.tensor: _new_tensor,
    functional.one_hot: _one_hot,
    torch.histc: _histc,
    functional.scaled_dot_product_attention: _scaled_dot_product_attention,
}


HEADS = {(size, value) for size in range(8, 257, 8) for value in (size, 128)}
"""Sizes of the heads of keys and of values that the stand-in for FlashAttention 4 takes."""


class StandInGpu:
    """Records what the stand-in computes."""

    def __init__(self) -> None:
        self.kernel_heads: list[int] = []
        """Size of the heads in each call of a kernel for variable lengths."""
        self.kernels: list[str] = []
        """Name of the kernel in each of these calls."""
        self.waits: list[str] = []
        """What made the host wait for the GPU: reads of values, and copies that are not
        asynchronous."""
        self.copies_to_gpu = 0

    def varlen_attn(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor,
        max_q: int,
        max_k: int,
        *,
        scale: float | None,
        window_size: tuple[int, int],
        enable_gqa: bool = False,
    ) -> Tensor:
        """Computes causal attention in place of the kernel, each sequence by itself."""
        assert key.shape[-1] == value.shape[-1] == query.shape[-1] <= 256
        assert enable_gqa == (query.shape[1] != key.shape[1])
        assert max_q == max_k
        assert window_size[1] == 0
        bounds = (cu_seq_q, cu_seq_k, max_q)
        return self._attend("varlen", query, key, value, bounds, scale, window_size[0])

    def flash4_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        softmax_scale: float | None,
        causal: bool,
        window_size: tuple[int | None, int | None],
        deterministic: bool,
    ) -> tuple[Tensor, None]:
        """Computes what `flash_attn.cute.flash_attn_varlen_func` does."""
        assert causal == (window_size == (None, None))
        assert causal or window_size[1] == 0
        assert max_seqlen_q == max_seqlen_k
        assert not deterministic
        bounds = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q)
        before = -1 if window_size[0] is None else window_size[0]
        attended = self._attend("flash4", query, key, value, bounds, softmax_scale, before)
        return attended, None

    def _attend(
        self,
        name: str,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bounds: tuple[Tensor, Tensor, int],
        scale: float | None,
        before: int,
    ) -> Tensor:
        cu_seq_q, cu_seq_k, longest = bounds
        assert query.dtype == key.dtype == value.dtype
        assert query.shape[-1] % 8 == value.shape[-1] % 8 == 0
        assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
        assert query.shape[1] % key.shape[1] == 0
        assert key.shape[1] == value.shape[1]
        assert cu_seq_q is cu_seq_k
        assert cu_seq_q.dtype == torch.int32
        assert longest == int(value_of(cu_seq_q).diff().max())
        self.kernel_heads.append(query.shape[-1])
        self.kernels.append(name)

        def compute(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor) -> Tensor:
            return _attend(query, key, value, bounds.tolist(), scale, before)

        return _compute_on_cpu(compute, query, key, value, cu_seq_q)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, bounds: list[int], scale: float | None, before: int
) -> Tensor:
    outputs = []
    for start, end in pairwise(bounds):
        distance = torch.arange(end - start)
        distance = distance[:, None] - distance[None, :]
        mask = (distance >= 0) & ((distance <= before) if before >= 0 else True)
        q, k, v = (packed[start:end].transpose(0, 1) for packed in (query, key, value))
        output = functional.scaled_dot_product_attention(
            q[None], k[None], v[None], attn_mask=mask, scale=scale, enable_gqa=len(q) != len(k)
        )[0]
        outputs.append(output.transpose(0, 1))
    return torch.cat(outputs)


_active: list[StandInGpu] = []


@contextmanager
def stand_in_gpu() -> Iterator[StandInGpu]:
    """Lets tensors and modules be moved to the device `cuda` for as long as the context lasts.

    Models must be loaded before: `from_pretrained` initialises no buffers within it.
    """
    gpu = StandInGpu()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "_lazy_init", lambda: None)
        patch.setattr(torch.cuda, "get_device_capability", lambda *_: COMPUTE_CAPABILITY)
        patch.setattr(varlen, "varlen_attn", gpu.varlen_attn)
        patch.setattr(attention_kernels, "_flash4_function", lambda: gpu.flash4_attention)
        # The models of the tests have smaller heads than a GPU's kernel takes.
        patch.setattr(attention_kernels, "FLASH4_HEADS", HEADS)
        patch.setattr(clip_grad, "_group_tensors_by_device_and_dtype", _group_tensors)
        # The rounding of half precision would hide what is wrong.
        patch.setattr(attention_kernels, "KERNEL_DTYPES", (torch.float32,))
        patch.setattr(attention_kernels, "_chosen", {})
        patch.setattr(logprobs, "_fused_tiles", lambda: None)
        patch.setattr(nn.Module, "to", _move_module)
        # Subclasses of tensors are not for inference mode.
        patch.setattr(torch._C, "_InferenceMode", lambda _: torch.no_grad())
        _active.append(gpu)
        try:
            with _Calls(), _Operations():  # type: ignore[no-untyped-call]
                yield gpu
        finally:
            _active.remove(gpu)


def _group_tensors(lists: Any, *arguments: Any) -> Any:
    """Groups tensors by device and dtype as C++ does, which takes all for tensors of the CPU."""
    ((key, grouped),) = _grouped_in_cpp(lists, *arguments).items()
    return {(lists[0][0].device, key[1]): grouped}


_grouped_in_cpp = clip_grad._group_tensors_by_device_and_dtype
_module_to = nn.Module.to


def _move_module(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    """Replaces `Module.to`, which gives new values to the parameters' own tensors in C++."""
    device, dtype = _destination(args, kwargs)
    if device is None or device.type == "cpu":
        return _module_to(module, *args, **kwargs)
    if dtype is not None:
        _module_to(module, dtype)
    moved: dict[int, Tensor] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                if id(parameter) not in moved:
                    on_gpu = _move(parameter.detach(), GPU, parameter.dtype)
                    moved[id(parameter)] = nn.Parameter(on_gpu, parameter.requires_grad)
                part._parameters[name] = moved[id(parameter)]  # type: ignore[assignment]
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = _move(buffer, GPU, buffer.dtype)
    return module


def compare_with_cpu(policy: Policy, batch: Batch, temperature: float) -> StandInGpu:
    """Asserts that a policy gets the same scores and gradients on the GPU as on the CPU, and leaves
    it there. Returns what the GPU has computed."""
    logprobs, gradient = _score_and_train(policy, batch, temperature)
    with stand_in_gpu() as gpu:
        policy.to("cuda")
        on_gpu, gradient_on_gpu = _score_and_train(policy, batch, temperature)
    assert not isinstance(on_gpu, OnGpu)
    assert (on_gpu - logprobs)[batch.mask].abs().max() < 2e-5
    assert (gradient_on_gpu - gradient).norm() < 1e-4 * gradient.norm()
    return gpu


def _score_and_train(policy: Policy, batch: Batch, temperature: float) -> tuple[Tensor, Tensor]:
    """Returns the log-probs of all rows, and the gradient of a mean of them with random factors."""
    policy.zero_grad()
    logprobs, entropies = response_logprobs(
        policy, batch, torch.arange(len(batch.lengths)), temperature, entropy=True
    )
    factors = torch.randn(logprobs.shape, generator=torch.Generator().manual_seed(0))
    loss = ((logprobs + 0.1 * entropies) * factors)[batch.mask].mean()
    loss.backward()  # type: ignore[no-untyped-call]
    gradients = [value_of(p.grad) for p in policy.parameters() if p.grad is not None]
    return logprobs.detach(), torch.cat([gradient.float().flatten() for gradient in gradients])
