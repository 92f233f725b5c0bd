"""Runs a compiled pipeline with KFP's runner of containers: `python -m tests.images.pipeline FILE`.

It is a process of its own because KFP's choice of a runner is global.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from docker.types import Mount
from kfp import components, local


def main() -> None:
    request = json.loads(Path(sys.argv[1]).read_text())
    mounts = [Mount(**mount) for mount in request["mounts"]]
    local.init(
        local.DockerRunner(**request["container"], mounts=mounts), pipeline_root=request["root"]
    )
    try:
        components.load_component_from_file(request["package"])(**request["arguments"])
    except RuntimeError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
