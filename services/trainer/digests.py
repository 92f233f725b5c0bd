"""Digests of weights, batches and code, from which the digest chain of a run is made."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from services.buffer.api.wire import StepDigests
from services.trainer.checkpoint import ModuleStates
from services.trainer.code_version import code_version
from services.trainer.data import Batch
from services.trainer.families import plain_name
from services.trainer.ranks import Ranks

_CHUNK = 1 << 24
"""Elements that are multiplied at a time; bounds the memory of the products."""
_MODULUS = 1 << 64
NO_BATCH = hashlib.sha256().hexdigest()
"""Digest of a batch without groups."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer types by the bytes of an element."""


def weights_digest(modules: ModuleStates, ranks: Ranks) -> str:
    """Returns a digest of the bits of all trained parameters. Every rank calls it.

    It hashes, for each parameter, the sums of its bits as integers and of their squares modulo
    2^64. Sums do not depend on how a parameter is sharded, and the device computes them at the
    speed of its memory. Values that have changed places within a parameter go unnoticed.
    """
    local: list[tuple[str, int, int]] = []
    for module_name, (module, _) in sorted(modules.items()):
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                local.append((f"{module_name}/{plain_name(name)}", *_sums_of_bits(parameter)))
    by_rank = ranks.gather_to_main(local)

    def digest() -> str:
        lines = []
        for of_ranks in zip(*by_rank, strict=True):
            first, second = (sum(sums[i] for sums in of_ranks) % _MODULUS for i in (1, 2))
            lines.append(f"{of_ranks[0][0]} {first:016x} {second:016x}")
        return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()

    return ranks.from_main(digest)


@torch.no_grad()
def _sums_of_bits(parameter: Tensor) -> tuple[int, int]:
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    bits = local.detach().contiguous().view(_INTEGERS[local.element_size()]).flatten()
    # int64 wraps around, which is arithmetic modulo 2^64.
    squares = sum(
        (part.sum() for part in (chunk.long().square() for chunk in torch.split(bits, _CHUNK))),
        torch.zeros((), dtype=torch.int64, device=bits.device),
    )
    return int(bits.sum(dtype=torch.int64)), int(squares)


def group_digests(batch: Batch) -> Iterator[str]:
    """Yields a digest of each group: its tokens, images, log-probs, rewards and place."""
    rewards = batch.row_rewards
    digest = hashlib.sha256()
    for index, member in enumerate(batch.members):
        if index and not member.joins_previous:
            yield digest.hexdigest()
            digest = hashlib.sha256()
        place = (member.prompt_uid, member.step, member.policy_version, member.source)
        digest.update(repr(place).encode())
        if member.images:
            digest.update(repr(member.images).encode())
        rows = torch.nonzero(batch.member == index).flatten()
        for row in rows.tolist():
            length, mask = int(batch.lengths[row]), batch.mask[row]
            digest.update(batch.tokens[row, :length].numpy().tobytes())
            digest.update(batch.behavior_logprobs[row][mask].numpy().tobytes())
        digest.update(rewards[rows].numpy().tobytes())
    if batch.members:
        yield digest.hexdigest()


def batch_digest(batch: Batch, positions: Sequence[int], ranks: Ranks) -> str:
    """Returns the digest of the whole batch, of which this rank has the groups `positions`.

    Every rank calls it.
    """
    local = dict(zip(positions, group_digests(batch), strict=True))
    by_rank = ranks.gather_to_main(local)

    def digest() -> str:
        groups = {position: group for part in by_rank for position, group in part.items()}
        ordered = "".join(groups[position] for position in sorted(groups))
        return hashlib.sha256(ordered.encode()).hexdigest()

    return ranks.from_main(digest)


def platform_name() -> str:
    """Returns device and version of PyTorch."""
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    else:
        device = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    return f"{device}, torch {torch.__version__}"


def step_digests(before: str, batch: str, after: str, ranks: Ranks) -> StepDigests:
    """Builds the digests of a step that this trainer computed."""
    return StepDigests(
        weights_before=before,
        batch=batch,
        weights_after=after,
        code=code_version(),
        processes=ranks.size,
        platform=platform_name(),
    )
