"""Weights that the trainer would send straight to this replica's engine, instead of their files.

An offer stands until the replica accepts or declines it, a newer one comes, or its time is over.
Nothing depends on it: the version is in the object store as well.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from services.buffer.api.wire import StoredVersion
from services.rollout.api.offers import STANDS_S, WeightOffer

WAIT_S = 10.0
"""How long a replica waits for the offer of a version that has just been published."""

_Key = tuple[int, str]


class Offers:
    """At most one stands."""

    def __init__(self) -> None:
        self._standing: tuple[WeightOffer, asyncio.Future[int]] | None = None
        self._declined: _Key | None = None
        """Comes from its files."""
        self._made = asyncio.Event()

    async def stand(self, offer: WeightOffer) -> int:
        """Returns how many receive once the offer is accepted; 0 if it is not."""
        self._answer(0)
        if _key(offer) == self._declined:
            return 0
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._standing = offer, answer
        self._made.set()
        try:
            await asyncio.wait([answer], timeout=STANDS_S)
        finally:
            if self._standing is not None and self._standing[1] is answer:
                self._standing = None
        return answer.result() if answer.done() else 0

    async def of(self, stored: StoredVersion) -> WeightOffer | None:
        """The offer of just that version, if it is made in time; it goes on standing."""
        with suppress(TimeoutError):
            async with asyncio.timeout(WAIT_S):
                while True:
                    if self._standing is not None and _key(self._standing[0]) == _stored(stored):
                        return self._standing[0]
                    self._made.clear()
                    await self._made.wait()
        return None

    def accept(self, offer: WeightOffer, receivers: int) -> bool:
        """Whether it still stands; then who made it joins now."""
        if self._standing is None or self._standing[0] is not offer:
            return False
        self._answer(receivers)
        return True

    def decline(self, stored: StoredVersion) -> None:
        """The version comes from its files: nobody need wait to send it."""
        self._declined = _stored(stored)
        if self._standing is not None and _key(self._standing[0]) == self._declined:
            self._answer(0)

    def _answer(self, receivers: int) -> None:
        if self._standing is not None:
            self._standing[1].set_result(receivers)
            self._standing = None


def _key(offer: WeightOffer) -> _Key:
    return offer.policy_version, offer.manifest_digest


def _stored(stored: StoredVersion) -> _Key:
    return stored.number, stored.manifest_digest
