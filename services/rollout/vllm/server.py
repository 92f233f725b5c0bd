"""A vLLM server of our own: started on loopback, watched, ended with everything it started."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from bapo_core.errors import BapoError
from services.common.process import end_with_parent
from services.rollout.driver import EngineLost
from services.rollout.engine import ModelLoadError
from services.rollout.vllm.api import VllmApi

SUPPORTED = ("0.32.",)
"""Versions of vLLM whose routes and flags the contract tests have seen."""
STOP_WITHIN_S = 10.0
_ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class VllmOptions:
    """How to start vLLM. `python` is the interpreter of the environment that has it."""

    python: str
    longest_sequence: int
    """Tokens of prompt and response together."""
    dtype: str
    log: Path
    start_within_s: float = 2700.0
    """Seconds that the server may take to start."""
    arguments: Sequence[str] = ()
    """More of vLLM's own, after ours."""
    environment: dict[str, str] = field(default_factory=dict)

    def command(self, directory: Path, port: int) -> list[str]:
        return [
            self.python,
            # The `vllm` script of the CPU wheel does not start.
            *("-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(directory)),
            *("--served-model-name", "policy"),
            *("--host", "127.0.0.1"),
            *("--port", str(port)),
            *("--max-model-len", str(self.longest_sequence)),
            *("--dtype", self.dtype),
            # Log-probs of what was sampled from: after the temperature.
            *("--logprobs-mode", "processed_logprobs"),
            # A model's generation_config.json must not bring its own top-k and top-p.
            *("--generation-config", "vllm"),
            # Tokens in, tokens out.
            "--skip-tokenizer-init",
            "--enable-scale-out",
            *("--worker-extension-cls", "services.rollout.vllm.worker.LoadsPolicies"),
            *self.arguments,
        ]

    def variables(self) -> dict[str, str]:
        """Ours without BAPO_ variables, which hold secrets."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("BAPO_")}
        path = [str(_ROOT), *filter(None, [kept.get("PYTHONPATH")])]
        return {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            **kept,
            "PYTHONPATH": os.pathsep.join(path),
            # The routes that load weights.
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            **self.environment,
        }


def find_python(override: str | None = None) -> str:
    """Returns the interpreter that has vLLM.

    It is `override` (`BAPO_VLLM_PYTHON`) if given, else the one of `.venv-vllm` beside this
    environment, where `make install-vllm` puts it, else this interpreter.
    """
    if override is not None:
        return override
    beside = Path(sys.prefix).parent / ".venv-vllm" / "bin" / "python"
    return str(beside) if beside.exists() else sys.executable


def installed(python: str) -> tuple[str, str]:
    """(distribution, version) of the vLLM that `python` has.

    Raises `BapoError` if it has none, or one unknown to us.
    """
    code = (
        "from importlib.metadata import distributions as found\n"
        "names = ('vllm', 'vllm-cpu')\n"
        "print(*[f'{d.name} {d.version}' for d in found() if d.name in names][:1])"
    )
    found = subprocess.run([python, "-c", code], capture_output=True, text=True)
    name, _, version = found.stdout.strip().partition(" ")
    if not version:
        raise BapoError(
            f"{python} has no vLLM; run `make install-vllm`, or set BAPO_VLLM_PYTHON to an "
            "interpreter that has it, or set rollout.engine to transformers"
        )
    if not version.startswith(SUPPORTED):
        raise BapoError(
            f"vLLM {version} ({python}) is not supported: its routes may differ from those of "
            f"{', '.join(each + '*' for each in SUPPORTED)}; install one of these"
        )
    return name, version


class VllmServer:
    """One process and its API. Started once, and not used again after it was stopped."""

    def __init__(self, options: VllmOptions, directory: Path) -> None:
        self._options = options
        port = _free_port()
        self.api = VllmApi(port)
        with options.log.open("ab") as log:
            self._process = subprocess.Popen(
                options.command(directory, port),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=options.variables(),
                cwd=options.log.parent,
                # With its workers it is one group, which can be killed as a whole.
                start_new_session=True,
                preexec_fn=end_with_parent,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def alive(self) -> bool:
        return self._process.poll() is None

    async def ready(self) -> None:
        """Returns once it answers. Raises `ModelLoadError` if it ends before that."""
        within_s = self._options.start_within_s
        deadline = time.monotonic() + within_s
        while not await self.api.healthy():
            if not self.alive():
                raise ModelLoadError(f"vLLM does not start: {self.last_words()}")
            if time.monotonic() > deadline:
                raise EngineLost(
                    f"vLLM was not ready in {within_s:.0f} s (BAPO_VLLM_START_WITHIN_S); "
                    f"see {self._options.log}"
                )
            await asyncio.sleep(0.1)

    async def stop(self) -> None:
        """Ends it and its workers, by force if need be."""
        await self.api.close()
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self._process.wait, STOP_WITHIN_S)
        # Workers may outlive the server.
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        await asyncio.to_thread(self._process.wait)

    def last_words(self) -> str:
        """The last error in its log that is not the consequence of another."""
        lines = self._options.log.read_text(errors="replace").splitlines()
        errors = [line for line in lines if "Error" in line and "See " not in line]
        said = (errors or lines or ["it said nothing"])[-1].strip()
        return f"{said[-300:]} (log: {self._options.log})"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
