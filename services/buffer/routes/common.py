"""Parameters and error responses that several routes share."""

from __future__ import annotations

from typing import Annotated

from fastapi import Header, Path, Query

from services.buffer.api import wire

LONGEST_WAIT_S = 30.0
LARGEST_CONFIG = 4 << 20
"""Largest body in bytes of a request with a configuration."""
LARGEST = 2**53
"""Upper bound of all counters and ids: JSON numbers above it are not exact in every reader."""

Attempt = Annotated[
    int,
    Header(
        alias="X-Bapo-Attempt",
        ge=0,
        le=LARGEST,
        description="Fencing number of the run's current attempt",
    ),
]
Wait = Annotated[
    float, Query(ge=0, le=LONGEST_WAIT_S, description="Seconds to wait for the answer to be ready")
]
RunName = Annotated[str, Path(pattern=wire.RUN_NAME, examples=["countdown"])]
Step = Annotated[int, Path(ge=1, le=LARGEST, description="Training step, from 1 on")]
Version = Annotated[int, Path(ge=1, le=LARGEST, description="Policy version, from 1 on")]
Limit = Annotated[int, Query(ge=1, le=1000, description="Largest number of items on a page")]
Cursor = Annotated[str | None, Query(max_length=2000, description="`next` of the previous page")]
Points = Annotated[
    int | None,
    Query(
        ge=1, le=2000, description="Largest number of steps, evenly spaced, the last one included"
    ),
]
EvaluationSet = Annotated[
    str | None,
    Query(max_length=32, description="Name of an evaluation set; default: the primary one"),
]
AsOfStep = Annotated[
    int | None, Query(ge=0, le=LARGEST, description="As of this step; default: the last one")
]
Uid = Annotated[str, Query(min_length=1, max_length=512, description="Identifier of the prompt")]

ERRORS: dict[int | str, dict[str, object]] = {
    status: {"description": description, "content": {"application/problem+json": {}}}
    for status, description in {
        400: "Refused; `detail` names the field and a valid value",
        401: "No token, or an unknown one",
        403: "The token's scope does not include the route",
        404: "Not found",
        409: "Conflict: superseded, out of order, or created before with other content",
        413: "The body is too large",
        422: "Invalid request; `detail` names the field",
        429: "Too many failures; see Retry-After",
        507: "The object store refused to store or to delete; `detail` has its reason",
        503: "A dependency does not answer at present; repeat the call",
    }.items()
}
"""Error responses of every route below `/v1`, for the OpenAPI document."""
