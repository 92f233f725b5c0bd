"""Starts vLLM, watches it, and stops it together with its workers.

On one node, vLLM is a server on a Unix socket. If the model is sharded over several nodes, that
server runs on the leader node, and a vLLM without an API server (headless) on each worker node.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from bapo_core.errors import BapoError
from services.common.files import OwnedDirectory
from services.common.process import ChildProcess, without_secrets
from services.model.vision import read_config
from services.rollout.errors import EngineLost, ModelLoadError
from services.rollout.vllm import headless, images, worker
from services.rollout.vllm.api import VllmApi
from services.rollout.vllm.weight_layout import has_recurrent_layers, reads_images, takes_images

log = logging.getLogger(__name__)

SUPPORTED = ("0.32.",)
"""Prefixes of the vLLM versions whose routes and flags the contract tests have covered."""
SOCKETS_PREFIX = "bapo-vllm-"
"""Prefix of the directories of Unix sockets, whose paths have at most 107 characters: a scratch
directory may exceed that."""
API_SOCKET = "api.sock"
"""Name of the socket of vLLM's server, in a temporary directory of its own."""
STOP_WITHIN_S = 10.0
COMPILE_WITHIN_S = 60.0
"""Seconds for the trial of the C++ compiler, which takes less than one on an idle machine."""
WORKER_MODULE = "bapo_vllm_worker"
"""Name under which vLLM's workers import `services.rollout.vllm.worker`."""
HEADLESS_MODULE = "bapo_vllm_headless"
"""Name under which vLLM's interpreter runs `services.rollout.vllm.headless`."""
IMAGES_MODULE = "bapo_vllm_images"
"""Name under which vLLM's server imports `services.rollout.vllm.images`."""
IMAGE_ARGUMENTS = (
    *("--limit-mm-per-prompt", '{"video": 0}'),
    # Pixels arrive with each request, as the trainer has them: normalised.
    *("--mm-processor-cache-gb", "0"),
    "--no-mm-device-do-normalize",
)
"""Arguments for a model that reads images."""

_EXCEPTION = re.compile(r"\b\w*Error: \S")
"""The last line of a traceback; the server logs further errors when the engine has raised it."""
MIDDLEWARE = f"{IMAGES_MODULE}.{images.TakesImages.__name__}"


@dataclass(frozen=True)
class NodePlace:
    """The place of a node among those over which vLLM shards the model."""

    rank: int
    """Rank of the node; the leader has rank 0."""
    nodes: int
    """Number of nodes."""
    leader_host: str
    """Host at which the nodes reach the leader."""
    leader_port: int
    """Port at which the ranks meet."""

    def arguments(self) -> list[str]:
        """Returns vLLM's arguments."""
        return [
            *("--distributed-executor-backend", "mp"),
            *("--nnodes", str(self.nodes)),
            *("--node-rank", str(self.rank)),
            *("--master-addr", self.leader_host),
            *("--master-port", str(self.leader_port)),
        ]


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
    """Further arguments of vLLM, after those of this class."""
    recurrent_arguments: Sequence[str] = ()
    """Further arguments for a model with recurrent layers."""
    environment: dict[str, str] = field(default_factory=dict)
    """Further environment variables."""
    start_within_s: float = 2700.0
    """Seconds that the server may take to start."""

    @property
    def module_directory(self) -> Path:
        """Directory for vLLM's import path; it has the files of `install_modules` only."""
        return self.log.parent / "vllm-modules"

    def install_modules(self) -> None:
        """Copies what runs in vLLM's environment into `module_directory`.

        vLLM's environment has packages of its own. With the directory of this project on its import
        path, this environment's packages (where bapo is installed as a wheel: all of site-packages,
        torch included) would shadow vLLM's.
        """
        self.module_directory.mkdir(exist_ok=True)
        modules = {WORKER_MODULE: worker, HEADLESS_MODULE: headless, IMAGES_MODULE: images}
        for name, module in modules.items():
            shutil.copyfile(inspect.getfile(module), self.module_directory / f"{name}.py")

    def command(self, directory: Path, socket: Path, place: NodePlace | None = None) -> list[str]:
        """Returns the command that serves the model in `directory`.

        socket: Unix socket to listen on.
        place: that of the leader node if the model is sharded over several nodes.
        """
        return [
            self.python,
            # The `vllm` script of the CPU wheel does not start.
            *("-m", "vllm.entrypoints.openai.api_server"),
            *("--uds", str(socket)),
            *([] if place is None else place.arguments()),
            *(["--middleware", MIDDLEWARE] if takes_images(read_config(directory)) else []),
            *self._model_arguments(directory),
        ]

    def headless_command(self, directory: Path, place: NodePlace) -> list[str]:
        """Returns the command of a worker node, whose model is in its own `directory`."""
        return [
            self.python,
            *("-m", HEADLESS_MODULE),
            "--headless",
            *place.arguments(),
            *self._model_arguments(directory),
        ]

    def _model_arguments(self, directory: Path) -> list[str]:
        """Returns the arguments that all nodes have in common, but for the directory."""
        config = read_config(directory)
        return [
            *("--model", str(directory)),
            *("--served-model-name", "policy"),
            *("--max-model-len", str(self.longest_sequence)),
            *("--dtype", self.dtype),
            # Log-probs of the distribution that is sampled from: after the temperature.
            *("--logprobs-mode", "processed_logprobs"),
            # A model's generation_config.json must not bring its own top-k and top-p.
            *("--generation-config", "vllm"),
            # Token ids in, token ids out. The processor of images contains the tokenizer.
            *(IMAGE_ARGUMENTS if reads_images(config) else ["--skip-tokenizer-init"]),
            "--enable-scale-out",
            *("--worker-extension-cls", f"{WORKER_MODULE}.{worker.LoadsPolicies.__name__}"),
            *(self.recurrent_arguments if has_recurrent_layers(config) else []),
            *self.arguments,
        ]

    def variables(self) -> dict[str, str]:
        """Returns vLLM's environment.

        It is this process's without secrets, and without its import path, which belongs to another
        environment.
        """
        inherited = without_secrets(os.environ)
        inherited.pop("PYTHONPATH", None)
        return {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            **inherited,
            "PYTHONPATH": str(self.module_directory),
            worker.WEIGHTS_ROOT: str(self.log.parent.absolute()),
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


def compiler_environment() -> dict[str, str]:
    """Returns variables that turn torch.compile off where no C++ compiler works.

    On CPUs torch.compile needs one, and slim images have none. Others have `g++` without the
    compiler proper (`cc1plus`) or without headers, so it is tried.
    """
    compiler = os.environ.get("CXX", "g++")
    try:
        trial = subprocess.run(
            [*shlex.split(compiler), "-fsyntax-only", "-x", "c++", "-"],
            input="#include <vector>\n",
            capture_output=True,
            text=True,
            timeout=COMPILE_WITHIN_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = str(error)
    else:
        if trial.returncode == 0:
            return {}
        problem = trial.stderr.strip().partition("\n")[0]
    log.info("no C++ compiler works (%s: %s): vLLM runs without torch.compile", compiler, problem)
    return {"TORCHDYNAMO_DISABLE": "1"}


class VllmProcess:
    """A process of vLLM. It is started once and not reused after `stop`."""

    def __init__(
        self, options: VllmOptions, command: Sequence[str], sockets: OwnedDirectory
    ) -> None:
        """Starts `command`; call it from the main thread.

        sockets: directory of the Unix sockets. It is removed by `stop`.
        """
        self._options = options
        self._sockets = sockets
        options.install_modules()
        self._log_start = options.log.stat().st_size if options.log.exists() else 0
        """Length of what earlier processes have written to the log."""
        self._process = ChildProcess(
            command,
            environment={**options.variables(), "VLLM_RPC_BASE_PATH": str(sockets.path)},
            log=options.log,
            append_log=True,
            working_directory=options.log.parent,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def running(self) -> bool:
        return self._process.exit_code is None

    async def stop(self) -> None:
        """Asks vLLM and its workers to stop, and kills them after `STOP_WITHIN_S`."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self._process.wait, STOP_WITHIN_S)
        # Workers may outlive the process that started them.
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        await asyncio.to_thread(self._process.wait)
        self._sockets.remove()

    def last_error(self) -> str:
        """Returns the last error in the log that is not the consequence of another."""
        with self._options.log.open("rb") as log:
            log.seek(self._log_start)
            lines = log.read().decode(errors="replace").splitlines()
        errors = [line for line in lines if "Error" in line and "See " not in line]
        exceptions = [line for line in errors if _EXCEPTION.search(line)]
        line = (exceptions or errors or lines or ["it wrote nothing"])[-1].strip()
        return f"{line[-300:]} (log: {self._options.log})"


class VllmServer(VllmProcess):
    """A vLLM server and its API."""

    def __init__(
        self, options: VllmOptions, directory: Path, place: NodePlace | None = None
    ) -> None:
        """Starts vLLM on the model in `directory`; call it from the main thread.

        place: that of the leader node if the model is sharded over several nodes.
        """
        sockets = OwnedDirectory(SOCKETS_PREFIX)
        socket = sockets.path / API_SOCKET
        self.api = VllmApi(socket)
        super().__init__(options, options.command(directory, socket, place), sockets)

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
        await self.api.close()
        await super().stop()
