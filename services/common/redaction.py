"""Keeps secrets out of logs, tracebacks and messages.

Libraries put the values that they reject into their exceptions: httpx the `Authorization` header,
psycopg the end of a password that is not percent-encoded, and minio the signature of a request.
Settings and clients therefore register their secrets here, and whatever is printed passes `redact`.
"""

from __future__ import annotations

import json
import re
import sys
import threading
import traceback
from types import TracebackType
from urllib.parse import quote, quote_plus, unquote

MASK = "***"
SHORTEST_REDACTED = 6
"""Characters of the shortest value that is replaced wherever it occurs. A shorter one, such as a
password `bapo`, would also be replaced in words that have nothing to do with it."""
_PASSWORD_IN_ADDRESS = re.compile(r"://[^:/@]*:(.*)@")
_HEADERS = re.compile(
    r"(?P<bearer>Bearer\s+)[\w.~+/-]{20,}=*"
    r"|(?P<basic>Basic\s+)[\w+/-]{8,}=*"
    r"|(?P<signed>\b(?:X-Amz-)?(?:Credential|Signature|Security-Token)(?:=|%3D|'?: '?))[\w/%+=.-]+"
    r"|(?P<address>://)[^/\s@'\"]+@",
    re.IGNORECASE,
)
"""Matches tokens and signatures in headers, and passwords in addresses, whatever their values."""
_lock = threading.Lock()
_forms: set[str] = set()
"""Every spelling of every registered secret."""
_pattern: re.Pattern[str] | None = None


def register_secret(secret: str) -> None:
    """Has `redact` replace a secret, and if it is an address, also the password in it."""
    global _pattern
    values = {secret, *_PASSWORD_IN_ADDRESS.findall(secret)}
    values |= {unquote(value) for value in values}
    with _lock:
        before = len(_forms)
        for value in values:
            if len(value) >= SHORTEST_REDACTED:
                escaped = json.dumps(value)[1:-1], repr(value)[1:-1]
                _forms.update((value, *escaped, quote(value, safe=""), quote_plus(value)))
        if len(_forms) > before:
            # Longer values first: a secret may begin with another one.
            ordered = sorted(_forms, key=len, reverse=True)
            _pattern = re.compile("|".join(map(_expression, ordered)))


def _expression(form: str) -> str:
    """Returns the regular expression of one spelling.

    A password that is a word, such as `postgres`, is replaced as a whole word alone, so that
    `postgresql://` stays.
    """
    return rf"\b{form}\b" if form.isalpha() else re.escape(form)


def redact(text: str) -> str:
    """Returns `text` with registered secrets, credentials in headers and passwords replaced."""
    if _pattern is not None:
        text = _pattern.sub(MASK, text)
    return _HEADERS.sub(_mask, text)


def _mask(match: re.Match[str]) -> str:
    kind = match.lastgroup
    assert kind is not None, "every alternative is a named group"
    return f"{match[kind]}{MASK}{'@' if kind == 'address' else ''}"


def format_redacted(error: BaseException) -> str:
    """Returns the traceback of an exception and of its causes, without secrets."""
    return redact("".join(traceback.format_exception(error)))


def redact_tracebacks() -> None:
    """Has this process print the tracebacks of exceptions that nothing handles without secrets."""

    def print_traceback(
        _: type[BaseException], error: BaseException, __: TracebackType | None
    ) -> None:
        sys.stderr.write(format_redacted(error))

    def print_of_thread(ended: threading.ExceptHookArgs) -> None:
        # A thread may end itself by SystemExit without a word.
        if ended.exc_value is not None and ended.exc_type is not SystemExit:
            name = ended.thread.name if ended.thread is not None else "?"
            sys.stderr.write(f"Exception in thread {name}:\n{format_redacted(ended.exc_value)}")

    def print_unraisable(ignored: sys.UnraisableHookArgs) -> None:
        if ignored.exc_value is not None:
            what = ignored.err_msg or "Exception ignored in"
            sys.stderr.write(f"{what}:\n{format_redacted(ignored.exc_value)}")

    sys.excepthook = print_traceback
    threading.excepthook = print_of_thread
    sys.unraisablehook = print_unraisable
