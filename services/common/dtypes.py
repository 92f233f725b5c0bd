"""Names of dtypes: PyTorch's, and those in the headers of safetensors files.

Imports no PyTorch, because not every reader of model files has it.
"""

from __future__ import annotations

SAFETENSORS_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
"""Maps PyTorch's name of a dtype, without `torch.`, to that of safetensors."""
TORCH_DTYPES = {safetensors: torch for torch, safetensors in SAFETENSORS_DTYPES.items()}
"""Maps the name of a dtype in safetensors to PyTorch's, without `torch.`."""
