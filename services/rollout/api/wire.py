"""Wire models of a rollout replica: token ids in, token ids and log-probs out.

`POST /v1/generate` takes a `GenerateRequest` and streams one JSON line, a `GeneratedGroup`, for
each prompt as soon as its group is complete. A stream that ends before every prompt has its group
was cut off; the client asks for the missing groups again, from this replica or another. If
`stream_every` is set, the stream also has the tokens of responses that have not ended yet
(`GeneratedTokens`), so that they can be continued, unless they turn out to be void
(`DiscardedTokens`). If the engine dies, the last line says so (`EngineDeath`).

The transformers engine takes and returns the same models.
"""

from __future__ import annotations

import hashlib
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

FinishReason = Literal["stop", "length"]


class Wire(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class StartedResponse(Wire):
    """The beginning of a response, or all of it, as sampled earlier, maybe by other weights."""

    token_ids: list[int]
    """Token ids sampled so far."""
    logprobs: list[float]
    """Log-prob of each of these tokens, in nats."""
    finish_reason: FinishReason | None = None
    """Reason why the response ended, as in `GeneratedResponse`; null if it has not ended."""


class PromptRequest(Wire):
    """One prompt, with the seed from which all randomness of its group comes."""

    prompt_token_ids: list[int] = Field(min_length=1)
    """Token ids of the prompt, up to where the response begins."""
    images: list[str] = []
    """SHA-256 of the prompt's images, in the order of their placeholders."""
    seed: int
    """Seed of the group. The rest of the request does not influence the group's samples."""
    started: list[StartedResponse] = []
    """Responses of the group to continue: all `group_size`, or none. Only an engine that streams
    tokens can continue them."""


class Sampling(Wire):
    """How to sample: from softmax(logits / temperature), without truncation for training."""

    temperature: float = Field(gt=0)
    """Sampling temperature."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling: the most probable tokens, up to and with the one that makes their
    probability reach top_p. 1 is off; only evaluations truncate."""
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
    stream_every: int = Field(0, ge=0)
    """Number of tokens of a response after which they are streamed; 0 streams complete groups only.
    The transformers engine, which generates responses as a whole, ignores it."""

    def digest(self) -> str:
        """Returns the SHA-256 of all that determines the distribution of the responses."""
        # Without images, the digest is that of a version without them: journals stay valid.
        prompts = {
            index: {"started"} if prompt.images else {"started", "images"}
            for index, prompt in enumerate(self.prompts)
        }
        text = self.model_dump_json(exclude={"stream_every": True, "prompts": prompts})
        return hashlib.sha256(text.encode()).hexdigest()


class GeneratedResponse(Wire):
    """One sampled response."""

    token_ids: list[int]
    """Sampled token ids, the end token included."""
    logprobs: list[float]
    """Log-prob of each token under the distribution from which it was sampled, in nats."""
    finish_reason: FinishReason
    """`stop` after an end token, `length` at `max_tokens`."""


class GeneratedGroup(Wire):
    """The responses to one prompt, sampled from one version of the weights, but for what was
    started."""

    index: int
    """Index of the prompt in the request."""
    policy_version: int
    """Version of the weights that was asked for."""
    responses: list[GeneratedResponse]
    """`group_size` responses; empty if the prompt was refused."""
    refused: str = ""
    """Reason why this engine can never answer the prompt; empty if it did."""
    failed: str = ""
    """The error with which the engine failed on the request; empty if it did not."""


class GeneratedTokens(Wire):
    """The next tokens of a response, whose group is not complete yet."""

    index: int
    """Index of the prompt in the request."""
    policy_version: int
    """Version of the weights that generated the tokens."""
    response: int
    """Index of the response in its group."""
    start: int
    """Number of tokens of the response before these, those it was continued from included."""
    token_ids: list[int]
    """Sampled token ids."""
    logprobs: list[float]
    """Log-prob of each token, in nats."""
    finish_reason: FinishReason | None = None
    """Reason why the response ended, as in `GeneratedResponse`. Only the last tokens of a response
    have one; it is null for those before."""


class DiscardedTokens(Wire):
    """All tokens streamed of a prompt's responses so far are void, and its group starts anew."""

    index: int
    """Index of the prompt in the request."""
    policy_version: int
    """Version of the weights that was asked for."""
    discarded: str
    """Reason, for people."""


Generated = GeneratedTokens | GeneratedGroup | DiscardedTokens
"""What an engine generates, piece by piece."""


class EngineDeath(Wire):
    """The last line of a stream whose engine died or hung; the replica starts another one.

    A stream that ends early without this line says nothing about the engine: the replica was
    stopped, its node or the network was lost.
    """

    died: str
    """The engine's last error, for people."""


StreamLine = Generated | EngineDeath
"""A line of a replica's stream."""

STREAM_LINE: TypeAdapter[StreamLine] = TypeAdapter(StreamLine)
"""Parses a line of a replica's stream."""
