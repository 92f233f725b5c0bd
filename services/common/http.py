"""HTTP client of all services: repeats calls while a service does not answer."""

from __future__ import annotations

import logging
import time
from typing import Any
from urllib.parse import urlsplit

import httpx

from services.common.errors import (
    UNFORESEEN,
    ServiceCallError,
    ServiceError,
    ServiceUnavailable,
    Superseded,
)
from services.common.http_options import client_options
from services.common.proxies import LOCAL_HOSTS
from services.common.redaction import redact, register_secret

log = logging.getLogger(__name__)

GIVE_UP_AFTER_S = 60.0
"""Seconds for which a call is repeated: longer than a service takes to move to another machine, and
short enough that a lost service does not block a run."""
SAY_EVERY_S = 60.0
"""Seconds after which a call that is repeated for longer says so again."""
LONGEST_REASON = 300
"""Characters of a service's reason that a message repeats."""
_LONGEST_BODY = 100
"""Characters that a message repeats of an answer that no service of ours has given."""
_CONNECT_S = 5.0
UNHURRIED = httpx.Timeout(3600.0, connect=_CONNECT_S)
"""Time-out of a call for which the service does all its work before it answers. Sent again while
the first is still at work, it would be done twice."""


class HttpClient:
    """Calls one service. Every call must be idempotent, because it may be sent twice."""

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
        """Makes a client; nothing is sent yet.

        service: name of the service in messages.
        timeout_s: seconds to wait for data of one response.
        give_up_s: seconds for which a call is repeated while nothing answers.
        busy_give_up_s: seconds for which a call is repeated while the service answers 429.
        """
        self.service, self.url = service, url
        self._give_up_s, self._busy_give_up_s = give_up_s, busy_give_up_s
        register_secret(token)
        self._client = httpx.Client(
            base_url=url,
            headers={"Authorization": f"Bearer {token}"},
            timeout=httpx.Timeout(timeout_s, connect=_CONNECT_S),
            # Below the seconds after which any proxy before our servers closes an idle connection;
            # they themselves do after 620 seconds.
            limits=httpx.Limits(keepalive_expiry=2.0),
            **client_options(url),
        )

    def close(self) -> None:
        """Closes the connections."""
        self._client.close()

    def call(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        """Sends a request and returns the successful response.

        Repeats it while nothing answers, and while the service answers 429 (honouring
        Retry-After), 502, 503 or 504, or 500 for a reason that it did not foresee, which is logged.
        Raises `ServiceUnavailable` when that lasts longer than the client's time-out for it,
        `Superseded` when a newer attempt has taken over, `ServiceError` on any other error status,
        and `ServiceCallError` for a call that cannot be sent at all.
        """
        outage_began: dict[float, float] = {}  # start of the current outage, by its time-out
        said = time.monotonic()
        failed = False
        pause = 0.05
        while True:
            give_up_after, wait = self._give_up_s, pause
            try:
                response = self._client.request(method, path, **arguments)
                if not _is_outage(response):
                    return self._checked(response, method, path)
                reason = f"HTTP {response.status_code}{_describe(response)}"
                if response.status_code == 429:
                    give_up_after, wait = self._busy_give_up_s, _retry_after(response, pause)
            except (httpx.LocalProtocolError, httpx.UnsupportedProtocol) as error:
                raise ServiceCallError(
                    f"the {self.service} at {self.url} cannot be called: {redact(str(error))}; "
                    "check its address and its token"
                ) from error
            except httpx.TransportError as error:
                reason = redact(str(error)) or type(error).__name__
            # Counted from the first failure: the request before it may have taken minutes.
            began = outage_began.setdefault(give_up_after, time.monotonic())
            if reason.startswith("HTTP 500") and not failed:
                failed = True
                log.warning(
                    "the %s at %s failed at %s %s (%s); the call is repeated for up to %.0f s",
                    *(self.service, self.url, method, path, reason, give_up_after),
                )
            if time.monotonic() + wait >= began + give_up_after:
                raise ServiceUnavailable(
                    f"the {self.service} at {self.url} has not served the call for "
                    f"{give_up_after:.0f} s ({reason}); see its log{self._local_advice()}"
                )
            if time.monotonic() - said >= SAY_EVERY_S:
                said = time.monotonic()
                log.warning(
                    "the %s at %s has not served the call for %.0f s (%s); it is called for up to "
                    "%.0f s",
                    *(self.service, self.url, said - began, reason, give_up_after),
                )
            time.sleep(wait)
            pause = min(2 * pause, 1.0)

    def _local_advice(self) -> str:
        """Returns what a person may do who has started the service, or a way to it."""
        if urlsplit(self.url).hostname not in LOCAL_HOSTS:
            return ""
        return ", and start it, or the port-forward to it, again"

    def _checked(self, response: httpx.Response, method: str, path: str) -> httpx.Response:
        if response.is_success:
            return response
        detail, kind = _problem(response) or (_describe_page(response), "")
        message = f"the {self.service} refused {method} {path}: {detail}"
        if kind == "urn:bapo:superseded":
            raise Superseded(response.status_code, message, detail)
        raise ServiceError(response.status_code, message, detail)


def _problem(response: httpx.Response) -> tuple[str, str] | None:
    """Returns the detail and the kind of problem details; None for any other body."""
    if not response.headers.get("content-type", "").startswith("application/problem+json"):
        return None
    problem = response.json()
    return problem["detail"], problem["type"]


def _describe_page(response: httpx.Response) -> str:
    """Returns what an answer means that a service of ours has not given."""
    if response.status_code == 413:
        return (
            "a proxy before the service takes smaller bodies; raise its limit to 64 MiB (nginx: "
            "`client_max_body_size`, its ingress controller: `proxy-body-size`)"
        )
    text = " ".join(response.text.split())[:_LONGEST_BODY]
    body = "".join(letter if letter.isprintable() else "?" for letter in text)
    is_page = "html" in response.headers.get("content-type", "")
    what = "nothing" if not body else "a page" if is_page else repr(body)
    return (
        f"a proxy or another server has answered with {what} (HTTP {response.status_code}); check "
        "the address, and the proxy's log"
    )


def _is_outage(response: httpx.Response) -> bool:
    """Returns whether the same call may succeed later.

    A 500 that the service foresaw, such as a wrong plug-in's, would be the same each time.
    """
    if response.status_code == 500:
        problem = _problem(response)
        return problem is None or problem[1] == UNFORESEEN
    return response.status_code in (429, 502, 503, 504)


def _describe(response: httpx.Response) -> str:
    """Returns the reason that the service gave, to follow the status; empty without one."""
    problem = _problem(response)
    return f": {problem[0][:LONGEST_REASON]}" if problem else ""


def _retry_after(response: httpx.Response, default: float) -> float:
    """Returns the seconds of Retry-After. Our services never send its other form, a date."""
    value = response.headers.get("retry-after", "")
    return float(value) if value.isdecimal() else default
