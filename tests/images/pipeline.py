"""`python -m tests.images.pipeline FILE`: a compiled pipeline by KFP's runner of containers.

A process of its own, because KFP keeps how it runs things for good.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from docker.types import Mount
from kfp import components, local


def main() -> None:
    asked = json.loads(Path(sys.argv[1]).read_text())
    mounts = [Mount(**each) for each in asked["mounts"]]
    local.init(local.DockerRunner(**asked["container"], mounts=mounts), pipeline_root=asked["root"])
    try:
        components.load_component_from_file(asked["package"])(**asked["arguments"])
    except RuntimeError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
