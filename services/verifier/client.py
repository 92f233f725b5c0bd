"""The typed client of the verifier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from services.common.http import HttpClient
from services.verifier.wire import ItemVerdict, VerifyAnswer, VerifyItem, VerifyRequest


class VerifierClient:
    """Scores responses. Verification is pure, so a call may be repeated."""

    def __init__(self, url: str, token: str) -> None:
        self._http = HttpClient("verifier", url, token)

    def close(self) -> None:
        self._http.close()

    def verify(
        self, task: str, options: dict[str, Any], items: Sequence[VerifyItem]
    ) -> list[list[ItemVerdict]]:
        """A verdict for every response of every item."""
        request = VerifyRequest(task=task, options=options, items=list(items))
        answer = self._http.call(
            "POST",
            "/v1/verify",
            content=request.model_dump_json(),
            headers={"Content-Type": "application/json"},
        )
        return VerifyAnswer.model_validate_json(answer.content).verdicts
