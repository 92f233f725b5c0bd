"""`python -m services.trainer.launch`: torchrun for the trainer, ending as the trainer ended.

torchrun itself ends with 1 whatever became of its processes, which Kubernetes takes for an error
that no restart mends. Takes torchrun's options, and its `PET_*` variables.
"""

from __future__ import annotations

import sys

from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.run import parse_args, run

from services.common.process import EXIT_RETRYABLE


def main() -> None:
    arguments = parse_args([*sys.argv[1:], "-m", "services.trainer.loop"])  # type: ignore[no-untyped-call]
    try:
        run(arguments)  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        # Of a process that a signal ended, as a shell says it.
        sys.exit(failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode)
    except SignalException as error:
        sys.exit(128 + error.sigval)
    except (RendezvousError, DistError) as error:
        # The others are not there: not yet, or not any more.
        sys.stderr.write(f"the workers do not find each other: {error}\n")
        sys.exit(EXIT_RETRYABLE)


if __name__ == "__main__":
    main()
