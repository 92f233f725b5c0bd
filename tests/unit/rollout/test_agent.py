"""How an engine is started where something is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.rollout.server import compilerless


def test_without_a_compiler_vllm_compiles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert compilerless() == {"TORCHDYNAMO_DISABLE": "1"}
    (tmp_path / "g++").touch(mode=0o755)
    assert compilerless() == {}
    monkeypatch.setenv("CXX", "clang++")
    assert compilerless() == {"TORCHDYNAMO_DISABLE": "1"}
