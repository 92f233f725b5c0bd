"""Tokens of the processes that a command starts: none of them gets the admin token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

from bapo_core.errors import BapoError
from services.buffer.api.client import BufferClient
from services.common.errors import ServiceCallError, ServiceError
from services.common.scopes import Scope

NAME = "process of a command"
"""Name of such tokens in the list."""


@contextmanager
def process_tokens(
    client: BufferClient, bound: tuple[Scope, ...], unbound: tuple[Scope, ...] = ()
) -> Iterator[Mapping[Scope, str]]:
    """Yields a token of each scope, which are valid while the context lasts.

    bound: scopes of tokens for the client's run alone. unbound: scopes of tokens for all runs.

    Tokens that an earlier command for the run has left, because it was killed, end as well.
    """
    for token in client.tokens():
        if token.name == NAME and token.run == client.run and token.revoked_at is None:
            client.revoke_token(token.id)
    created = {}
    try:
        for scope in (*bound, *unbound):
            created[scope] = _create(client, scope, client.run if scope in bound else None)
        yield {scope: token for scope, (_, token) in created.items()}
    finally:
        for number, _ in created.values():
            # The service may be what has failed.
            with suppress(ServiceCallError):
                client.revoke_token(number)


def _create(client: BufferClient, scope: Scope, run: str | None) -> tuple[int, str]:
    try:
        created = client.create_token(NAME, scope, run=run)
    except ServiceError as error:
        if error.status == 422:
            raise BapoError(
                "the buffer service is of an earlier version, which has no tokens for single "
                "processes; stop it with `bapo stack down`, and repeat the command"
            ) from error
        raise
    return created.id, created.token
