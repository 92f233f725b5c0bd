"""`bapo`: the list of commands, and how their errors are shown."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from typing import NoReturn

import click

from bapo_core.errors import BapoError
from services import VERSION
from services.cli.echo import echo, escape_logs
from services.cli.lazy import Lazy, LazyGroup
from services.common.errors import ServiceError
from services.common.process import hide_memory
from services.common.proxies import bypass_proxies
from services.common.redaction import redact, redact_tracebacks

_IN = "services.cli.commands"

SECTIONS = {
    "Train": {
        "run": Lazy(f"{_IN}.run:run", "Train on this machine."),
        "compare": Lazy(f"{_IN}.compare:compare", "Train several variants and compare them."),
        "reproduce": Lazy(
            f"{_IN}.reproduce:reproduce",
            "Run experiments of the papers, and judge what they claim.",
        ),
        "eval": Lazy(f"{_IN}.eval:evaluate", "Measure the accuracy of a model."),
        "report": Lazy(f"{_IN}.report:report", "Write the report of a run again."),
    },
    "Prepare": {
        "config": Lazy(f"{_IN}.config:config", "Show, check, describe or store a configuration."),
        "dataset": Lazy(
            f"{_IN}.dataset:dataset", "Store data sets in the buffer service, and list them."
        ),
        "model": Lazy(f"{_IN}.model:model", "Show models that come with bapo."),
        "doctor": Lazy(f"{_IN}.doctor:doctor", "Find out why a run does not learn."),
    },
    "Ask about a run": {
        "metrics": Lazy(f"{_IN}.metrics:metrics", "Show or export the metrics of each step."),
        "evaluations": Lazy(
            f"{_IN}.evaluations:evaluations", "Show the scores of a run on its evaluation sets."
        ),
        "prompts": Lazy(f"{_IN}.prompts:prompts", "List training prompts by difficulty."),
        "prompt": Lazy(f"{_IN}.prompts:prompt", "Show the attempts at one prompt."),
        "group": Lazy(f"{_IN}.group:group", "Show the responses of one group."),
        "responses": Lazy(
            f"{_IN}.responses:responses", "Show what the model wrote, and what the verifier read."
        ),
        "batches": Lazy(f"{_IN}.batches:batches", "Show the composition of the batches."),
        "buffer": Lazy(
            f"{_IN}.buffer:buffer", "Show the contents of a buffer, or the sizes of both."
        ),
        "checkpoints": Lazy(
            f"{_IN}.checkpoints:checkpoints", "List, verify or export a run's checkpoints."
        ),
        "audit": Lazy(
            f"{_IN}.audit:audit", "Re-train recorded steps and compare the weights' digests."
        ),
        "backtest": Lazy(
            f"{_IN}.backtest:backtest", "Apply other data rules to the groups of recorded runs."
        ),
        "fork": Lazy(
            f"{_IN}.fork:fork", "Make a new run that shares the past of a run, and train it."
        ),
        "train": Lazy(f"{_IN}.fork:train", "Train a new run on the recorded rollouts of a run."),
        "profile": Lazy(f"{_IN}.profile:profile", "List or export the trainer's traces."),
    },
    "Manage runs": {
        "runs": Lazy(f"{_IN}.runs:runs", "List the runs of the service."),
        "pause": Lazy(f"{_IN}.runs:pause", "Let the processes of a run wait."),
        "resume": Lazy(f"{_IN}.runs:resume", "End the pause of a run."),
        "stop": Lazy(f"{_IN}.runs:stop", "Stop a run, so that its processes end."),
        "delete": Lazy(f"{_IN}.runs:delete", "Delete a run and its objects for good."),
    },
    "Manage services": {
        "stack": Lazy(f"{_IN}.stack:stack", "Start or stop the services of this machine."),
        "token": Lazy(f"{_IN}.token:token", "Create, list or revoke tokens of the REST API."),
        "gc": Lazy(f"{_IN}.gc:gc", "Delete objects that no row of the database refers to."),
        "pipeline": Lazy(
            f"{_IN}.pipeline:pipeline", "Compile, submit or try the Kubeflow pipeline."
        ),
    },
}


@click.group(
    cls=LazyGroup,
    sections=SECTIONS,
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
)
@click.version_option(VERSION, message="bapo %(version)s", help="Show the version and exit.")
def bapo() -> None:
    """Off-policy reinforcement learning from verifiable rewards (BAPO, arXiv 2602.20722).

    \b
    Examples:
      bapo run examples/countdown.yaml            train, with live progress
      bapo run examples/countdown.yaml steps=50   change a key of the configuration
      bapo run examples/countdown.yaml --resume   continue an interrupted run
      bapo compare examples/countdown.yaml        compare BAPO with GRPO and DAPO
      bapo stack up                               keep REST API and dashboard running
      bapo prompts countdown --order hardest      list the hardest prompts
      bapo prompt countdown UID --step 40         see why it was trained, or not
      bapo responses countdown --set test --wrong
                                                  read what the model wrote
      bapo pipeline run-local examples/countdown.yaml
                                                  try the pipeline without a cluster

    `bapo COMMAND --help` explains a command. docs/cli.md lists all of them.
    """


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs a command; `arguments` are those of the process unless given.

    An error ends the process with exit code 1 and one line on standard error, wrong usage with 2,
    and an interruption with 130.
    """
    for stream in (sys.stdout, sys.stderr):
        # A terminal of Latin-1 or code page 1252 lacks characters of tables and of models.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    bypass_proxies()
    escape_logs()
    redact_tracebacks()
    hide_memory()
    try:
        code = bapo.main(arguments, prog_name="bapo", standalone_mode=False)
    except click.ClickException as error:
        message = io.StringIO()
        error.show(message)
        echo(message.getvalue(), err=True, nl=False)
        sys.exit(error.exit_code)
    except click.Abort:
        _fail("interrupted", 130)
    except ServiceError as error:
        # Who mistypes a name need not know how the service was asked.
        _fail(error.detail if error.status in (404, 409) else str(error))
    except (BapoError, OSError) as error:
        _fail(str(error))
    if code:
        sys.exit(code)


def _fail(message: str, code: int = 1) -> NoReturn:
    echo(f"error: {redact(' '.join(message.split()))}", err=True)
    sys.exit(code)
