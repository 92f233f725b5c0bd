"""`bapo gc`: the garbage collection of the object store."""

from __future__ import annotations

import click

from bapo_core.errors import BapoError
from services.cli.echo import echo
from services.cli.options import json_option
from services.cli.service import connect
from services.cli.tables import print_json


@click.command
@click.option("--dry-run", is_flag=True, help="Only list the objects.")
@json_option
def gc(dry_run: bool, as_json: bool) -> None:
    """Delete objects that no row of the database refers to.

    Only objects older than a day are deleted. Exits with 1 when objects are missing that rows
    refer to.
    """
    garbage = connect().collect_garbage(dry_run=dry_run)
    if as_json:
        print_json(garbage)
    else:
        for key in garbage.orphans:
            echo(key)
        outcome = (
            "have no row; those older than a day would be deleted"
            if dry_run
            else "had no row, were older than a day, and are deleted"
        )
        echo(f"{len(garbage.orphans)} of {garbage.objects} objects {outcome}")
    if garbage.missing:
        raise BapoError(
            f"{len(garbage.missing)} objects are missing that rows refer to, the first: "
            f"{garbage.missing[0]}; restore them from a backup of the bucket"
        )
