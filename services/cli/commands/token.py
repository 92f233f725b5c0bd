"""`bapo token`: tokens of the REST API."""

from __future__ import annotations

from datetime import UTC, datetime

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
    help="What it permits: reading (read), creating and ending runs, too (run), all (admin), "
    "or the calls of one kind of process.",
)
@click.option("--run", metavar="NAME", help="Let it be for this run alone.")
@click.option("--days", type=float, metavar="DAYS", help="Let it expire after this time.")
@json_option
def create(name: str, scope: Scope, run: str | None, days: float | None, as_json: bool) -> None:
    """Create a token and print it, this one time.

    \b
    Examples:
      bapo token create grafana --scope read --days 365
      bapo token create colleague --scope run --run countdown
    """
    created = connect().create_token(name, scope, run=run, days=days)
    if as_json:
        print_json(created)
    else:
        echo(f"{created.token}\n(token {created.id}, scope {created.scope}; it is not shown again)")


@token.command("list")
@click.option("--all", "with_ended", is_flag=True, help="Also those that no longer are valid.")
@json_option
def list_tokens(with_ended: bool, as_json: bool) -> None:
    """List the tokens, without their secrets."""
    now = datetime.now(UTC)
    tokens = [
        token
        for token in connect().tokens()
        if with_ended
        or (token.revoked_at is None and (token.expires_at is None or token.expires_at > now))
    ]
    rows = [
        (
            token.id,
            token.name,
            token.scope,
            token.run or "",
            local_time(token.created_at),
            local_time(token.last_used_at),
            local_time(token.expires_at),
            local_time(token.revoked_at),
        )
        for token in tokens
    ]
    columns = ["id", "name", "scope", "run", "created", "last used", "expires", "revoked"]
    show(tokens, columns, rows, as_json=as_json, empty="there is no token")


@token.command
@click.argument("id", type=int, help="Number of the token, as `bapo token list` shows it.")
def revoke(id: int) -> None:
    """Revoke a token, with immediate effect."""
    revoked = connect().revoke_token(id)
    echo(f"token {revoked.id} ({revoked.name}) is revoked")
