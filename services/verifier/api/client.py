"""The typed client of the verifier."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from bapo_core.outcomes import has_answer
from services.common.errors import ServiceUnavailable
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
"""A character takes at most 6 bytes as JSON, so a request always fits in `LARGEST_BODY`."""
REQUEST_TIMEOUT_S = 900.0
"""Long enough for a request full of responses that miss their deadline: to repeat it earlier would
only add to the load."""
LOST_TRIES = 5
LOST_WAIT_S = 2.0
"""Times that a response whose workers are lost is scored, and the seconds in between."""
BUSY_GIVE_UP_S = 600.0
"""Seconds for which a verifier may answer that its queue is full before the call fails."""


class VerifierClient:
    """Scores responses. Verification has no side effects, so failed calls are repeated."""

    def __init__(self, url: str, token: str) -> None:
        self.repeated: Counter[tuple[int, int]] = Counter()
        """How often the latest call scored a response again, by (item, response)."""
        self._http = HttpClient(
            "verifier", url, token, timeout_s=REQUEST_TIMEOUT_S, busy_give_up_s=BUSY_GIVE_UP_S
        )

    def close(self) -> None:
        self._http.close()

    def verify(
        self, task: str, options: dict[str, Any], items: Sequence[VerifyItem]
    ) -> list[list[ItemVerdict]]:
        """Returns the verdicts on each item's responses, in order.

        Sends several requests when the responses do not fit in one.

        A response whose workers were lost through no fault of its own is scored again.

        Raises `ServiceError` if the verifier refuses the task, its options or an item, and
        `ServiceUnavailable` if it does not answer for long, or loses its workers every time.
        """
        verdicts = self._verify_once(task, options, items)
        self.repeated.clear()
        for tries in range(1, LOST_TRIES + 1):
            lost = [
                (item, index)
                for item, of_item in enumerate(verdicts)
                for index, verdict in enumerate(of_item)
                if not has_answer(verdict.outcome)
            ]
            if not lost:
                return verdicts
            if tries == LOST_TRIES:
                break
            time.sleep(LOST_WAIT_S)
            again = [
                VerifyItem(payload=items[item].payload, responses=[items[item].responses[index]])
                for item, index in lost
            ]
            for (item, index), (verdict,) in zip(
                lost, self._verify_once(task, options, again), strict=True
            ):
                verdicts[item][index] = verdict
                self.repeated[item, index] += 1
        raise ServiceUnavailable(
            f"the verifier lost its workers {LOST_TRIES} times before they scored {len(lost)} "
            "responses, which are not the cause; see its log, and give it more memory"
        )

    def _verify_once(
        self, task: str, options: dict[str, Any], items: Sequence[VerifyItem]
    ) -> list[list[ItemVerdict]]:
        verdicts: list[list[ItemVerdict]] = [[] for _ in items]
        for chunk in _split(items):
            answer = self._send(
                VerifyRequest(task=task, options=options, items=[item for _, item in chunk])
            )
            for (index, _), item_verdicts in zip(chunk, answer.verdicts, strict=True):
                verdicts[index] += item_verdicts
        return verdicts

    def _send(self, request: VerifyRequest) -> VerifyAnswer:
        answer = self._http.call(
            "POST",
            "/v1/verify",
            content=request.model_dump_json(),
            headers={"Content-Type": "application/json"},
        )
        return VerifyAnswer.model_validate_json(answer.content)


def _split(items: Sequence[VerifyItem]) -> Iterator[list[tuple[int, VerifyItem]]]:
    """Splits items into chunks of (index, item) that fit in a request.

    The responses of one item may be spread over several chunks.
    """
    chunk: list[tuple[int, VerifyItem]] = []
    count = characters = 0
    for index, item in enumerate(items):
        for response in item.responses:
            # One character above the limit is enough for the status `too_large`.
            response = response[: LONGEST_RESPONSE + 1]
            full = characters + len(response) > CHARACTERS_AT_ONCE or count == RESPONSES_AT_ONCE
            if full and chunk:
                yield chunk
                chunk, count, characters = [], 0, 0
            if not chunk or chunk[-1][0] != index:
                chunk.append((index, VerifyItem(payload=item.payload, responses=[])))
            chunk[-1][1].responses.append(response)
            count, characters = count + 1, characters + len(response)
    if chunk:
        yield chunk
