"""Measures cases of one part in this process.

python -m benchmarks.gpu.child PART SIZE FILE COMMIT DIGEST [CASE ...]
"""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.record import CasesFailed, Record, Size


def measure_part(
    part: str, size: Size, path: Path, commit: str, digest: str = "", cases: Sequence[str] = ()
) -> None:
    """Measures a part and writes its record to the file `path`, also when the part fails."""
    record = Record.after(path, part, size, commit, digest, cases)
    record.start(_device())
    try:
        module: Any = importlib.import_module(f"benchmarks.gpu.{part}")
        module.measure(record)
    except CasesFailed as error:
        record.finish("failed", str(error))
        raise
    except BaseException:
        record.finish("failed", traceback.format_exc())
        raise
    record.finish("done")


def main() -> None:
    part, size, path, commit, digest, *cases = sys.argv[1:]
    measure_part(part, size, Path(path), commit, digest, cases)  # type: ignore[arg-type]


def _device() -> str:
    """Returns the name of the GPU, or `cpu`."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


if __name__ == "__main__":
    main()
