"""The shapes that cross the wire of a rollout replica: token ids in, token ids and log-probs out.

`POST /v1/generate` takes a `GenerateRequest` and answers with a line of JSON for each group, a
`GeneratedGroup`, as soon as it is whole. An answer that ends before every prompt has its group was
cut off: what is missing may be asked for again, here or elsewhere.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Wire(BaseModel):
    model_config = ConfigDict(extra="forbid")


class PromptRequest(Wire):
    prompt_token_ids: list[int] = Field(min_length=1)
    seed: int


class Sampling(Wire):
    """How to sample: the whole distribution at `temperature`, `group_size` times a prompt."""

    temperature: float = Field(gt=0)
    max_tokens: int = Field(ge=1)
    group_size: int = Field(ge=1)


class GenerateRequest(Sampling):
    """`group_size` responses for each prompt, all by one version of the weights."""

    policy_version: int = Field(ge=1)
    manifest_digest: str
    """Of the weights: a run that was rewound may publish another version of the same number."""
    prompts: list[PromptRequest] = Field(min_length=1)


class GeneratedResponse(Wire):
    """Sampled tokens, the end token included, with their log-probs under what sampled them."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: Literal["stop", "length"]


class GeneratedGroup(Wire):
    """The responses to one prompt. `policy_version` is the version that did generate them."""

    index: int
    """Of the prompt in the request."""
    policy_version: int
    responses: list[GeneratedResponse]
    refused: str = ""
    """Why this engine can never answer the prompt; then there are no responses."""
