"""Wire models of a worker node: one of the nodes over which a replica's vLLM shards the model.

The replica is the leader node. It has every version of the weights fetched by all worker nodes,
and starts and stops a vLLM without an API server on each of them.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from services.buffer.api.wire import StoredVersion


class Wire(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class FetchProgress(Wire):
    """Answer to a request to fetch a version of the weights."""

    complete: bool
    """Whether all files are on the node's disk and have the digests of their manifest."""


class KeptVersions(Wire):
    """The versions of the weights that may be needed again; the node deletes the others."""

    versions: list[StoredVersion]


class StartEngine(Wire):
    """The vLLM that a worker node runs: the leader's own, without an API server."""

    weights: str = Field(pattern=r"^v\d+-[0-9a-f]+$")
    """Name of the version's directory, which the node has fetched."""
    longest_sequence: int = Field(ge=1)
    """Maximum number of tokens of prompt and response together."""
    dtype: str
    """Data type of the weights."""
    arguments: list[str]
    """Further arguments of vLLM."""
    rank: int = Field(ge=1)
    """Rank of the node; the leader has rank 0."""
    nodes: int = Field(ge=2)
    """Number of nodes, the leader included."""
    leader_host: str
    """Host at which the nodes reach the leader."""
    leader_port: int = Field(ge=1, le=65_535)
    """Port at which the ranks meet. Each start of vLLM has another one, so that a process that is
    left of an earlier start cannot join."""


class EngineState(Wire):
    """Whether a worker node's vLLM runs."""

    running: bool
    """Whether the process that was started last is alive."""
    detail: str = ""
    """The reason if it is not."""
