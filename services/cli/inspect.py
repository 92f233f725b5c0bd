"""Questions to a running buffer service, answered as tables or JSON."""

from __future__ import annotations

import argparse
import json
import os
import threading
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

from pydantic import BaseModel
from rich.console import Console
from rich.table import Table

from bapo_core.errors import BapoError
from services.buffer.api import wire
from services.buffer.api.client import BufferClient
from services.stack.stack import Endpoints, default_home, find_stack

PATIENCE_S = 5.0
"""Somebody sits and waits for the answer."""


def service(run: str = "") -> BufferClient:
    """The service of the environment, or else that of the stack that runs here."""
    url, token = os.environ.get("BAPO_BUFFER_URL"), os.environ.get("BAPO_TOKEN")
    if url and token:
        return BufferClient(url, token, run=run, give_up_s=PATIENCE_S)
    endpoints = stack_here("name a service in BAPO_BUFFER_URL and its token in BAPO_TOKEN")
    return BufferClient(endpoints.buffer_url, endpoints.token, run=run, give_up_s=PATIENCE_S)


def stack_here(otherwise: str) -> Endpoints:
    """The stack that runs here; an error says how to do without one."""
    endpoints = find_stack(default_home())
    if endpoints is None:
        raise BapoError(f"no stack runs here; start it with `bapo stack up`, or {otherwise}")
    return endpoints


def runs(arguments: argparse.Namespace) -> None:
    found = service().runs()
    rows = [(r.name, r.status, f"{r.current_step}/{r.config['steps']}", r.attempt) for r in found]
    show(arguments, found, ["run", "status", "step", "attempt"], rows)


def change(arguments: argparse.Namespace) -> None:
    """pause, resume, stop, delete: what `arguments.change` names."""
    client = service(arguments.run)
    if arguments.change == "delete":
        client.delete_run()
        print(f"{arguments.run} is deleted, with its objects")
    else:
        state: wire.RunState = getattr(client, arguments.change)()
        print(f"{state.name} is {state.status} after step {state.current_step}")


def metrics(arguments: argparse.Namespace) -> None:
    """The last steps, or all of them as TensorBoard reads them, or in MLflow."""
    from services.exporters.curves import curves
    from services.exporters.mlflow import MlflowRun
    from services.exporters.tensorboard import write_tensorboard

    client = service(arguments.run)
    if arguments.tensorboard is not None:
        write_tensorboard(client, arguments.tensorboard, follow=arguments.follow, log=print)
        return
    if arguments.mlflow is not None:
        run = MlflowRun(arguments.mlflow, arguments.experiment, client)
        if arguments.follow:
            run.follow(threading.Event())
        run.write()
        print(f"run {client.run} is in experiment {arguments.experiment!r} of {arguments.mlflow}")
        return
    steps = client.steps(after=max(0, client.run_state().current_step - arguments.limit))
    rows = []
    for step in steps:
        found = curves(step)
        rows.append([step.step, *(_short(found.get(name)) for name in METRICS)])
    show(arguments, steps, ["step", *METRICS.values()], rows)


def _short(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.2g}"


METRICS = {
    "reward": "reward",
    "loss": "loss",
    "kl": "KL",
    "entropy": "entropy",
    "gradient_norm": "gradient",
    "clip_fraction": "clipped",
    "staleness_mean": "staleness",
    "trainer/tokens_per_second": "tokens/s",
    "trainer/peak_memory_mib": "MiB",
}
"""What the table shows; `--json` and TensorBoard have all."""


def prompts(arguments: argparse.Namespace) -> None:
    client = service(arguments.run)
    filters = {
        name: getattr(arguments, name)
        for name in ("bin", "trend", "unlocked_after", "unlocked_until", "search", "order")
    }
    found = list(islice(client.all_prompts(**filters), arguments.limit))
    rows = [
        (
            p.uid,
            p.attempts,
            f"{p.first_mean:.3f}",
            f"{p.last_mean:.3f}",
            f"{p.best_mean:.3f}",
            "-" if p.first_solved_step is None else p.first_solved_step,
            p.last_step,
        )
        for p in found
    ]
    columns = ["prompt", "attempts", "first", "last", "best", "first solved", "last step"]
    show(arguments, found, columns, rows)


def prompt(arguments: argparse.Namespace) -> None:
    """A prompt's history, or with a step, why it was or was not used then."""
    client = service(arguments.run)
    if arguments.step is not None:
        decision = client.decision(arguments.step, arguments.uid)
        rows: list[Sequence[Any]] = [
            (each.source, each.outcome.replace("_", " "), each.reason)
            for each in decision.considered
        ]
        show(arguments, decision, ["source", "outcome", "why"], rows)
        return
    history = client.prompt_history(arguments.uid)
    rows = [
        (
            attempt.step,
            attempt.kind,
            attempt.policy_version,
            f"{attempt.correct}/{attempt.size}",
            ", ".join(map(str, attempt.batches)) or "-",
            attempt.group_id,
        )
        for attempt in history.attempts
    ]
    columns = ["step", "kind", "policy", "correct", "trained at steps", "group"]
    show(arguments, history, columns, rows)


def buffer(arguments: argparse.Namespace) -> None:
    client = service(arguments.run)
    name: wire.Buffer = arguments.buffer
    if arguments.events:
        page = client.buffer_events(name, after=arguments.after, limit=min(arguments.limit, 1000))
        events = [(e.step, e.event, e.reason, e.prompt_uid, e.group_id) for e in page.items]
        show(arguments, page.items, ["step", "event", "why", "prompt", "group"], events)
        return
    found = client.buffer(name, arguments.step)[: arguments.limit]
    rows = [
        (i.prompt_uid, f"{i.mean_reward:.3f}", i.inserted_step, i.age, i.staleness, i.group_id)
        for i in found
    ]
    columns = ["prompt", "mean reward", "inserted at", "age", "staleness", "group"]
    show(arguments, found, columns, rows)


def batches(arguments: argparse.Namespace) -> None:
    client = service(arguments.run)
    if arguments.step is not None:
        manifest = client.recorded_batch(arguments.step)
        rows: list[Sequence[Any]] = [
            (m.source, m.prompt_uid, f"{m.correct}/{m.size}", m.step, m.policy_version, m.group_id)
            for m in manifest.members
        ]
        columns = ["source", "prompt", "correct", "made at", "policy", "group"]
        show(arguments, manifest, columns, rows)
        return
    found = list(islice(_all_batches(client), arguments.limit))
    rows = [
        (
            b.step,
            b.counts["fresh"],
            b.counts["reevaluated"],
            b.counts["replayed"],
            f"[{b.c2:.3f}, {b.c3:.3f}]",
            f"{b.r_tot:.3f}",
        )
        for b in found
    ]
    columns = ["step", "fresh", "re-evaluated", "replayed", "window", "mean reward"]
    show(arguments, found, columns, rows)


def _all_batches(client: BufferClient) -> Iterable[wire.BatchSummary]:
    cursor: str | None = None
    while True:
        page = client.batches(cursor=cursor, limit=1000)
        yield from page.items
        if (cursor := page.next) is None:
            return


def token_create(arguments: argparse.Namespace) -> None:
    made = service().create_token(arguments.name, arguments.scope)
    if arguments.json:
        print(made.model_dump_json(indent=2))
    else:
        print(f"{made.token}\n(token {made.id}, scope {made.scope}; it is not shown again)")


def token_list(arguments: argparse.Namespace) -> None:
    found = service().tokens()
    rows = [
        (t.id, t.name, t.scope, _time(t.created_at), _time(t.last_used_at), _time(t.revoked_at))
        for t in found
    ]
    show(arguments, found, ["id", "name", "scope", "created", "last used", "revoked"], rows)


def token_revoke(arguments: argparse.Namespace) -> None:
    revoked = service().revoke_token(arguments.id)
    print(f"token {revoked.id} ({revoked.name}) is revoked")


def gc(arguments: argparse.Namespace) -> None:
    found = service().collect_garbage(dry_run=arguments.dry_run)
    if arguments.json:
        print(found.model_dump_json(indent=2))
        return
    for key in found.orphans:
        print(key)
    what = "would be deleted" if arguments.dry_run else "are deleted"
    print(
        f"{len(found.orphans)} of {found.objects} objects have no row, are older than a day, and "
        f"{what}"
    )
    if found.missing:
        raise BapoError(
            f"{len(found.missing)} objects are missing that rows point to, the first: "
            f"{found.missing[0]}; restore them from a backup of the bucket"
        )


def _time(moment: Any) -> str:
    return "-" if moment is None else moment.astimezone().strftime("%Y-%m-%d %H:%M")


def show(
    arguments: argparse.Namespace,
    answer: BaseModel | Sequence[BaseModel],
    columns: Sequence[str],
    rows: Iterable[Sequence[Any]],
) -> None:
    """The answer as JSON for programs, or as a table for people."""
    if arguments.json:
        one = isinstance(answer, BaseModel)
        plain = (
            answer.model_dump(mode="json")
            if isinstance(answer, BaseModel)
            else [each.model_dump(mode="json") for each in answer]
        )
        print(json.dumps(plain, indent=2 if one else None))
        return
    table = Table(*columns, box=None, header_style="bold", pad_edge=False)
    for row in rows:
        table.add_row(*map(str, row))
    Console().print(table if table.rows else "nothing")
