"""Wire models of weights that the trainer broadcasts to replicas by NCCL, without files.

`POST /v1/weights` of a replica takes a `WeightOffer` and answers with `OfferTaken` when its engine
joins the communicator; with 409 if the replica did not accept the offer within `OFFER_TTL_S`.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

OFFER_TTL_S = 60.0
"""Seconds after which an offer expires. A replica must drain within that time to accept it;
otherwise it loads the version's files."""


class Wire(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class Parameter(Wire):
    """One tensor of the model, without its values."""

    name: str
    """Name of the tensor, as in the model's safetensors files."""
    dtype: str
    """Data type by its name in torch, such as `bfloat16`."""
    shape: list[int]
    """Shape of the tensor."""


class WeightOffer(Wire):
    """A version of the weights that the trainer can broadcast to a replica's engine."""

    policy_version: int = Field(ge=1)
    """Number of the version."""
    manifest_digest: str
    """Digest of the version's manifest."""
    parameters: list[Parameter] = Field(min_length=1)
    """All tensors, in the order in which they are broadcast."""
    unique_id: str = Field(min_length=1)
    """NCCL unique id of the communicator to join, as base64. The trainer is its rank 0."""


class OfferTaken(Wire):
    """The replica has accepted the offer, and its engine joins the communicator."""

    receivers: int = Field(ge=1)
    """Number of the engine's workers, which have the ranks 1 to `receivers`."""
