"""The table that has the revision of bapo's schema.

Alembic's own name for it, `alembic_version`, is that of other programs, too: MLflow and bapo can
share a database because bapo's has another name. Revisions before `OWN_SINCE` are in
`alembic_version`, where the versions of bapo that made them look.
"""

from __future__ import annotations

from sqlalchemy import Connection, text

from bapo_core.errors import BapoError

VERSION_TABLE = "bapo_version"
OWN_SINCE = "0032"
"""First revision that is recorded in a table of bapo's own."""
_SHARED_TABLE = "alembic_version"


def find_version_table(connection: Connection) -> str:
    """Returns the name of the table that has the revision, or that will have it."""
    if _exists(connection, VERSION_TABLE) or not _exists(connection, _SHARED_TABLE):
        return VERSION_TABLE
    # Other programs number their revisions, too, but have no table of bapo's.
    revisions = connection.scalars(text(f"select version_num from {_SHARED_TABLE}")).all()
    own = revisions and all(len(revision) == 4 and revision.isdecimal() for revision in revisions)
    return _SHARED_TABLE if own and _exists(connection, "rollout_group") else VERSION_TABLE


def take_over(connection: Connection) -> None:
    """Renames the table in which an earlier version of bapo has recorded the revision."""
    if find_version_table(connection) == _SHARED_TABLE:
        _rename(connection, _SHARED_TABLE, VERSION_TABLE)


def give_back(connection: Connection) -> None:
    """Renames the table after a downgrade, for the earlier version of bapo that is to use it.

    Raises `BapoError` if another program has a table of this name.
    """
    if not _exists(connection, VERSION_TABLE):
        return
    revision = connection.scalar(text(f"select version_num from {VERSION_TABLE}"))
    if revision is None or revision >= OWN_SINCE:
        return
    if _exists(connection, _SHARED_TABLE):
        raise BapoError(
            f"versions of bapo before revision {OWN_SINCE} need a table {_SHARED_TABLE} of their "
            "own, but that of another program is in this database; restore a backup of bapo's "
            "tables into a database of its own, and downgrade there"
        )
    _rename(connection, VERSION_TABLE, _SHARED_TABLE)


def _exists(connection: Connection, table: str) -> bool:
    return connection.scalar(text("select to_regclass(:table)"), {"table": table}) is not None


def _rename(connection: Connection, old: str, new: str) -> None:
    connection.execute(text(f"alter table {old} rename to {new}"))
    # Its index would keep another program from making a table of the old name.
    connection.execute(text(f"alter table {new} rename constraint {old}_pkc to {new}_pkc"))
