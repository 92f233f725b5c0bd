"""Reads data sets of the hub in a process with its own environment, as a pod would.

Each line of standard input is a JSON object: `address`, `limit`, and `environment` to change. The
answer is a line with the `prompts` and their `name`, or with the `error`. The task is `math`, with
the columns of `COLUMNS`, unless `task` names another.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from bapo_core.errors import BapoError
from bapo_core.tasks import get_task
from services.datasets import DataSources, pin_address, read_dataset
from services.datasets.hub import pin_revision

COLUMNS = {
    "math": {"problem": "question", "answer": "solution"},
    "function": {"prompt": "question"},
}


def main() -> None:
    sources = DataSources(Path(sys.argv[1]))
    for line in sys.stdin:
        request = json.loads(line)
        for name, value in request["environment"].items():
            os.environ[name] = value
        pin_revision.cache_clear()
        try:
            address = pin_address(request["address"])
            task = get_task(request.get("task", "math"))
            columns = COLUMNS.get(task.name, {})
            dataset = read_dataset(task, address, sources, columns, request["limit"])
            prompts = [prompt.payload for prompt in dataset.prompts]
            answer = {"address": address, "prompts": prompts, "name": dataset.name}
        except BapoError as error:
            answer = {"error": str(error)}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
