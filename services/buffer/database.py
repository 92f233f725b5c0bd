"""Connections to Postgres: their parameters, and the errors after which a call is repeated."""

from __future__ import annotations

from time import monotonic
from typing import Any

from psycopg.errors import DiskFull, ReadOnlySqlTransaction, TooManyConnections
from sqlalchemy import URL, Engine, ExceptionContext, create_engine, event, make_url
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError, SQLAlchemyError

from bapo_core.errors import BapoError
from services.common.errors import first_line

FULL_FOR_S = 10.0
"""Seconds for which a database counts as full after it has refused a write for lack of space."""
_UNFIT_CLASSES = ("08", "53", "57P", "58")
"""Beginnings of SQLSTATE: connection exception, insufficient resources, shutdown, system error."""
_UNFIT_STATES = ("25006", "25P03", "25P04", "26000", "42P05")
"""SQLSTATE of a read-only transaction, of two time-outs after which the server has closed the
connection, and of a prepared statement that another client of the pooler has dropped or made."""
STANDBY = (
    "the server is a standby, or is being replaced: calls work again when the address leads to the "
    "primary"
)
"""The meaning and the remedy of a database that takes no writes."""
_REMEDIES = {
    ReadOnlySqlTransaction.sqlstate: STANDBY,
    DiskFull.sqlstate: "free or add space on the disk of Postgres",
    TooManyConnections.sqlstate: "raise max_connections of Postgres, or end other clients",
}


def connection_arguments(database_url: str | URL) -> tuple[list[Any], dict[str, Any]]:
    """Returns the arguments of `psycopg.connect` for a URL.

    Statements are not prepared unless the URL has `prepare_threshold`: behind a pooler that gives
    transactions different connections, a statement of the same name may be another client's. A
    standby is refused unless the URL has `target_session_attrs`.

    Raises `BapoError` for a value that is not a number where psycopg takes one.
    """
    url = make_url(database_url)
    threshold = url.query.get("prepare_threshold", "none")
    url = url.difference_update_query(["prepare_threshold"])
    arguments, options = url.get_dialect()().create_connect_args(url)
    options = {**options}
    options.setdefault("target_session_attrs", "read-write")
    if threshold == "none":
        options["prepare_threshold"] = None
    elif isinstance(threshold, str) and threshold.isdecimal():
        options["prepare_threshold"] = int(threshold)
    else:
        raise BapoError(
            f"BAPO_DATABASE_URL: prepare_threshold is {threshold!r}; give the number of uses after "
            "which a statement is prepared, or none, which is the default and right for poolers"
        )
    return list(arguments), options


def make_engine(database_url: str, **options: Any) -> Engine:
    """Returns an engine whose connections have the arguments of `connection_arguments`."""
    url = make_url(database_url)
    _, arguments = connection_arguments(url)
    without = url.difference_update_query(["prepare_threshold"])
    return create_engine(without, connect_args=arguments, **options)


def describe_address(database_url: str | URL) -> str:
    """Returns a URL for messages, without any password."""
    url = make_url(database_url).difference_update_query(["password", "sslpassword"])
    return url.render_as_string(hide_password=True)


def is_outage(error: BaseException | None) -> bool:
    """Returns whether an error of psycopg is a state of the server or of the connection, which
    other connections may not meet, and not a fault of the statement."""
    state = getattr(error, "sqlstate", None) or ""
    return state.startswith(_UNFIT_CLASSES) or state in _UNFIT_STATES


def may_be_repeated(error: DBAPIError) -> bool:
    """Returns whether the same call may succeed later."""
    return isinstance(error, OperationalError | InterfaceError) or is_outage(error.orig)


def describe_outage(error: SQLAlchemyError) -> str:
    """Returns why the database cannot serve a call at present, and the remedy, in one line."""
    return _with_remedy(error.orig if isinstance(error, DBAPIError) and error.orig else error)


def _with_remedy(cause: BaseException) -> str:
    remedy = _REMEDIES.get(getattr(cause, "sqlstate", None) or "", "see the log of Postgres")
    # A standby that is refused when the connection is made has no SQLSTATE.
    if "session is read-only" in str(cause):
        remedy = STANDBY
    return f"{first_line(cause)}; {remedy}"


class OutageWatch:
    """Drops the connections of an engine after an error that another connection may not meet, and
    remembers that the disk of the database was full.

    SQLAlchemy drops connections that are closed. After a failover they may be open and lead to a
    server that takes no writes, for ever.
    """

    def __init__(self, engine: Engine) -> None:
        self._full_at, self._reason = -FULL_FOR_S, ""
        event.listen(engine, "handle_error", self._handle)

    def _handle(self, context: ExceptionContext) -> None:
        error = context.original_exception
        if is_outage(error):
            context.is_disconnect = True
        if isinstance(error, DiskFull):
            self._full_at, self._reason = monotonic(), _with_remedy(error)

    def full(self) -> str | None:
        """Returns why the database has refused a write in the last `FULL_FOR_S` seconds for lack of
        space, and the remedy; None if it has not."""
        return self._reason if monotonic() < self._full_at + FULL_FOR_S else None
