"""Weights that the trainer would send straight to this replica's engine, instead of their files.

An offer stands until the replica takes it, a newer one comes, or its time is over. Nothing depends
on it: the version is in the object store as well.
"""

from __future__ import annotations

import asyncio

from services.buffer.wire import StoredVersion
from services.common.offers import STANDS_S, WeightOffer

WAIT_S = 10.0
"""How long a replica waits for the offer of a version that has just been published."""


class Offers:
    """At most one stands."""

    def __init__(self) -> None:
        self._standing: tuple[WeightOffer, asyncio.Future[int]] | None = None
        self._made = asyncio.Event()

    async def stand(self, offer: WeightOffer) -> int:
        """Returns how many receive once the offer is taken; 0 if it is not."""
        self._withdraw()
        taken: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._standing = offer, taken
        self._made.set()
        try:
            async with asyncio.timeout(STANDS_S):
                return await taken
        except TimeoutError:
            return 0
        finally:
            if self._standing is not None and self._standing[1] is taken:
                self._standing = None

    async def take(self, stored: StoredVersion, receivers: int) -> WeightOffer | None:
        """The offer of just that version, if there is one in time; who made it sends now."""
        try:
            async with asyncio.timeout(WAIT_S):
                while True:
                    if self._standing is not None:
                        offer, taken = self._standing
                        if (offer.policy_version, offer.manifest_digest) == (
                            stored.number,
                            stored.manifest_digest,
                        ):
                            self._standing = None
                            taken.set_result(receivers)
                            return offer
                    self._made.clear()
                    await self._made.wait()
        except TimeoutError:
            return None

    def _withdraw(self) -> None:
        if self._standing is not None:
            self._standing[1].set_result(0)
            self._standing = None
