"""The driver of vLLM: replaces weights in place, and restarts the server when that is in doubt."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing
from pathlib import Path
from typing import Any, TypeVar

from bapo_core.seeding import derive_seed
from services.common.images import decode_image
from services.model.vision import SUBSTITUTE, OpenImage
from services.rollout.api.offers import WeightOffer
from services.rollout.api.wire import (
    DiscardedTokens,
    Generated,
    GeneratedGroup,
    GeneratedResponse,
    GeneratedTokens,
    GenerateRequest,
    PromptRequest,
    Sampling,
    StartedResponse,
)
from services.rollout.driver import AcceptOffer
from services.rollout.errors import EngineFaulty, EngineLost, PromptRefused
from services.rollout.vllm.api import RgbImage, VllmApi
from services.rollout.vllm.nodes import WorkerNodes
from services.rollout.vllm.server import VllmOptions, VllmServer
from services.rollout.vllm.weight_layout import Layout, read_layout

log = logging.getLogger(__name__)

STALL_TIMEOUT_S = 120.0
"""vLLM counts as hung when it has work and generates no token for this long."""
WARM_UP_TOKENS = 32
"""Prompt length of the warm-up request: a very short first prompt crashes vLLM on some CPUs."""
RESET_TRIES = 200
"""Tries to drop the cache, 0.05 s apart, while vLLM ends what was cut off."""

Result = TypeVar("Result")


class VllmDriver:
    """An `EngineDriver` for vLLM, on this node or on several."""

    prompts_per_request = 1
    """vLLM batches by itself, so that each prompt can go to the least busy replica."""

    def __init__(
        self,
        options: VllmOptions,
        nodes: WorkerNodes | None = None,
        open_image: OpenImage | None = None,
    ) -> None:
        """Makes a driver; vLLM is started by the first `load`.

        nodes: the worker nodes over which the model is sharded together with this node. `load` then
        takes only directories of a `SharedWeightCache`, which the worker nodes have as well.
        open_image: returns the images of prompts; None if no prompt has any.
        """
        self._options, self._nodes, self._open_image = options, nodes, open_image
        self._nodes_started = False
        """Whether vLLM may run on worker nodes."""
        self._server: VllmServer | None = None
        self._layout: Layout | None = None
        self._version = ""
        self._requests = 0
        """Requests in progress."""
        self._progress = (-1.0, 0.0)
        """(tokens generated so far, monotonic time when that number was first seen)."""

    # -- weights

    async def load(self, directory: Path, version: int) -> None:
        layout = await asyncio.to_thread(read_layout, directory)
        if self._server is not None and self._server.running() and layout == self._layout:
            try:
                await self._load_in_place(self._server.api, directory, str(version))
            except (EngineLost, PromptRefused) as error:
                log.warning("vLLM is restarted, because loading in place failed: %s", error)
            else:
                self._version = str(version)
                return
        await self._start(directory, layout, str(version))
        self._version = str(version)

    async def _start(self, directory: Path, layout: Layout, version: str) -> None:
        await self.close()
        self._layout = layout
        try:
            place = None
            if self._nodes is not None:
                self._nodes_started = True
                place = await self._nodes.start(self._options, directory.name)
            server = self._server = VllmServer(self._options, directory, place)
            await self._run_on_all_nodes(server.wait_ready())
            if layout.image_token is not None:
                await server.api.substitute_placeholders(layout.image_token, SUBSTITUTE)
            await self._tag(server.api, version)
            await self._warm_up(server.api, version)
        except BaseException:
            await self.close()
            raise

    async def prepare(self, directory: Path) -> None:
        """Does nothing: vLLM starts with the files of its first version."""

    async def receive(self, offer: WeightOffer, accept: AcceptOffer) -> bool:
        offered = {
            parameter.name: (parameter.dtype, tuple(parameter.shape))
            for parameter in offer.parameters
        }
        if self._server is None or self._layout is None or offered != self._layout.torch_tensors():
            log.warning(
                "the offer of version %d is declined: its tensors are not those of the model that "
                "vLLM runs",
                offer.policy_version,
            )
            return False
        api, version = self._server.api, str(offer.policy_version)
        try:
            workers = await api.workers()
            await api.pause()
            # Accept last: from then on the trainer waits in the communicator for this engine.
            if not accept(workers):
                await api.resume()
                return False
            await self._run_on_all_nodes(api.receive(offer, workers))
            await self._finish_update(api, version)
        except (EngineLost, PromptRefused) as error:
            await self.close()  # some of the weights may have been replaced
            raise EngineLost(f"the trainer's weights did not arrive: {error}") from error
        self._version = version
        return True

    async def _load_in_place(self, api: VllmApi, directory: Path, version: str) -> None:
        await api.pause()
        # Each node has the version in a directory of its own.
        path = str(directory) if self._nodes is None else directory.name
        await self._run_on_all_nodes(api.load(path))
        await self._finish_update(api, version)

    async def _run_on_all_nodes(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Awaits `work`; raises `EngineLost` if vLLM ends on another node in the meantime."""
        return await (work if self._nodes is None else self._nodes.run_while_all_run(work))

    async def _finish_update(self, api: VllmApi, version: str) -> None:
        """Drops the cache of the old weights, sets the version, and resumes.

        It generates nothing: every response is checked for the version that generated it.
        """
        for _ in range(RESET_TRIES):
            if await api.reset_prefix_cache():
                break
            await asyncio.sleep(0.05)  # a request that was cut off may still hold a part of it
        else:
            raise EngineLost("the prefix cache still holds keys and values of other weights")
        if self._layout is not None and self._layout.image_token is not None:
            await api.reset_encoder_cache()
        await self._tag(api, version)
        await api.resume()

    async def _tag(self, api: VllmApi, version: str) -> None:
        await api.tag(version)
        tag = await api.read_tag()
        if tag != version:
            raise EngineLost(f"vLLM reports version {tag!r} after it was set to {version!r}")

    async def _warm_up(self, api: VllmApi, version: str) -> None:
        assert self._layout is not None
        length = min(WARM_UP_TOKENS, self._options.longest_sequence - 1)
        prompt = [token % self._layout.vocabulary_size for token in range(length)]
        sampling = Sampling(temperature=1.0, max_tokens=1, group_size=1)
        async for _ in api.generate(prompt, sampling, 0, self._layout.ends, version, every=1):
            pass

    # -- generation

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Generated]:
        """Yields groups as they are completed, and tokens before that if the request asks for them.

        Responses that were started are continued one by one, each with the seed of its length.
        """
        lines: asyncio.Queue[Generated | asyncio.Task[None]] = asyncio.Queue()
        tasks = [
            asyncio.create_task(self._generate_group(request, index, lines.put_nowait))
            for index in range(len(request.prompts))
        ]
        for task in tasks:
            task.add_done_callback(lines.put_nowait)
        self._requests += 1
        try:
            running = len(tasks)
            while running:
                line = await lines.get()
                if isinstance(line, asyncio.Task):
                    line.result()
                    running -= 1
                else:
                    yield line
        except EngineFaulty:
            raise
        except EngineLost as error:
            if self._server is None:
                raise
            raise EngineLost(f"{error}; {self._server.last_error()}") from error
        finally:
            self._requests -= 1
            for task in tasks:
                task.cancel()
            # Cancelling closes their connections, which ends their work in vLLM.
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _generate_group(
        self, request: GenerateRequest, index: int, emit: Callable[[Generated], None]
    ) -> None:
        """Emits the group of the prompt `index`, and its tokens before that."""
        prompt, version = request.prompts[index], request.policy_version
        group = GeneratedGroup(index=index, policy_version=version, responses=[])
        responses = [response.model_copy(deep=True) for response in prompt.started]
        problem = self._problem_of_started(prompt, request)
        if problem:
            emit(DiscardedTokens(index=index, policy_version=version, discarded=problem))
            responses = []
        try:
            self._check_prompt(prompt, request)
            images = await asyncio.to_thread(self._read_images, prompt)
            group.responses = await self._sample_group(request, index, images, responses, emit)
        except PromptRefused as error:
            group.refused = str(error)
        except EngineFaulty as error:
            emit(DiscardedTokens(index=index, policy_version=version, discarded=str(error)))
            raise
        emit(group)

    async def _sample_group(
        self,
        request: GenerateRequest,
        index: int,
        images: list[RgbImage],
        responses: list[StartedResponse],
        emit: Callable[[Generated], None],
    ) -> list[GeneratedResponse]:
        """Samples the responses to the prompt `index`, whose images are `images`.

        responses: those to continue; an empty list to begin all of them.
        """
        seed = request.prompts[index].seed
        if responses:
            samples = [
                ([i], derive_seed(seed, "continue", i, len(response.token_ids)))
                for i, response in enumerate(responses)
                if response.finish_reason is None
            ]
        else:
            size = request.group_size
            responses = [StartedResponse(token_ids=[], logprobs=[]) for _ in range(size)]
            samples = [(list(range(size)), seed)]
        try:
            async with asyncio.TaskGroup() as tasks:
                for members, sample_seed in samples:
                    sampling = self._sample(
                        request, index, images, responses, members, sample_seed, emit
                    )
                    tasks.create_task(sampling)
        except BaseExceptionGroup as errors:
            raise _most_serious(errors) from errors
        return [GeneratedResponse.model_validate(response.model_dump()) for response in responses]

    async def _sample(
        self,
        request: GenerateRequest,
        index: int,
        images: list[RgbImage],
        responses: list[StartedResponse],
        members: list[int],
        seed: int,
        emit: Callable[[Generated], None],
    ) -> None:
        """Samples those of `responses` with the indices `members` to their ends.

        They all have the same tokens so far, and get those that are sampled.
        """
        if self._server is None or self._layout is None:
            raise EngineLost("vLLM does not run")
        started = responses[members[0]].token_ids
        chunks = self._server.api.generate(
            request.prompts[index].prompt_token_ids + started,
            Sampling(
                temperature=request.temperature,
                top_p=request.top_p,
                max_tokens=request.max_tokens - len(started),
                group_size=len(members),
            ),
            seed,
            self._layout.ends,
            str(request.policy_version),
            every=request.stream_every or request.max_tokens,
            images=images,
        )
        async with aclosing(chunks):
            async for chunk in chunks:
                member = members[chunk.response]
                response = responses[member]
                if request.stream_every:
                    tokens = GeneratedTokens(
                        index=index,
                        policy_version=request.policy_version,
                        response=member,
                        start=len(response.token_ids),
                        token_ids=chunk.token_ids,
                        logprobs=chunk.logprobs,
                        finish_reason=chunk.finish_reason,
                    )
                    emit(tokens)
                response.token_ids += chunk.token_ids
                response.logprobs += chunk.logprobs
                response.finish_reason = chunk.finish_reason

    def _check_prompt(self, prompt: PromptRequest, request: GenerateRequest) -> None:
        """Raises `PromptRefused` for a prompt that would crash vLLM or shorten responses."""
        if self._layout is None:
            raise EngineLost("vLLM does not run")
        length, limit = len(prompt.prompt_token_ids), self._options.longest_sequence
        if length + request.max_tokens > limit:
            raise PromptRefused(
                f"{length} tokens of prompt and {request.max_tokens} of response are more than "
                f"the {limit} for which vLLM was started; raise rollout.max_prompt_tokens"
            )
        foreign = self._foreign_token(prompt.prompt_token_ids)
        if foreign is not None:
            raise PromptRefused(
                f"token {foreign} is not in the model's vocabulary of "
                f"{self._layout.vocabulary_size}; use the tokenizer that belongs to the model"
            )

    def _read_images(self, prompt: PromptRequest) -> list[RgbImage]:
        """Returns the decoded images of a prompt.

        Raises `PromptRefused` if the model reads no images, and what `open_image` raises.
        """
        if not prompt.images:
            return []
        if self._open_image is None or self._layout is None or not self._layout.takes_images:
            raise PromptRefused(
                "the prompt has images, but the model that is served reads none; set model.path "
                "to a model that does"
            )
        images = []
        for digest in prompt.images:
            image = decode_image(self._open_image(digest))
            images.append(RgbImage(digest, image.width, image.height, image.tobytes()))
        return images

    def _problem_of_started(self, prompt: PromptRequest, request: GenerateRequest) -> str:
        """Returns why the responses that were started cannot be continued; empty if they can."""
        if not prompt.started:
            return ""
        if len(prompt.started) != request.group_size:
            return f"{len(prompt.started)} responses are no group of {request.group_size}"
        for response in prompt.started:
            ended = response.finish_reason is not None
            if len(response.token_ids) > request.max_tokens - (0 if ended else 1):
                return f"a response has {len(response.token_ids)} tokens and has not ended"
            foreign = self._foreign_token(response.token_ids)
            if foreign is not None:
                return f"token {foreign} is not in the model's vocabulary"
        return ""

    def _foreign_token(self, token_ids: list[int]) -> int | None:
        """Returns a token that is not in the model's vocabulary, which would crash vLLM."""
        size = self._layout.vocabulary_size if self._layout is not None else 0
        return next((token for token in token_ids if not 0 <= token < size), None)

    # -- health

    async def check(self) -> None:
        """Raises `EngineLost` if vLLM has exited, does not answer, or makes no progress."""
        if self._server is None:
            raise EngineLost("vLLM does not run")
        if not self._server.running():
            raise EngineLost(f"vLLM has exited: {self._server.last_error()}")
        if self._nodes is not None:
            await self._nodes.check()
        api = self._server.api
        if not self._requests:
            try:
                async with asyncio.timeout(STALL_TIMEOUT_S):
                    await self._warm_up(api, self._version)
            except TimeoutError as error:
                raise EngineLost(
                    f"vLLM did not generate a token within {STALL_TIMEOUT_S:.0f} s"
                ) from error
        tokens, now = await api.generated_tokens(), time.monotonic()
        if tokens != self._progress[0] or not self._requests:
            self._progress = (tokens, now)
        elif now - self._progress[1] > STALL_TIMEOUT_S:
            raise EngineLost(
                f"vLLM has requests and has generated no token for {STALL_TIMEOUT_S:.0f} s"
            )

    async def metrics(self) -> str:
        """Returns vLLM's metrics; empty while it does not answer, which `check` reports."""
        try:
            return "" if self._server is None else await self._server.api.metrics()
        except EngineLost:
            return ""

    async def close(self) -> None:
        """Stops vLLM, on the worker nodes too."""
        server, self._server = self._server, None
        if server is not None:
            await server.stop()
        if self._nodes is not None and self._nodes_started:
            await self._nodes.stop()
            self._nodes_started = False


def _most_serious(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """Returns the error of which the others may be consequences; unforeseen ones come first."""
    kinds = (EngineFaulty, EngineLost, PromptRefused)

    def rank(error: BaseException) -> int:
        ranks = (rank for rank, kind in enumerate(kinds, 1) if isinstance(error, kind))
        return next(ranks, 0)

    return min(errors.exceptions, key=rank)
