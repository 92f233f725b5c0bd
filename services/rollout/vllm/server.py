"""Starts a vLLM server on loopback, watches it, and stops it together with its workers."""

from __future__ import annotations

import asyncio
import os
import shutil
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
from services.common.process import ChildProcess
from services.rollout.errors import EngineLost, ModelLoadError
from services.rollout.vllm import worker
from services.rollout.vllm.api import VllmApi

SUPPORTED = ("0.32.",)
"""Prefixes of the vLLM versions whose routes and flags the contract tests have covered."""
STOP_WITHIN_S = 10.0
WORKER_MODULE = "bapo_vllm_worker"
"""Name under which vLLM's workers import `services.rollout.vllm.worker`."""


@dataclass(frozen=True)
class VllmOptions:
    """Everything needed to start vLLM."""

    python: str
    """Interpreter of the environment that has vLLM."""
    longest_sequence: int
    """Maximum number of tokens of prompt and response together."""
    dtype: str
    """Data type of the weights."""
    log: Path
    """File that vLLM's output is appended to. The worker extension is put beside it."""
    arguments: Sequence[str] = ()
    """Further arguments of vLLM, after those of `command`."""
    environment: dict[str, str] = field(default_factory=dict)
    """Further environment variables."""
    start_within_s: float = 2700.0
    """Seconds that the server may take to start."""

    @property
    def module_directory(self) -> Path:
        """Directory of modules for vLLM's import path; it has the worker extension only."""
        return self.log.parent / "vllm-modules"

    def install_worker(self) -> None:
        """Copies the worker extension into `module_directory`.

        vLLM's environment has packages of its own. With the directory of this project on its import
        path, this environment's packages (where bapo is installed as a wheel: all of site-packages,
        torch included) would shadow vLLM's.
        """
        self.module_directory.mkdir(exist_ok=True)
        shutil.copyfile(worker.__file__, self.module_directory / f"{WORKER_MODULE}.py")

    def command(self, directory: Path, port: int) -> list[str]:
        """Returns the command that serves the model in `directory`."""
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
            # Log-probs of the distribution that is sampled from: after the temperature.
            *("--logprobs-mode", "processed_logprobs"),
            # A model's generation_config.json must not bring its own top-k and top-p.
            *("--generation-config", "vllm"),
            # Token ids in, token ids out.
            "--skip-tokenizer-init",
            "--enable-scale-out",
            *("--worker-extension-cls", f"{WORKER_MODULE}.{worker.LoadsPolicies.__name__}"),
            *self.arguments,
        ]

    def variables(self) -> dict[str, str]:
        """Returns vLLM's environment.

        It is this process's without `BAPO_` variables, which hold secrets, and without its import
        path, which belongs to another environment.
        """
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("BAPO_") and name != "PYTHONPATH"
        }
        return {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            **inherited,
            "PYTHONPATH": str(self.module_directory),
            # Enables the routes that load weights.
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
    """Returns (distribution, version) of the vLLM in the environment of `python`.

    Raises `BapoError` if it has none, or an unsupported version.
    """
    code = (
        "from importlib.metadata import distributions\n"
        "names = ('vllm', 'vllm-cpu')\n"
        "print(*[f'{d.name} {d.version}' for d in distributions() if d.name in names][:1])"
    )
    process = subprocess.run([python, "-c", code], capture_output=True, text=True)
    name, _, version = process.stdout.strip().partition(" ")
    if not version:
        raise BapoError(
            f"{python} has no vLLM; run `make install-vllm`, or set BAPO_VLLM_PYTHON to an "
            "interpreter that has it, or set rollout.engine to transformers"
        )
    if not version.startswith(SUPPORTED):
        raise BapoError(
            f"vLLM {version} ({python}) is not supported, because its routes may differ; install "
            f"{' or '.join(prefix + '*' for prefix in SUPPORTED)}"
        )
    return name, version


class VllmServer:
    """A vLLM server process and its API. It is started once and not reused after `stop`."""

    def __init__(self, options: VllmOptions, directory: Path) -> None:
        """Starts vLLM on the model in `directory`; call it from the main thread."""
        self._options = options
        options.install_worker()
        port = _free_port()
        self.api = VllmApi(port)
        self._process = ChildProcess(
            options.command(directory, port),
            environment=options.variables(),
            log=options.log,
            append_log=True,
            working_directory=options.log.parent,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def running(self) -> bool:
        return self._process.exit_code is None

    async def wait_ready(self) -> None:
        """Waits until the server answers.

        Raises `ModelLoadError` if it exits before that, and `EngineLost` after `start_within_s`.
        """
        within_s = self._options.start_within_s
        deadline = time.monotonic() + within_s
        while not await self.api.healthy():
            if not self.running():
                raise ModelLoadError(f"vLLM does not start: {self.last_error()}")
            if time.monotonic() > deadline:
                raise EngineLost(
                    f"vLLM was not ready within {within_s:.0f} s; see {self._options.log}, or "
                    "raise BAPO_VLLM_START_WITHIN_S"
                )
            await asyncio.sleep(0.1)

    async def stop(self) -> None:
        """Asks the server and its workers to stop, and kills them after `STOP_WITHIN_S`."""
        await self.api.close()
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self._process.wait, STOP_WITHIN_S)
        # Workers may outlive the server.
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        await asyncio.to_thread(self._process.wait)

    def last_error(self) -> str:
        """Returns the last error in the log that is not the consequence of another."""
        lines = self._options.log.read_text(errors="replace").splitlines()
        errors = [line for line in lines if "Error" in line and "See " not in line]
        line = (errors or lines or ["it wrote nothing"])[-1].strip()
        return f"{line[-300:]} (log: {self._options.log})"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
