"""Converts a language model from a GGUF file into a Hugging Face model directory.

Usage: `python -m tools.gguf FILE DIRECTORY`. It needs the package `gguf`, which bapo does
not depend on. `make real-lm` uses it for SmolLM2-135M-Instruct.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from bapo_core.errors import BapoError
from tools.model_directory import write_directory


def convert_gguf(file: Path, directory: Path) -> None:
    """Writes the model, tokenizer and chat template of a GGUF file to `directory`, all or none.

    The weights are float32, which represents the values of every quantised block exactly; bfloat16
    would round them. The end token of the tokenizer ends responses.

    Raises `BapoError` if the file or a package is missing, if the tokenizer has no end token, or if
    `directory` has files.
    """
    if not file.is_file():
        raise BapoError(f"{file} is not a file; give a GGUF file of a causal language model")
    source: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
    try:
        # Without `dequantize`, the weights stay quantised, and could be neither trained nor saved.
        model: Any = AutoModelForCausalLM.from_pretrained(
            file.parent,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
            trust_remote_code=False,
            **source,
        )
        tokenizer: Any = AutoTokenizer.from_pretrained(
            file.parent, trust_remote_code=False, **source
        )
    except (ImportError, OSError, ValueError) as error:
        raise BapoError(f"{file} cannot be converted: {error}") from error
    if tokenizer.eos_token_id is None:
        raise BapoError(f"{file} names no end token, so no response could ever end")
    tokenizer.model_max_length = model.config.max_position_embeddings
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    with write_directory(directory) as partial:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)


def main() -> None:
    """Runs the conversion that the arguments name."""
    if len(sys.argv) != 3:
        sys.exit("usage: python -m tools.gguf FILE DIRECTORY")
    try:
        convert_gguf(Path(sys.argv[1]), Path(sys.argv[2]))
    except BapoError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
