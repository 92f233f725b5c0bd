"""`python -m services.rollout.server`: an engine behind HTTP, loading the versions it is asked for.

A request names its policy version. If the engine serves another, the server fetches that version
from the weight store, checks every digest, loads it, and reports it; then it generates.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from pathlib import Path

from fastapi import Depends, FastAPI

from services.buffer.client import BufferClient
from services.common.auth import require_shared_token
from services.common.errors import install_problem_handlers
from services.common.logs import configure_logs
from services.common.objectstore import ObjectStore
from services.common.serve import serve
from services.common.settings import ObjectStoreSettings, require
from services.rollout.engine import Engine, GenerationRequest, SamplingParams
from services.rollout.wire import GenerateAnswer, GeneratedResponse, GenerateRequest

log = logging.getLogger(__name__)

WAIT_FOR_VERSION_S = 20.0


class VersionedEngine:
    """An engine and the weight store: generates with whatever published version is asked for."""

    def __init__(
        self, engine: Engine, buffer: BufferClient, store: ObjectStore, scratch: Path, name: str
    ) -> None:
        self._engine, self._buffer, self._store = engine, buffer, store
        self._scratch, self._name = scratch, name
        # One generation at a time: the engine's weights must not change under it.
        self._busy = threading.Lock()
        self._version = 0

    def generate(self, request: GenerateRequest) -> GenerateAnswer:
        sampling = SamplingParams(
            temperature=request.temperature,
            max_tokens=request.max_tokens,
            group_size=request.group_size,
        )
        prompts = [GenerationRequest(p.prompt_token_ids, p.seed) for p in request.prompts]
        with self._busy:
            self._ensure(request.policy_version)
            groups = self._engine.generate(prompts, sampling, policy_version=request.policy_version)
        return GenerateAnswer(
            policy_version=request.policy_version,
            groups=[
                [
                    GeneratedResponse(
                        token_ids=response.token_ids,
                        logprobs=response.logprobs,
                        finish_reason=response.finish_reason,
                    )
                    for response in group.responses
                ]
                for group in groups
            ],
        )

    def _ensure(self, version: int) -> None:
        """Loads `version` unless it is what the engine serves."""
        if self._version == version:
            return
        started = time.monotonic()
        stored = self._buffer.weights(version, wait=WAIT_FOR_VERSION_S)
        directory = self._scratch / f"v{version}-{stored.manifest_digest[:16]}"
        if not directory.exists():
            partial = self._scratch / "partial"
            shutil.rmtree(partial, ignore_errors=True)
            self._store.get_directory(stored.uri, stored.manifest_digest, partial)
            partial.rename(directory)
        self._version = 0
        self._engine.load(directory, version)
        self._version = version
        self._buffer.report_replica(self._name, version)
        self._prune(keep=directory)
        seconds = round(time.monotonic() - started, 3)
        log.info("weights loaded", extra={"version": version, "seconds": seconds})

    def _prune(self, keep: Path) -> None:
        """Keeps the version served and the one before it, to which an evaluation goes back."""
        found = sorted(self._scratch.glob("v*-*"), key=lambda path: path.stat().st_mtime)
        for old in found[:-2]:
            if old != keep:
                shutil.rmtree(old)


def create_app(engine: VersionedEngine, token: str) -> FastAPI:

    app = FastAPI(title="bapo rollout server", version="1")
    install_problem_handlers(app)

    @app.get("/health", tags=["health"])
    def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.post("/v1/generate", dependencies=[Depends(require_shared_token(token))])
    def generate(request: GenerateRequest) -> GenerateAnswer:
        return engine.generate(request)

    return app


def main() -> None:
    from services.rollout.transformers_engine import TransformersEngine

    configure_logs("rollout")
    token = require("BAPO_TOKEN")
    scratch = Path(require("BAPO_SCRATCH"))
    scratch.mkdir(parents=True, exist_ok=True)
    engine = VersionedEngine(
        TransformersEngine(),
        BufferClient(require("BAPO_BUFFER_URL"), token, run=require("BAPO_RUN")),
        ObjectStore(ObjectStoreSettings.from_environment()),
        scratch,
        os.environ.get("BAPO_REPLICA", "local"),
    )
    serve(create_app(engine, token))


if __name__ == "__main__":
    main()
