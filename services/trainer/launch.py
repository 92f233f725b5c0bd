"""Starts the trainer by torchrun and exits with the exit code of the process that failed first.

torchrun itself exits with 1 however its processes failed, which Kubernetes takes for an error that
no restart fixes. `python -m services.trainer.launch` takes torchrun's options and its `PET_*`
variables, and starts `services.trainer.loop` unless `-m` names another module.
"""

from __future__ import annotations

import socket
import sys
from argparse import Namespace

from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.run import parse_args, run

from services.common.process import EXIT_RETRYABLE, hide_memory
from services.trainer.rendezvous import check_rendezvous_states


def main() -> None:
    """Runs torchrun in this process."""
    hide_memory()
    module = [] if "-m" in sys.argv else ["-m", "services.trainer.loop"]
    arguments = parse_args([*sys.argv[1:], *module])  # type: ignore[no-untyped-call]
    name_host(arguments)
    check_rendezvous_states()
    try:
        run(arguments)  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        # A process ended by signal n has the exit code -n here, and 128 + n in a shell.
        sys.exit(failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode)
    except SignalException as error:
        sys.exit(128 + error.sigval)
    except (RendezvousError, DistError) as error:
        # The other nodes have not started yet, or have been evicted.
        sys.stderr.write(f"the workers do not find each other: {error}\n")
        sys.exit(EXIT_RETRYABLE)


def name_host(arguments: Namespace) -> None:
    """Sets `is_host` on the node that the endpoint of the rendezvous names, by its host name.

    torchrun would resolve the endpoint's name and compare addresses. In a pod that has just started
    the name has no address yet, so that no node would be the host, and all would wait for one until
    the rendezvous times out.
    """
    host, _, _ = arguments.rdzv_endpoint.rpartition(":")
    name, _, domain = host.partition(".")
    if arguments.rdzv_backend == "c10d" and domain and name == socket.gethostname():
        arguments.rdzv_conf = ",".join(filter(None, [arguments.rdzv_conf, "is_host=true"]))


if __name__ == "__main__":
    main()
