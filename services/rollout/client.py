"""The typed client of a rollout server."""

from __future__ import annotations

from services.common.http import HttpClient
from services.rollout.wire import GenerateAnswer, GenerateRequest

LONGEST_GENERATION_S = 3600.0


class RolloutClient:
    """Generates. The same request gives the same answer, so a call may be repeated."""

    def __init__(self, url: str, token: str) -> None:
        self._http = HttpClient("rollout engine", url, token, timeout_s=LONGEST_GENERATION_S)

    def close(self) -> None:
        self._http.close()

    def generate(self, request: GenerateRequest) -> GenerateAnswer:
        answer = self._http.call(
            "POST",
            "/v1/generate",
            content=request.model_dump_json(),
            headers={"Content-Type": "application/json"},
        )
        return GenerateAnswer.model_validate_json(answer.content)
