"""Wire models of a rollout replica: token ids in, token ids and log-probs out.

`POST /v1/generate` takes a `GenerateRequest` and streams one JSON line, a `GeneratedGroup`, for
each prompt as soon as its group is complete. A stream that ends before every prompt has its group
was cut off; the client asks for the missing groups again, from this replica or another.

The transformers engine takes and returns the same models.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Wire(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class PromptRequest(Wire):
    """One prompt, with the seed from which all randomness of its group comes."""

    prompt_token_ids: list[int] = Field(min_length=1)
    """Token ids of the prompt, up to where the response begins."""
    seed: int
    """Seed of the group. The rest of the request does not influence the group's samples."""


class Sampling(Wire):
    """How to sample: from softmax(logits / temperature), without truncation."""

    temperature: float = Field(gt=0)
    """Sampling temperature."""
    max_tokens: int = Field(ge=1)
    """Maximum number of tokens of a response, the end token included."""
    group_size: int = Field(ge=1)
    """G, the number of responses sampled for each prompt."""


class GenerateRequest(Sampling):
    """Prompts that one version of the weights must answer, `group_size` times each."""

    policy_version: int = Field(ge=1)
    """Version of the weights that must generate."""
    manifest_digest: str
    """Digest of that version's manifest. A run that was rewound may publish other weights under the
    same number."""
    prompts: list[PromptRequest] = Field(min_length=1)
    """Prompts to answer."""


class GeneratedResponse(Wire):
    """One sampled response."""

    token_ids: list[int]
    """Sampled token ids, the end token included."""
    logprobs: list[float]
    """Log-prob of each token under the distribution from which it was sampled, in nats."""
    finish_reason: Literal["stop", "length"]
    """`stop` after an end token, `length` at `max_tokens`."""


class GeneratedGroup(Wire):
    """The responses to one prompt, all sampled from the same version of the weights."""

    index: int
    """Index of the prompt in the request."""
    policy_version: int
    """Version of the weights that generated the responses."""
    responses: list[GeneratedResponse]
    """`group_size` responses; empty if the prompt was refused."""
    refused: str = ""
    """Reason why this engine can never answer the prompt; empty if it did."""
