"""`bapo token`: tokens of the REST API."""

from __future__ import annotations

import click

from services.cli.echo import echo
from services.cli.options import json_option
from services.cli.service import connect
from services.cli.tables import local_time, print_json, show
from services.common.scopes import SCOPES, Scope


@click.group
def token() -> None:
    """Create, list or revoke tokens of the REST API."""


@token.command
@click.argument("name", help="What the token is for.")
@click.option(
    "--scope",
    type=click.Choice(SCOPES),
    default="read",
    help="What it permits: reading, also changing runs, or everything.",
)
@json_option
def create(name: str, scope: Scope, as_json: bool) -> None:
    """Create a token and print it, this one time.

    \b
    Example:
      bapo token create grafana --scope read
    """
    created = connect().create_token(name, scope)
    if as_json:
        print_json(created)
    else:
        echo(f"{created.token}\n(token {created.id}, scope {created.scope}; it is not shown again)")


@token.command("list")
@json_option
def list_tokens(as_json: bool) -> None:
    """List all tokens, without their secrets."""
    tokens = connect().tokens()
    rows = [
        (
            token.id,
            token.name,
            token.scope,
            local_time(token.created_at),
            local_time(token.last_used_at),
            local_time(token.revoked_at),
        )
        for token in tokens
    ]
    columns = ["id", "name", "scope", "created", "last used", "revoked"]
    show(tokens, columns, rows, as_json=as_json, empty="there is no token")


@token.command
@click.argument("id", type=int, help="Number of the token, as `bapo token list` shows it.")
def revoke(id: int) -> None:
    """Revoke a token, with immediate effect."""
    revoked = connect().revoke_token(id)
    echo(f"token {revoked.id} ({revoked.name}) is revoked")
