"""vLLM's HTTP API: the only place that knows it.

Token ids in and out by `/inference/v1/generate`, which also says by which version of the weights
each token was made. The routes that load weights exist in vLLM's development mode only and ask
nobody for a password: the server must listen on loopback.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import httpx

from services.rollout.api.offers import WeightOffer
from services.rollout.api.wire import GeneratedResponse, Sampling
from services.rollout.driver import EngineLost

ADMIN_S = 600.0
"""For loading weights: minutes for large models."""
QUICK_S = 20.0
JOIN_S = 60.0
"""For a group to come together; a trainer that has gone never joins."""
IDLE_S = 2.0
"""A connection that nobody used for so long is not used again. vLLM hangs up after 5: what is sent
at that moment is lost, and would look as if vLLM were."""
LOWEST_LOGPROB = -9998.0
"""vLLM writes -9999 for what is not a number."""


class PromptRefused(Exception):
    """vLLM says that it cannot take the prompt."""


class VllmApi:
    """One vLLM server. Nothing is asked twice: who calls knows whether that is safe."""

    def __init__(self, port: int) -> None:
        self._http = httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}",
            limits=httpx.Limits(
                max_connections=None, max_keepalive_connections=256, keepalive_expiry=IDLE_S
            ),
            timeout=httpx.Timeout(None, connect=5.0),
        )

    async def close(self) -> None:
        await self._http.aclose()

    # -- generation

    async def generate(
        self, token_ids: list[int], sampling: Sampling, seed: int, stop: list[int], version: str
    ) -> list[GeneratedResponse]:
        """`group_size` responses to a prompt, every token of them by `version`.

        Sample i has the seed `seed + i`. Raises `PromptRefused` and `EngineLost`.
        """
        body = {
            "token_ids": token_ids,
            "sampling_params": {
                "n": sampling.group_size,
                "temperature": sampling.temperature,
                # The whole distribution, whatever a model's generation_config.json says.
                "top_p": 1.0,
                "top_k": 0,
                "min_p": 0.0,
                "repetition_penalty": 1.0,
                "max_tokens": sampling.max_tokens,
                # vLLM takes 64 bits with a sign, and adds the index of the sample.
                "seed": seed % (1 << 62),
                "logprobs": 0,
                "stop_token_ids": stop,
                "detokenize": False,
            },
        }
        answer = await self._ask("POST", "/inference/v1/generate", json=body)
        choices = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
        if len(choices) != sampling.group_size:
            raise EngineLost(f"vLLM gave {len(choices)} responses, not {sampling.group_size}")
        return [_response(choice, version) for choice in choices]

    # -- weights, in the order in which they are used

    async def pause(self) -> None:
        """Nothing is scheduled until `resume`."""
        await self._ask("POST", "/pause", params={"mode": "keep"})

    async def load(self, directory: str) -> None:
        """Replaces the weights. The directory must have been checked: a bad one kills vLLM."""
        kwargs = {"weights_path": directory}
        await self._ask(
            "POST",
            "/collective_rpc",
            json={"method": "load_policy", "kwargs": kwargs},
            timeout=ADMIN_S,
        )

    async def workers(self) -> int:
        """How many have a part of the weights, or a copy."""
        return int((await self._ask("GET", "/get_world_size"))["world_size"])

    async def receive(self, offer: WeightOffer, receivers: int) -> None:
        """Replaces the weights by what rank 0 of the offered group sends."""
        group = {
            "nccl_unique_id_b64": offer.unique_id,
            "rank_offset": 1,
            "world_size": receivers + 1,
            # One broadcast a tensor.
            "packed": False,
        }
        tensors = {
            "names": [each.name for each in offer.parameters],
            "dtype_names": [each.dtype for each in offer.parameters],
            "shapes": [each.shape for each in offer.parameters],
        }
        for path, body, seconds in (
            ("/init_weight_transfer_engine", {"init_info": group}, JOIN_S),
            ("/start_weight_update", {}, ADMIN_S),
            ("/update_weights", {"update_info": tensors}, ADMIN_S),
            ("/finish_weight_update", {}, ADMIN_S),
            ("/shutdown_weight_transfer_engine", {}, QUICK_S),
        ):
            await self._ask("POST", path, json=body, timeout=seconds)

    async def reset_prefix_cache(self) -> bool:
        """Forgets keys and values made by other weights; whether all of them are forgotten."""
        answer = await self._ask("POST", "/reset_prefix_cache")
        return bool(answer["success"])

    async def tag(self, version: str) -> None:
        """Names the weights: loading alone does not."""
        await self._ask("POST", "/update_weight_version", json={"new_version": version})

    async def tagged(self) -> str:
        return str((await self._ask("GET", "/weight_info"))["weight_version"])

    async def resume(self) -> None:
        await self._ask("POST", "/resume")

    # -- health

    async def healthy(self) -> bool:
        try:
            return (await self._http.get("/health", timeout=QUICK_S)).is_success
        except httpx.HTTPError:
            return False

    async def version(self) -> str:
        """Of vLLM."""
        return str((await self._ask("GET", "/version"))["version"])

    async def generated_tokens(self) -> float:
        """Since it started: a number that moves while it works."""
        text = (await self._raw("GET", "/metrics", timeout=QUICK_S)).text
        return sum(
            float(line.rsplit(" ", 1)[1])
            for line in text.splitlines()
            if line.startswith("vllm:generation_tokens_total")
        )

    async def _ask(self, method: str, path: str, **arguments: Any) -> Any:
        response = await self._raw(method, path, **arguments)
        return response.json() if response.content else None

    async def _raw(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        arguments.setdefault("timeout", None if path.startswith("/inference") else QUICK_S)
        try:
            response = await self._http.request(method, path, **arguments)
        except httpx.HTTPError as error:
            raise EngineLost(f"vLLM does not answer {path}: {error!r}") from error
        if response.status_code == 400:
            raise PromptRefused(response.json()["error"]["message"])
        if not response.is_success:
            raise EngineLost(f"vLLM answers {path} with {response.status_code}: {response.text}")
        return response


def _response(choice: dict[str, Any], version: str) -> GeneratedResponse:
    token_ids, content = choice["token_ids"], choice["logprobs"]["content"]
    logprobs = [float(token["logprob"]) for token in content]
    if [token["token_id"] for token in content] != token_ids or min(logprobs) < LOWEST_LOGPROB:
        raise EngineLost("vLLM gave log-probs that are not those of its tokens, or no numbers")
    if choice["finish_reason"] not in ("stop", "length"):
        raise EngineLost(f"vLLM ended a response by {choice['finish_reason']!r}")
    _check_versions(choice["weight_versions"], len(token_ids), version)
    return GeneratedResponse(
        token_ids=token_ids, logprobs=logprobs, finish_reason=choice["finish_reason"]
    )


def _check_versions(spans: list[dict[str, Any]], tokens: int, version: str) -> None:
    """Every token is by `version`: the spans are in order and cover all of them."""
    edges = [0, *(span["end"] for span in spans)]
    starts = [span["start"] for span in spans]
    whole = starts == edges[:-1] and edges[-1] == tokens and all(a < b for a, b in pairwise(edges))
    if not whole or {span["version"] for span in spans} != {version}:
        raise EngineLost(f"vLLM generated with {spans} instead of version {version} throughout")
