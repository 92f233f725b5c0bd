"""`python -m services.verifier.app`: the verifier on a port. Stateless."""

from __future__ import annotations

import os
from contextlib import asynccontextmanager

from fastapi import Depends, FastAPI, Response
from prometheus_client import CONTENT_TYPE_LATEST, Counter, generate_latest

from bapo_core.tasks import get_task
from services.common.auth import require_shared_token
from services.common.errors import bad_request, install_problem_handlers
from services.common.logs import configure_logs
from services.common.serve import serve
from services.common.settings import require
from services.verifier.pool import VerifierPool
from services.verifier.wire import VerifyAnswer, VerifyRequest

VERDICTS = Counter("bapo_verdicts", "Responses scored", ["task", "status"])
WORKERS = max(1, (os.cpu_count() or 2) // 2)
DEADLINE_S = 5.0


def create_app(token: str, *, workers: int = WORKERS, deadline_s: float = DEADLINE_S) -> FastAPI:
    """The verifier with its own pool of processes."""

    @asynccontextmanager
    async def lifespan(app: FastAPI):  # type: ignore[no-untyped-def]
        app.state.pool = VerifierPool(workers, deadline_s)
        yield
        app.state.pool.close()

    app = FastAPI(title="bapo verifier", version="1", lifespan=lifespan)
    install_problem_handlers(app)

    @app.get("/health", tags=["health"])
    def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/metrics", tags=["health"])
    def metrics() -> Response:
        return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)

    @app.post("/v1/verify", tags=["verify"], dependencies=[Depends(require_shared_token(token))])
    def verify(request: VerifyRequest) -> VerifyAnswer:
        """A verdict for every response; a response that cannot be scored gets reward 0."""
        try:
            get_task(request.task, **request.options)
        except ValueError as error:
            raise bad_request(str(error)) from error
        work = [(item.payload, response) for item in request.items for response in item.responses]
        pool: VerifierPool = app.state.pool
        flat = iter(pool.verify(request.task, request.options, work))
        verdicts = [[next(flat) for _ in item.responses] for item in request.items]
        for item in verdicts:
            for verdict in item:
                VERDICTS.labels(request.task, verdict.status).inc()
        return VerifyAnswer(verdicts=verdicts)

    return app


def main() -> None:
    configure_logs("verifier")
    serve(create_app(require("BAPO_TOKEN")))


if __name__ == "__main__":
    main()
