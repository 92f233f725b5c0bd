"""The typed client of the verifier."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from services.common.http import HttpClient
from services.verifier.api.wire import (
    LONGEST_RESPONSE,
    ItemVerdict,
    VerifyAnswer,
    VerifyItem,
    VerifyRequest,
)

RESPONSES_AT_ONCE = 2_048
CHARACTERS_AT_ONCE = 8_000_000
"""A character takes at most 6 bytes as JSON, so this always fits in `LARGEST_BODY`."""
ANSWER_WITHIN_S = 900.0
"""Many responses that miss their deadline take a while; they must not be sent again meanwhile."""
BUSY_GIVE_UP_S = 600.0


class VerifierClient:
    """Scores responses. Verification is pure, so a call may be repeated."""

    def __init__(self, url: str, token: str) -> None:
        self._http = HttpClient(
            "verifier", url, token, timeout_s=ANSWER_WITHIN_S, busy_give_up_s=BUSY_GIVE_UP_S
        )

    def close(self) -> None:
        self._http.close()

    def verify(
        self, task: str, options: dict[str, Any], items: Sequence[VerifyItem]
    ) -> list[list[ItemVerdict]]:
        """A verdict for every response of every item, in requests of a size that is accepted."""
        verdicts: list[list[ItemVerdict]] = [[] for _ in items]
        for part in _parts(items):
            answer = self._send(
                VerifyRequest(task=task, options=options, items=[item for _, item in part])
            )
            for (index, _), scored in zip(part, answer.verdicts, strict=True):
                verdicts[index] += scored
        return verdicts

    def _send(self, request: VerifyRequest) -> VerifyAnswer:
        answer = self._http.call(
            "POST",
            "/v1/verify",
            content=request.model_dump_json(),
            headers={"Content-Type": "application/json"},
        )
        return VerifyAnswer.model_validate_json(answer.content)


def _parts(items: Sequence[VerifyItem]) -> Iterator[list[tuple[int, VerifyItem]]]:
    """(index, item) in parts of a sendable size; an item may be spread over several."""
    part: list[tuple[int, VerifyItem]] = []
    count = characters = 0
    for index, item in enumerate(items):
        for response in item.responses:
            # One character more than is read shows as well that it is too long.
            response = response[: LONGEST_RESPONSE + 1]
            full = characters + len(response) > CHARACTERS_AT_ONCE or count == RESPONSES_AT_ONCE
            if full and part:
                yield part
                part, count, characters = [], 0, 0
            if not part or part[-1][0] != index:
                part.append((index, VerifyItem(payload=item.payload, responses=[])))
            part[-1][1].responses.append(response)
            count, characters = count + 1, characters + len(response)
    if part:
        yield part
