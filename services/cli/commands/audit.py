"""`bapo audit`: checks a run's digest chain, re-trains steps and compares the weights' digests."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import dropwhile
from pathlib import Path
from typing import IO

import click

from bapo_core.errors import BapoError
from services.buffer.api import wire
from services.buffer.api.client import BufferClient
from services.buffer.api.digest_chain import check_chain
from services.cli.console import plain_console
from services.cli.local_run import trainer_command
from services.cli.options import run_argument
from services.cli.service import connect, open_local_object_store, reader_environment
from services.model.resolve import ensure_model
from services.stack.settings import default_home

COMPARED = ("weights_before", "batch", "weights_after")
LOG_CHARACTERS = 2_000


@click.command
@run_argument
@click.option(
    "--steps",
    metavar="FIRST:LAST",
    help="The steps to re-train; by default all after the oldest checkpoint that is kept.",
)
@click.option("--chain", "chain_only", is_flag=True, help="Check the digest chain, train nothing.")
def audit(run: str, steps: str | None, chain_only: bool) -> None:
    """Re-train recorded steps and compare the weights' digests.

    Every committed step has a link in the run's digest chain: a digest of the link before, of its
    batch, of the weights before and after it, of the configuration and of the code. The links of
    all steps are checked, or of the steps that --steps selects. Then some steps are re-trained on
    their recorded batches, from the checkpoint before the first of them. On the same kind of
    machine weights are equal, bit for bit; elsewhere, and on GPUs whose kernels sum in no fixed
    order, the first difference is named.

    \b
    Examples:
      bapo audit countdown
      bapo audit countdown --steps 1:20
      bapo audit countdown --chain
    """
    client, console = connect(run), plain_console()
    state = client.run_state()
    views = client.steps()
    # Steps that were committed before there were digests have no link.
    linked = list(dropwhile(lambda view: view.digests is None, views))
    if not linked:
        raise BapoError("no committed step of the run has digests yet")
    first, last = (1, 0) if chain_only else _range(client, steps, linked)
    checked = linked if steps is None or chain_only else views[first - 1 : last]
    check_chain(client.stored_config(), checked, state.changes, state.forked_from)
    console.print(f"the digest chain of {len(checked)} steps is whole")
    if chain_only:
        return
    recorded = {view.step: view.digests for view in views[first - 1 : last] if view.digests}
    model = ensure_model(state.config, default_home(), open_store=open_local_object_store)
    processes = _processes(recorded)
    command = trainer_command(processes, "services.trainer.audit", str(first), str(last))
    with _retraining(command, run, model) as found:
        for step, digests in zip(recorded, found, strict=False):
            _compare(step, recorded[step], digests)
            console.print(f"step {step}: the same weights")


def _range(
    client: BufferClient, text: str | None, linked: Sequence[wire.StepView]
) -> tuple[int, int]:
    """Returns the first and the last step to re-train, among the steps with a link.

    Raises `BapoError` when the range is none, or has no checkpoint before it.
    """
    oldest, newest = linked[0].step, linked[-1].step
    starts = sorted({1, *(view.step + 1 for view in client.checkpoints())})
    starts = [start for start in starts if oldest <= start <= newest]
    if not starts:
        raise BapoError(
            f"there is no checkpoint to start from: the steps with digests are {oldest} to "
            f"{newest}; check their links alone with --chain"
        )
    if text is None:
        return (starts[1] if len(starts) > 1 else starts[0]), newest
    first, _, last = text.partition(":")
    if not (first.isdigit() and last.isdigit() and oldest <= int(first) <= int(last) <= newest):
        raise BapoError(f"--steps {text}: write FIRST:LAST, from {oldest} to {newest}")
    if int(first) not in starts:
        raise BapoError(
            f"--steps {text}: there is no checkpoint of step {int(first) - 1} to start from; begin "
            f"at one of {', '.join(map(str, starts))}"
        )
    return int(first), int(last)


def _processes(recorded: Mapping[int, wire.ChainLink]) -> int:
    """Returns the number of the trainer's processes, on which the order of summation depends."""
    first = next(iter(recorded))
    for step, digests in recorded.items():
        if digests.processes != recorded[first].processes:
            raise BapoError(
                f"steps {first} to {step - 1} were trained by {recorded[first].processes} "
                f"processes, and step {step} by {digests.processes}; audit them apart"
            )
    return recorded[first].processes


@contextmanager
def _retraining(
    command: Sequence[str], run: str, model: Path
) -> Iterator[Iterator[wire.StepDigests]]:
    """Yields the digests of each step while a trainer re-trains the steps.

    Raises `BapoError` with the end of its log when it fails.
    """
    with (
        tempfile.TemporaryDirectory(prefix="bapo-audit-") as scratch,
        reader_environment(run) as services,
    ):
        log = Path(scratch) / "log"
        environment = {
            **os.environ,
            **services,
            "BAPO_RUN": run,
            "BAPO_MODEL": str(model),
            "BAPO_SCRATCH": scratch,
            "HF_HUB_OFFLINE": "1",
        }
        with (
            log.open("w") as errors,
            subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
            ) as trainer,
        ):
            assert trainer.stdout is not None
            try:
                yield _digests_in(trainer.stdout)
            except BaseException:
                trainer.terminate()
                raise
        if trainer.returncode:
            raise BapoError(
                f"re-training failed with exit code {trainer.returncode}:\n"
                f"{log.read_text(errors='replace')[-LOG_CHARACTERS:]}"
            )


def _digests_in(lines: IO[str]) -> Iterator[wire.StepDigests]:
    for line in lines:
        if line.startswith("{"):
            yield wire.StepDigests.model_validate_json(line)


def _compare(step: int, recorded: wire.ChainLink, found: wire.StepDigests) -> None:
    """Raises `BapoError` that names the first difference and what follows from it."""
    for name in COMPARED:
        here, there = getattr(found, name), getattr(recorded, name)
        if here == there:
            continue
        causes = [
            f"{label}: {there_value} then, {here_value} here"
            for label, there_value, here_value in (
                ("code", recorded.code, found.code),
                ("platform", recorded.platform, found.platform),
            )
            if there_value != here_value
        ]
        why = (
            f"they may differ because of this ({'; '.join(causes)})"
            if causes
            else "code and platform are the same, so data or weights are not what was trained, "
            "unless the machine does not repeat its sums bit for bit, as GPUs do not: then a "
            "repetition of this command finds another digest"
        )
        raise BapoError(
            f"step {step}: {name} is {there[:12]} in the chain and {here[:12]} here; {why}"
        )
