"""Tests the services of a release as their client, for `helm test`; a failure names the remedy."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable

import httpx

log = logging.getLogger("check")

READY_WITHIN_S = float(os.environ.get("CHECK_READY_WITHIN_S", "120"))
CORRECT, INCORRECT = "<answer>3 * 4 * 7</answer>", "<answer>3 + 4 + 7</answer>"


class CheckFailed(Exception):
    """A check failed; the message names the cause and the remedy."""


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    buffer, verifier = os.environ["BAPO_BUFFER_URL"], os.environ["BAPO_VERIFIER_URL"]
    token = os.environ["BAPO_TOKEN"]
    try:
        await_ready("the buffer service", buffer, "its log, and whether it reaches Postgres and S3")
        check_token(buffer, token)
        await_ready("the verifier", verifier, "its log")
        check_verdicts(verifier, os.environ["BAPO_VERIFIER_TOKEN"])
    except CheckFailed as problem:
        log.error("FAILED  %s", problem)
        sys.exit(1)
    log.info("all checks passed")


def await_ready(service: str, url: str, look_at: str) -> None:
    """Waits until a service that has just been installed is ready."""
    deadline = time.monotonic() + READY_WITHIN_S
    while (problem := not_ready(url)) is not None:
        if time.monotonic() > deadline:
            raise CheckFailed(f"{service} at {url} is not ready: {problem}. Look at {look_at}")
        time.sleep(1)
    log.info("ok      %s is ready", service)


def not_ready(url: str) -> str | None:
    try:
        response = httpx.get(f"{url}/readyz", timeout=10)
    except httpx.TransportError as error:
        return f"no response ({error!r}); a network policy may block the connection"
    return None if response.is_success else f"{response.status_code} {response.text[:500]}"


def check_token(buffer: str, token: str) -> None:
    url = f"{buffer}/v1/token"
    expect(
        respond(lambda: httpx.get(url, headers=bearer(token), timeout=10)),
        200,
        "the buffer service refuses the release's token; its pods may be older than the Secret: "
        "restart them",
    )
    expect(
        respond(lambda: httpx.get(url, headers=bearer("wrong"), timeout=10)),
        401,
        "the buffer service accepts a wrong token; do not expose it",
    )
    log.info("ok      the token is accepted, a wrong one is refused")


def check_verdicts(verifier: str, token: str) -> None:
    body = {
        "task": "countdown",
        "items": [
            {"payload": {"nums": [3, 4, 7], "target": 84}, "responses": [CORRECT, INCORRECT]}
        ],
    }
    response = respond(
        lambda: httpx.post(f"{verifier}/v1/verify", json=body, headers=bearer(token), timeout=60)
    )
    expect(response, 200, "the verifier does not score; look at its log")
    rewards = [verdict["reward"] for verdict in response.json()["verdicts"][0]]
    if rewards != [1.0, 0.0]:
        raise CheckFailed(
            f"the verifier gave a correct and an incorrect response the rewards {rewards}, not "
            "[1.0, 0.0]: its image has another version than the chart, or its pods lack memory or "
            "CPU"
        )
    log.info("ok      the verifier rewards a correct response and not an incorrect one")


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def respond(request: Callable[[], httpx.Response]) -> httpx.Response:
    try:
        return request()
    except httpx.TransportError as error:
        raise CheckFailed(f"the connection broke ({error!r}); run the test again") from error


def expect(response: httpx.Response, status: int, message: str) -> None:
    """Raises `CheckFailed` with `message` when the status is another one."""
    if response.status_code != status:
        raise CheckFailed(f"{response.request.url} answered {response.status_code}: {message}")


if __name__ == "__main__":
    main()
