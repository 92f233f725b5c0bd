"""Makes torchvision of PyPI importable beside a CPU build of torch, in the environment of vLLM.

    python mend_torchvision.py

Without a CUDA build of torch, the compiled part of torchvision does not load, and its import fails
where it describes two operators of that part. transformers imports torchvision for the processors
of image-text models, though it uses none of the operators. This declares the two.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

BEGIN = "# Declared by bapo, because the compiled part does not load beside a CPU build of torch.\n"
DECLARATION = f"""

{BEGIN}if not _has_ops():
    _operators = torch.library.Library("torchvision", "DEF")
    _operators.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _operators.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


def main() -> None:
    """Declares the operators once, however often this is run."""
    package = find_spec("torchvision")
    if package is None or package.origin is None:
        sys.exit("torchvision is not installed in this environment; run `make install-vllm`")
    extension = Path(package.origin).parent / "extension.py"
    text = extension.read_text()
    if BEGIN not in text:
        extension.write_text(text + DECLARATION)


if __name__ == "__main__":
    main()
