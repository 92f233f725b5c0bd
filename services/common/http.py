"""One HTTP client for all our services: retries what may be repeated, explains what fails."""

from __future__ import annotations

import time
from typing import Any

import httpx

from services.common.errors import ServiceError, ServiceUnavailable, Superseded

GIVE_UP_AFTER_S = 20.0
"""A service that is being restarted is back sooner; one that is lost must not hang a run."""


class HttpClient:
    """Calls to one service. Every call must be idempotent, because it may be sent twice."""

    def __init__(self, service: str, url: str, token: str, *, timeout_s: float = 60.0) -> None:
        self.service, self.url = service, url
        self._client = httpx.Client(
            base_url=url,
            headers={"Authorization": f"Bearer {token}"},
            timeout=httpx.Timeout(timeout_s, connect=5.0),
        )

    def close(self) -> None:
        self._client.close()

    def call(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        """The answer, or an error that says which service refused what and why.

        Raises `ServiceUnavailable` when nothing answers for `GIVE_UP_AFTER_S` seconds,
        `Superseded` when a newer attempt has taken over, `ServiceError` on any other refusal.
        """
        deadline = time.monotonic() + GIVE_UP_AFTER_S
        pause = 0.05
        while True:
            try:
                response = self._client.request(method, path, **arguments)
                if response.status_code not in (502, 503, 504):
                    return self._checked(response, method, path)
                reason = f"HTTP {response.status_code}"
            except httpx.TransportError as error:
                reason = str(error) or type(error).__name__
            if time.monotonic() >= deadline:
                raise ServiceUnavailable(
                    f"the {self.service} at {self.url} does not answer ({reason}); see its log, "
                    "then continue with `bapo run --resume`"
                )
            time.sleep(pause)
            pause = min(2 * pause, 1.0)

    def _checked(self, response: httpx.Response, method: str, path: str) -> httpx.Response:
        if response.is_success:
            return response
        detail, kind = response.text[:500], ""
        if response.headers.get("content-type", "").startswith("application/problem+json"):
            problem = response.json()
            detail, kind = problem["detail"], problem["type"]
        message = f"the {self.service} refused {method} {path}: {detail}"
        if kind == "urn:bapo:superseded":
            raise Superseded(response.status_code, message)
        raise ServiceError(response.status_code, message)
