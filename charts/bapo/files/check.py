"""`helm test`: uses the services as a client does. Fails with what to do about it."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable

import httpx

log = logging.getLogger("check")

READY_WITHIN_S = float(os.environ.get("CHECK_READY_WITHIN_S", "120"))
RIGHT, WRONG = "<answer>3 * 4 * 7</answer>", "<answer>3 + 4 + 7</answer>"


class Failed(Exception):
    """What is wrong, and what to do."""


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    buffer, verifier = os.environ["BAPO_BUFFER_URL"], os.environ["BAPO_VERIFIER_URL"]
    token = os.environ["BAPO_TOKEN"]
    try:
        await_ready("the buffer service", buffer, "its logs, and its way to Postgres and S3")
        check_token(buffer, token)
        await_ready("the verifier", verifier, "its logs")
        check_verdicts(verifier, token)
    except Failed as problem:
        log.error("FAILED  %s", problem)
        sys.exit(1)
    log.info("all is well")


def await_ready(who: str, url: str, look_at: str) -> None:
    """A service that has just been installed may be starting."""
    deadline = time.monotonic() + READY_WITHIN_S
    while (problem := not_ready(url)) is not None:
        if time.monotonic() > deadline:
            raise Failed(f"{who} at {url} is not ready: {problem}. Look at {look_at}")
        time.sleep(1)
    log.info("ok      %s is ready", who)


def not_ready(url: str) -> str | None:
    try:
        answer = httpx.get(f"{url}/readyz", timeout=10)
    except httpx.TransportError as error:
        return f"no answer ({error!r}); a network policy may be in the way"
    return None if answer.is_success else f"{answer.status_code} {answer.text[:500]}"


def check_token(buffer: str, token: str) -> None:
    url = f"{buffer}/v1/token"
    expect(
        answered(lambda: httpx.get(url, headers=bearer(token), timeout=10)),
        200,
        "the buffer service refuses the release's token: its pods may be older than the Secret, "
        "restart them",
    )
    expect(
        answered(lambda: httpx.get(url, headers=bearer("wrong"), timeout=10)),
        401,
        "the buffer service lets a wrong token in: expose it to nobody",
    )
    log.info("ok      the token is accepted, a wrong one is refused")


def check_verdicts(verifier: str, token: str) -> None:
    body = {
        "task": "countdown",
        "items": [{"payload": {"nums": [3, 4, 7], "target": 84}, "responses": [RIGHT, WRONG]}],
    }
    answer = answered(
        lambda: httpx.post(f"{verifier}/v1/verify", json=body, headers=bearer(token), timeout=60)
    )
    expect(answer, 200, "the verifier does not score: look at its logs")
    rewards = [each["reward"] for each in answer.json()["verdicts"][0]]
    if rewards != [1.0, 0.0]:
        raise Failed(
            f"the verifier gave the rewards {rewards} to a right and a wrong answer: its image is "
            "of another version than the chart, or its pods lack memory or CPU"
        )
    log.info("ok      the verifier rewards a right answer and not a wrong one")


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def answered(ask: Callable[[], httpx.Response]) -> httpx.Response:
    try:
        return ask()
    except httpx.TransportError as error:
        raise Failed(f"the connection broke ({error!r}): run the test again") from error


def expect(answer: httpx.Response, status: int, otherwise: str) -> None:
    if answer.status_code != status:
        raise Failed(f"{answer.request.url} answered {answer.status_code}: {otherwise}")


if __name__ == "__main__":
    main()
