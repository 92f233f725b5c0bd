"""What trainer and replicas say to each other about weights that are sent without files.

`POST /v1/weights` of a replica takes a `WeightOffer` and answers with `OfferTaken` once its engine
joins the group; 409 if the version was not wanted in time.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

STANDS_S = 60.0
"""How long an offer stands. A replica drains in that time, or takes the version's files."""


class Wire(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Parameter(Wire):
    name: str
    dtype: str
    """As torch calls it: bfloat16."""
    shape: list[int]


class WeightOffer(Wire):
    """Weights that a trainer has at hand, to be sent straight to a replica's engine by NCCL."""

    policy_version: int = Field(ge=1)
    manifest_digest: str
    parameters: list[Parameter] = Field(min_length=1)
    """In the order in which they are sent; names as in the files of such models."""
    unique_id: str = Field(min_length=1)
    """NCCL's, of the group to join, as base64. The trainer is its rank 0."""


class OfferTaken(Wire):
    """The engine joins the group now."""

    receivers: int = Field(ge=1)
    """Workers of the engine: the group's ranks from 1 on."""
