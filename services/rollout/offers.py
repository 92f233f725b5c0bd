"""The offer of the trainer to broadcast a version's weights to this replica's engine by NCCL.

An offer is pending until the replica accepts or declines it, a newer one replaces it, or it expires
after `OFFER_TTL_S`. Nothing depends on it: the version is in the object store as well.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from services.buffer.api.wire import StoredVersion
from services.rollout.api.offers import OFFER_TTL_S, WeightOffer

OFFER_WAIT_S = 10.0
"""Seconds that a replica waits for the offer of a version that has just been published."""

_VersionKey = tuple[int, str]
"""(number, manifest digest) of a version."""


class PendingOffer:
    """Holds at most one pending weight-transfer offer."""

    def __init__(self) -> None:
        self._pending: tuple[WeightOffer, asyncio.Future[int]] | None = None
        self._declined: _VersionKey | None = None
        """The version that is loaded from its files, so that its offer is declined at once."""
        self._arrived = asyncio.Event()

    async def submit(self, offer: WeightOffer) -> int:
        """Makes `offer` the pending one and waits for the replica's answer.

        Returns the number of workers that receive, or 0 if the offer is declined or expires.
        """
        self._answer(0)
        if _key(offer) == self._declined:
            return 0
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._pending = offer, answer
        self._arrived.set()
        try:
            await asyncio.wait([answer], timeout=OFFER_TTL_S)
        finally:
            if self._pending is not None and self._pending[1] is answer:
                self._pending = None
        return answer.result() if answer.done() else 0

    async def wait_for(self, stored: StoredVersion) -> WeightOffer | None:
        """Waits for an offer of exactly this version and leaves it pending.

        Returns None if none arrives within `OFFER_WAIT_S`.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(OFFER_WAIT_S):
                while True:
                    if self._pending is not None and _key(self._pending[0]) == _stored_key(stored):
                        return self._pending[0]
                    self._arrived.clear()
                    await self._arrived.wait()
        return None

    def accept(self, offer: WeightOffer, receivers: int) -> bool:
        """Tells the trainer to join; returns False if `offer` is no longer pending."""
        if self._pending is None or self._pending[0] is not offer:
            return False
        self._answer(receivers)
        return True

    def decline(self, stored: StoredVersion) -> None:
        """Declines the present and later offers of a version, which is loaded from its files."""
        self._declined = _stored_key(stored)
        if self._pending is not None and _key(self._pending[0]) == self._declined:
            self._answer(0)

    def _answer(self, receivers: int) -> None:
        if self._pending is not None:
            self._pending[1].set_result(receivers)
            self._pending = None


def _key(offer: WeightOffer) -> _VersionKey:
    return offer.policy_version, offer.manifest_digest


def _stored_key(stored: StoredVersion) -> _VersionKey:
    return stored.number, stored.manifest_digest
