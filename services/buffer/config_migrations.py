"""Rewrites stored configurations, for migrations that move their keys."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import sqlalchemy as sa
import yaml
from alembic import op

Values = dict[str, Any]


def rewrite_configs(rewrite: Callable[[Values, bool], Values]) -> None:
    """Rewrites the configurations of all runs, and the texts that are stored by name.

    A text is replaced only where its values change; it loses its comments then.

    rewrite: returns the new values of old ones, which it may change. Its second argument is whether
        the values are complete, as those of a run are; those of a text are what a user wrote.
    """
    connection = op.get_bind()
    for identifier, config in connection.execute(sa.text("select id, config from run")).all():
        connection.execute(
            sa.text("update run set config = cast(:config as jsonb) where id = :id"),
            {"id": identifier, "config": json.dumps(rewrite(config, True))},
        )
    for name, text in connection.execute(sa.text("select name, text from stored_config")).all():
        before, after = (yaml.safe_load(text) for _ in range(2))
        after = rewrite(after, False)
        if after != before:
            connection.execute(
                sa.text("update stored_config set text = :text where name = :name"),
                {"name": name, "text": yaml.safe_dump(after, sort_keys=False)},
            )
