"""`bapo model tiny` prints the directory of a bundled model."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from services.cli.main import bapo
from services.model.resolve import BUNDLED_MODELS


@pytest.mark.parametrize("name", BUNDLED_MODELS)
def test_a_flag_names_a_model(name: str) -> None:
    flags = [f"--{part}" for part in name.split("-")[1:]]
    result = CliRunner().invoke(bapo, ["model", "tiny", *flags])
    assert result.exit_code == 0
    directory = Path(result.output.strip())
    assert directory == BUNDLED_MODELS[name]
    assert (directory / "model.safetensors").is_file()


def test_two_models_at_once_are_refused_with_the_flags() -> None:
    result = CliRunner().invoke(bapo, ["model", "tiny", "--sorting", "--distinct"])
    assert result.exit_code == 2
    assert "--sorting, --distinct are different models; give one of them" in result.output
