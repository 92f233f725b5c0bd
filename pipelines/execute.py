"""`python -m pipelines.execute DIRECTORY`: the pipeline by `kfp.local`, its arguments on standard
input as JSON.

A process of its own: KFP waits for its threads, whatever happens to it; this can be ended with all
that it has started.
"""

from __future__ import annotations

import json
import sys
import warnings

from kfp import local

from pipelines.bapo_pipeline import bapo_pipeline


def main() -> None:
    # Of every step: that its image is not one of Python's own.
    warnings.filterwarnings("ignore", category=RuntimeWarning, module="kfp.local")
    local.init(local.SubprocessRunner(use_venv=False), pipeline_root=sys.argv[1])
    try:
        bapo_pipeline(**json.load(sys.stdin))
    except RuntimeError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
