"""One HTTP client for all our services: retries what may be repeated, explains what fails."""

from __future__ import annotations

import time
from typing import Any

import httpx

from services.common.errors import ServiceError, ServiceUnavailable, Superseded

GIVE_UP_AFTER_S = 60.0
"""A service that is moved to another machine is back sooner; a lost one must not hang a run."""


class HttpClient:
    """Calls to one service. Every call must be idempotent, because it may be sent twice."""

    def __init__(
        self,
        service: str,
        url: str,
        token: str,
        *,
        timeout_s: float = 60.0,
        give_up_s: float = GIVE_UP_AFTER_S,
        busy_give_up_s: float = GIVE_UP_AFTER_S,
    ) -> None:
        """A service that answers 429 lives; it is asked again for `busy_give_up_s` seconds."""
        self.service, self.url = service, url
        self._give_up_s, self._busy_give_up_s = give_up_s, busy_give_up_s
        self._client = httpx.Client(
            base_url=url,
            headers={"Authorization": f"Bearer {token}"},
            timeout=httpx.Timeout(timeout_s, connect=5.0),
            # Below the 5 seconds after which servers hang up.
            limits=httpx.Limits(keepalive_expiry=2.0),
        )

    def close(self) -> None:
        self._client.close()

    def call(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        """The answer, or an error that says which service refused what and why.

        Raises `ServiceUnavailable` when nothing answers for `give_up_s` seconds or the
        service stays busy (429, honouring Retry-After),
        `Superseded` when a newer attempt has taken over, `ServiceError` on any other refusal.
        """
        failing_since: dict[float, float] = {}  # by how long that kind of failure is borne
        pause = 0.05
        while True:
            give_up_after, wait = self._give_up_s, pause
            try:
                response = self._client.request(method, path, **arguments)
                if response.status_code not in (429, 502, 503, 504):
                    return self._checked(response, method, path)
                reason = f"HTTP {response.status_code}"
                if response.status_code == 429:
                    give_up_after, wait = self._busy_give_up_s, _retry_after(response, pause)
            except httpx.TransportError as error:
                reason = str(error) or type(error).__name__
            # From the first failure: a call may have been under way for minutes before it.
            since = failing_since.setdefault(give_up_after, time.monotonic())
            if time.monotonic() + wait >= since + give_up_after:
                raise ServiceUnavailable(
                    f"the {self.service} at {self.url} does not answer ({reason}); see its log, "
                    "then continue with `bapo run --resume`"
                )
            time.sleep(wait)
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


def _retry_after(response: httpx.Response, default: float) -> float:
    """Seconds that the service asks us to wait; the other form, a date, is not one of ours."""
    value = response.headers.get("retry-after", "")
    return float(value) if value.isdecimal() else default
