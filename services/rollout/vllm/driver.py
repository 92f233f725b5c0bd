"""vLLM beside a replica: weights replaced in place, and a fresh server whenever there is doubt."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from pathlib import Path

from services.rollout.api.offers import WeightOffer
from services.rollout.api.wire import GeneratedGroup, GenerateRequest, PromptRequest, Sampling
from services.rollout.driver import Accept, EngineLost
from services.rollout.vllm.api import PromptRefused, VllmApi
from services.rollout.vllm.layout import Layout, read_layout
from services.rollout.vllm.server import VllmOptions, VllmServer

log = logging.getLogger(__name__)

STALLED_S = 120.0
"""Without a token while there is work, vLLM hangs."""
WARM_UP_TOKENS = 32
"""A very short first prompt kills vLLM on some CPUs; a long one also finds out what is broken."""
RESET_TRIES = 20


class VllmDriver:
    """An `EngineDriver` for vLLM."""

    prompts_per_request = 1
    """vLLM batches by itself: each prompt goes to whoever has least to do."""

    def __init__(self, options: VllmOptions) -> None:
        self._options = options
        self._server: VllmServer | None = None
        self._layout: Layout | None = None
        self._version = ""
        self._under_way = 0
        self._progress = (-1.0, 0.0)
        """(tokens generated, when that number was first seen)."""

    # -- weights

    async def load(self, directory: Path, version: int) -> None:
        layout = await asyncio.to_thread(read_layout, directory)
        if self._server is not None and self._server.alive() and layout == self._layout:
            try:
                await self._load_in_place(self._server.api, directory, str(version))
            except (EngineLost, PromptRefused) as error:
                log.warning("vLLM is started anew, its weights could not be replaced: %s", error)
            else:
                self._version = str(version)
                return
        await self._start(directory, layout, str(version))
        self._version = str(version)

    async def _start(self, directory: Path, layout: Layout, version: str) -> None:
        await self.close()
        self._layout = layout
        server = self._server = VllmServer(self._options, directory)
        try:
            await server.ready()
            await self._name(server.api, version)
            await self._warm_up(server.api, version)
        except BaseException:
            await self.close()
            raise

    async def receive(self, offer: WeightOffer, accept: Accept) -> bool:
        offered = {each.name: (each.dtype, tuple(each.shape)) for each in offer.parameters}
        if self._server is None or self._layout is None or offered != self._layout.torch_tensors():
            log.warning("what is offered are not the weights of the model that vLLM runs")
            return False
        api, version = self._server.api, str(offer.policy_version)
        try:
            workers = await api.workers()
            await api.pause()
            # From here on the trainer waits in the group, and nothing but joining it is left to do.
            if not accept(workers):
                await api.resume()
                return False
            await api.receive(offer, workers)
            await self._renew(api, version)
        except (EngineLost, PromptRefused) as error:
            await self.close()  # half of the weights may be others
            raise EngineLost(f"the trainer's weights did not arrive: {error}") from error
        self._version = version
        return True

    async def _load_in_place(self, api: VllmApi, directory: Path, version: str) -> None:
        await api.pause()
        await api.load(str(directory))
        await self._renew(api, version)

    async def _renew(self, api: VllmApi, version: str) -> None:
        """After other weights were put into a paused vLLM: nothing of the old ones is left."""
        for _ in range(RESET_TRIES):
            if await api.reset_prefix_cache():
                break
            await asyncio.sleep(0.05)  # a request that was cut off may still hold some of it
        else:
            raise EngineLost("the prefix cache still holds keys of other weights")
        await self._name(api, version)
        await api.resume()
        await self._warm_up(api, version)

    async def _name(self, api: VllmApi, version: str) -> None:
        await api.tag(version)
        said = await api.tagged()
        if said != version:
            raise EngineLost(f"vLLM says that it serves {said!r}, not {version!r}")

    async def _warm_up(self, api: VllmApi, version: str) -> None:
        assert self._layout is not None
        length = min(WARM_UP_TOKENS, self._options.longest_sequence - 1)
        prompt = [token % self._layout.vocabulary for token in range(length)]
        sampling = Sampling(temperature=1.0, max_tokens=1, group_size=1)
        await api.generate(prompt, sampling, 0, self._layout.ends, version)

    # -- generation

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GeneratedGroup]:
        tasks = [
            asyncio.create_task(self._group(request, index, prompt))
            for index, prompt in enumerate(request.prompts)
        ]
        self._under_way += 1
        try:
            for finished in asyncio.as_completed(tasks):
                yield await finished
        finally:
            self._under_way -= 1
            for task in tasks:
                task.cancel()
            # Their connections are closed, which ends their work in vLLM.
            await asyncio.wait(tasks)

    async def _group(
        self, request: GenerateRequest, index: int, prompt: PromptRequest
    ) -> GeneratedGroup:
        if self._server is None or self._layout is None:
            raise EngineLost("vLLM does not run")
        group = GeneratedGroup(index=index, policy_version=request.policy_version, responses=[])
        try:
            self._check_prompt(prompt, request)
            group.responses = await self._server.api.generate(
                prompt.prompt_token_ids,
                request,
                prompt.seed,
                self._layout.ends,
                str(request.policy_version),
            )
        except PromptRefused as error:
            group.refused = str(error)
        return group

    def _check_prompt(self, prompt: PromptRequest, request: GenerateRequest) -> None:
        """What would kill vLLM, or quietly shorten responses, does not reach it."""
        assert self._layout is not None
        length, longest = len(prompt.prompt_token_ids), self._options.longest_sequence
        if length + request.max_tokens > longest:
            raise PromptRefused(
                f"{length} tokens of prompt and {request.max_tokens} of response are more than "
                f"{longest}, for which vLLM was started; raise rollout.max_prompt_tokens"
            )
        largest = max(prompt.prompt_token_ids)
        if largest >= self._layout.vocabulary or min(prompt.prompt_token_ids) < 0:
            raise PromptRefused(
                f"token {largest} is not in the model's vocabulary of {self._layout.vocabulary}; "
                "use the tokenizer that belongs to the model"
            )

    # -- life

    async def check(self) -> None:
        """Raises `EngineLost` if vLLM has ended, does not answer, or makes no progress."""
        if self._server is None or not self._server.alive():
            words = "" if self._server is None else f": {self._server.last_words()}"
            raise EngineLost(f"vLLM has ended{words}")
        api = self._server.api
        if not self._under_way:
            try:
                async with asyncio.timeout(STALLED_S):
                    await self._warm_up(api, self._version)
            except TimeoutError as error:
                raise EngineLost(f"vLLM makes no token in {STALLED_S:.0f} s") from error
        tokens, now = await api.generated_tokens(), time.monotonic()
        if tokens != self._progress[0] or not self._under_way:
            self._progress = (tokens, now)
        elif now - self._progress[1] > STALLED_S:
            raise EngineLost(f"vLLM has made no token in {STALLED_S:.0f} s and has work")

    async def close(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            await server.stop()
