"""Configurations that are stored by name, so that a pipeline can be started with one."""

from __future__ import annotations

from sqlalchemy import func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from bapo_core.config import config_from, parse_values
from bapo_core.errors import ConfigError
from services.buffer.api import wire
from services.buffer.storage.pages import after_cursor, page_of
from services.buffer.storage.tables import StoredConfig
from services.common.problems import Problem, not_found


def store_config(session: Session, name: str, text: str) -> StoredConfig:
    """Stores a configuration in place of any other of this name.

    Raises 422 for text that is no valid configuration, or that sets no key.
    """
    try:
        values = parse_values(text, "config")
        config_from(values)
    except ConfigError as error:
        raise Problem(422, "Invalid configuration", str(error)) from error
    if not values:
        raise Problem(422, "Invalid configuration", "config: sets no key; were its lines joined?")
    row = {"text": text, "stored_at": func.now()}
    statement = insert(StoredConfig).values(name=name, **row)
    statement = statement.on_conflict_do_update(index_elements=["name"], set_=row)
    session.execute(statement)
    return get_config(session, name)


def get_config(session: Session, name: str) -> StoredConfig:
    """Returns the configuration of this name; raises 404 if there is none."""
    row = session.get(StoredConfig, name)
    if row is None:
        raise not_found(f"stored configuration {name!r}; `bapo config push` stores one")
    return row


def list_configs(session: Session, cursor: str | None, limit: int) -> wire.Page[wire.NamedConfig]:
    """Returns a page of stored configurations, by name."""
    rows = session.scalars(
        after_cursor(select(StoredConfig), (StoredConfig.name.expression,), "name", cursor, limit)
    ).all()
    return page_of(rows, limit, "name", lambda row: (row.name,), named_config)


def named_config(row: StoredConfig) -> wire.NamedConfig:
    """Builds the answer that holds a stored configuration."""
    return wire.NamedConfig(name=row.name, text=row.text, stored_at=row.stored_at)
