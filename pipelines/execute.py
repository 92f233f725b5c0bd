"""Runs the pipeline with `kfp.local`: `python -m pipelines.execute DIRECTORY SEGMENTS [IMPORT]...`.

Reads the pipeline's arguments from standard input as JSON. It is a process of its own because KFP
waits for its threads even when it is interrupted; a process can be killed with all its children.
"""

from __future__ import annotations

import json
import sys
import warnings

from kfp import local

from pipelines.bapo_pipeline import build_pipeline


def main() -> None:
    # KFP warns for every step that a custom base image is used.
    warnings.filterwarnings("ignore", category=RuntimeWarning, module="kfp.local")
    local.init(local.SubprocessRunner(use_venv=False), pipeline_root=sys.argv[1])
    try:
        build_pipeline(int(sys.argv[2]), frozenset(sys.argv[3:]))(**json.load(sys.stdin))
    except RuntimeError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
