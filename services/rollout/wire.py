"""The shapes that cross the wire of a rollout server: token ids in, token ids and log-probs out."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Wire(BaseModel):
    model_config = ConfigDict(extra="forbid")


class PromptRequest(Wire):
    prompt_token_ids: list[int] = Field(min_length=1)
    seed: int


class GenerateRequest(Wire):
    """`group_size` responses for each prompt, all by `policy_version`."""

    policy_version: int = Field(ge=1)
    temperature: float = Field(gt=0)
    max_tokens: int = Field(ge=1)
    group_size: int = Field(ge=1)
    prompts: list[PromptRequest]


class GeneratedResponse(Wire):
    """Sampled tokens, the end token included, with their log-probs under what sampled them."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: Literal["stop", "length"]


class GenerateAnswer(Wire):
    """`policy_version` is the version that did generate."""

    policy_version: int
    groups: list[list[GeneratedResponse]]
