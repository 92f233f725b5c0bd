"""The trainer's main loop."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import torch

from bapo_core.config import ConfigHistory, RunConfig
from bapo_core.config.training import TrainerConfig
from bapo_core.errors import BapoError
from services.buffer.api.client import BufferClient
from services.buffer.api.spans import SpanRecorder
from services.buffer.api.wire import BatchManifest, RunState, StoredVersion
from services.common.errors import first_line
from services.common.objectstore import ObjectStore
from services.model.stored import fetch_model, model_on_disk
from services.rollout.api.addresses import ReplicaHosts
from services.trainer.background import Background
from services.trainer.checkpoint import Checkpointer, load_checkpoint
from services.trainer.digests import weights_digest
from services.trainer.memory import (
    out_of_memory_remedy,
)
from services.trainer.nccl import NcclCommunicator
from services.trainer.nccl_broadcast import NcclBroadcaster
from services.trainer.phases import PhaseTimer
from services.trainer.profile import trace_steps
from services.trainer.publish import WeightPublisher
from services.trainer.ranks import Ranks, init_distributed
from services.trainer.replay import begin_fork
from services.trainer.settings import TrainerSettings
from services.trainer.steps import TrainerContext, make_reader, make_updater, train_batch
from services.trainer.update import Updater

log = logging.getLogger(__name__)


def train(config: RunConfig, context: TrainerContext, ranks: Ranks) -> None:
    """Trains from the last checkpoint to the last step. Every rank calls it."""
    state = ranks.model_from_main(RunState, context.buffer.run_state)
    assert state is not None
    history = ConfigHistory(config, state.changes)
    publisher = make_publisher(config, context, ranks)
    checkpointer = Checkpointer(context.buffer, context.store, scratch=context.scratch, ranks=ranks)
    reader = make_reader(config, context)
    recorder = SpanRecorder(context.buffer, "trainer")
    timer = PhaseTimer(recorder if ranks.is_main else None)
    if state.forked_from is not None:
        begin_fork(state.forked_from, history, context, checkpointer, ranks)
    updater, last_step = restore(config, context, ranks)
    weights = weights_digest(updater.modules, ranks)
    origin = state.forked_from
    if origin is None or not origin.was_trained_again(last_step):
        refuse_other_weights(last_step, weights, context, ranks)
    with trace(config, context, ranks) as step_done:
        for timer.step in range(last_step + 1, history.current.steps + 1):
            step = timer.step
            updater.config = history.at(step)
            if updater.config.publishes_at(step):
                with timer.phase("publish"):
                    publisher.publish(step, updater.policy.model)
            with timer.phase("wait"):
                manifest = wait_for_batch(step, context, ranks, publisher)
            with explain_out_of_memory(lambda: out_of_memory_remedy(config, updater.memory)):
                outcome = train_batch(updater.config, updater, reader, manifest, context, timer)
            with timer.phase("commit"):
                digests = outcome.digests(weights, updater)
                weights = digests.weights_after
                if ranks.is_main:
                    context.buffer.commit(step, outcome.metrics | timer.pop(), digests)
            if updater.config.checkpoints_after(step):
                with timer.phase("checkpoint"):
                    # After a resume from this checkpoint, earlier versions are never published
                    # again, so they must be recorded first.
                    publisher.wait_until_recorded()
                    checkpointer.save(step, updater.modules_to_save(step))
            checkpointer.check()
            if ranks.is_main:
                recorder.flush()
                log.info("step committed", extra={"step": step})
            step_done(step)
    publisher.publish(history.current.steps + 1, updater.policy.model)
    # The job succeeds as soon as one worker exits 0, so all ranks wait here until uploads are done.
    ranks.wait_for_all(lambda: settle(publisher, checkpointer))


def settle(*tasks: Background) -> None:
    """Waits for what runs in the background. Raises its error."""
    for task in tasks:
        task.settle()


def trace(
    config: RunConfig, context: TrainerContext, ranks: Ranks
) -> AbstractContextManager[Callable[[int], None]]:
    """Traces `trainer.profile_steps` steps; yields a function to call with each finished step."""
    return trace_steps(
        config.trainer.profile_steps,
        context.store,
        run=context.buffer.run,
        rank=ranks.rank,
        scratch=context.scratch,
    )


def wait_for_batch(
    step: int, context: TrainerContext, ranks: Ranks, publisher: WeightPublisher
) -> BatchManifest:
    """Returns the step's batch once its groups have arrived; rank 0 asks for it.

    Raises the publisher's error if publishing fails meanwhile: no groups would ever come.
    """
    manifest = ranks.model_from_main(
        BatchManifest, lambda: context.buffer.batch(step, meanwhile=publisher.check)
    )
    assert manifest is not None
    return manifest


def make_publisher(config: RunConfig, context: TrainerContext, ranks: Ranks) -> WeightPublisher:
    """Builds the publisher, with a broadcaster on rank 0 if `sync.transport` is nccl."""
    dtype = config.sync.weights_dtype
    broadcaster = None
    if config.sync.transport == "nccl" and ranks.is_main:
        broadcaster = NcclBroadcaster(
            context.buffer, ReplicaHosts(context.replica_hosts), NcclCommunicator()
        )
    return WeightPublisher(
        context.buffer,
        context.store,
        source=context.model_directory,
        dtype=None if dtype == "as_trained" else getattr(torch, dtype),
        ranks=ranks,
        broadcaster=broadcaster,
    )


def restore(config: RunConfig, context: TrainerContext, ranks: Ranks) -> tuple[Updater, int]:
    """Restores the run's last checkpoint; returns the updater and the last step that it has seen.

    Without a committed step, they are those of the initial model and 0. Raises `BapoError` when the
    last checkpoint is not that of the run's current step.
    """
    updater = make_updater(
        config, context.model_directory, ranks, engine_share=context.engine_share
    )
    last_step = ranks.from_main(lambda: context.buffer.run_state().current_step)
    stored = ranks.model_from_main(StoredVersion, context.buffer.latest_checkpoint)
    if stored is None and last_step == 0:
        return updater, 0
    if stored is None or stored.number != last_step:
        raise BapoError(
            f"the run is at step {last_step}, but its last checkpoint is "
            f"{'missing' if stored is None else f'of step {stored.number}'}: another trainer is "
            "running, or this one was started without a new attempt; continue the run with "
            "`bapo run --resume`"
        )
    modules = updater.modules_to_save(last_step)
    load_checkpoint(stored, modules, store=context.store, scratch=context.scratch)
    return updater, last_step


def refuse_other_weights(step: int, weights: str, context: TrainerContext, ranks: Ranks) -> None:
    """Raises `BapoError` if restored weights are not those with which their step was committed.

    weights: digest of the restored weights. Whoever has a token of scope run can record a
    checkpoint of a step that has none, but the digests of a committed step do not change. A step
    that was committed without digests is not checked.
    """

    def find_recorded() -> str | None:
        views = context.buffer.steps(after=step - 1) if step else []
        return views[0].digests.weights_after if views and views[0].digests else None

    recorded = ranks.from_main(find_recorded)
    if recorded not in (None, weights):
        run = context.buffer.run
        raise BapoError(
            f"the checkpoint of step {step} of run {run!r} does not have the weights with which "
            "the step was committed: its trainer has not written it, or it was replaced; find out "
            "who has a token of scope trainer or admin and the keys of the bucket, and go on in a "
            f"new run, with model.path from `bapo checkpoints {run} --step STEP --export "
            "DIRECTORY` of an earlier step"
        )


def initial_model(path: str, store: ObjectStore, ranks: Ranks, settings: TrainerSettings) -> Path:
    """Returns the directory of the initial model, fetched once a machine if it is a stored one."""
    directory = model_on_disk(path, settings.model)
    if directory is not None:
        return directory
    directory = settings.scratch / "model"

    def fetch_once() -> None:
        if int(os.environ.get("LOCAL_RANK", "0")) == 0:
            fetch_model(path, store, directory)

    ranks.wait_for_all(fetch_once)  # no rank reads a model that is not complete
    return directory


def resolve_attempt(buffer: BufferClient, ranks: Ranks, attempt: int | None) -> int:
    """Returns the attempt of the run to work for: `BAPO_ATTEMPT`, or else a new one.

    A new attempt takes the run back to its last checkpoint, and collectors follow it.
    """
    if attempt is not None:
        return attempt
    return ranks.from_main(lambda: buffer.begin_attempt().attempt)


@contextmanager
def explain_out_of_memory(remedy: Callable[[], str] = lambda: "") -> Iterator[None]:
    """Turns a lack of memory into a `BapoError` with the remedies: a restart would not help.

    remedy: returns what to change.
    """
    try:
        yield
    except RuntimeError as error:
        out_of_memory = isinstance(error, torch.OutOfMemoryError)
        if not (out_of_memory or "can't allocate memory" in str(error)):
            raise
        reason = first_line(error)
        advice = remedy() or (
            "set trainer.gradient_checkpointing=full or trainer.offload=true, or train with more "
            "processes (trainer.processes), then resume; a new run may also have a lower "
            "optimizer.microbatch_tokens"
        )
        raise BapoError(
            f"out of memory ({reason}): {advice}. docs/scaling.md lists how much memory each part "
            "takes"
        ) from error


def load_run_config(buffer: BufferClient, override: str | None) -> RunConfig:
    """Returns the run's configuration; `override` is its `trainer` section anew, as JSON.

    `trainer.*` affects how a step is computed and not its result, so it may differ from the stored
    one (`BAPO_TRAINER`).
    """
    config = buffer.run_state().config
    if override is None:
        return config
    return config.model_copy(update={"trainer": TrainerConfig.model_validate_json(override)})


def run_rank(
    component: str, work: Callable[[RunConfig, TrainerContext, Ranks], None], *, in_attempt: bool
) -> None:
    """Calls `work` in this rank of a trainer of the run named by `BAPO_RUN`, until its end.

    component: its name in the logs. in_attempt: whether it works for an attempt of the run.
    """
    from services.common.logs import configure_logs
    from services.common.process import end_with_parent, hide_memory, run_until_error

    configure_logs(component)
    hide_memory()
    # Freed memory of one size then serves for another; micro-batches have many sizes. It is read
    # when the first tensor of a GPU is made.
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    end_with_parent()  # torchrun may be killed without a chance to end its ranks

    def start() -> None:
        settings = TrainerSettings.load()
        token = settings.token.get_secret_value()
        # Ranks on one machine must not overwrite each other's files.
        scratch = settings.scratch / os.environ.get("RANK", "0")
        scratch.mkdir(parents=True, exist_ok=True)
        with init_distributed() as ranks, explain_out_of_memory():
            buffer = BufferClient(settings.buffer_url, token, run=settings.run)
            if in_attempt:
                buffer.attempt = resolve_attempt(buffer, ranks, settings.attempt)
            config = load_run_config(buffer, settings.trainer)
            store = ObjectStore(settings.s3)
            model = initial_model(config.model.path, store, ranks, settings)
            context = TrainerContext(
                buffer, store, model, scratch, settings.replica_hosts, settings.engine_share
            )
            work(config, context, ranks)

    run_until_error(start)


def main() -> None:
    """Runs this rank of the trainer of the run named by `BAPO_RUN`."""
    run_rank("trainer", train, in_attempt=True)


if __name__ == "__main__":
    main()
