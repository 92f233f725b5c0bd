"""A collector that only waits still notices that another attempt has begun."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from services.buffer.api.client import BufferClient
from services.common.errors import Superseded
from services.rollout.collector import Collector
from services.rollout.fleet import Fleet
from services.stack.stack import Endpoints
from services.verifier.api.client import VerifierClient
from tests.integration.driver import Driver, small_config


def test_a_collector_that_waits_for_weights_is_superseded(stack: Endpoints) -> None:
    driver = Driver(stack, small_config("waits-for-weights"))
    no_tokenizer: Any = None  # never used before there are weights
    collector = Collector(
        driver.config,
        driver.client,
        Fleet(driver.client, stack.token),
        VerifierClient(stack.verifier_url, stack.token),
        no_tokenizer,
    )

    async def work() -> None:
        collecting = asyncio.create_task(collector.collect(1))
        async with asyncio.timeout(300):
            # It has its prompts, and waits for a version that is never published.
            while not collector._running:
                await asyncio.sleep(0.05)
            other = BufferClient(stack.buffer_url, stack.token, run=driver.client.run)
            await asyncio.to_thread(other.begin_attempt)
            with pytest.raises(Superseded):
                await collecting

    asyncio.run(work())
