"""Parameters that many routes share."""

from __future__ import annotations

from typing import Annotated

from fastapi import Header, Path, Query

from services.buffer.api import wire

LONGEST_WAIT_S = 30.0
LARGEST = 2**53
"""No counter of ours comes near; above it JSON numbers are not exact everywhere."""

Attempt = Annotated[
    int, Header(alias="X-Bapo-Attempt", ge=0, le=LARGEST, description="Fencing number of the run")
]
Wait = Annotated[float, Query(ge=0, le=LONGEST_WAIT_S, description="Seconds to wait until ready")]
RunName = Annotated[str, Path(pattern=wire.RUN_NAME, examples=["countdown"])]
Step = Annotated[int, Path(ge=1, le=LARGEST, description="Trainer step, from 1 on")]
Limit = Annotated[int, Query(ge=1, le=1000, description="Items on a page")]
Cursor = Annotated[
    str | None, Query(max_length=2000, description="The `next` of the page before this one")
]
Points = Annotated[
    int | None,
    Query(ge=1, le=2000, description="At most so many steps, evenly apart, the last among them"),
]
AtStep = Annotated[int | None, Query(ge=0, le=LARGEST, description="As of this step; default: now")]
Uid = Annotated[str, Query(min_length=1, max_length=512, description="The prompt's uid")]

ERRORS: dict[int | str, dict[str, object]] = {
    status: {"description": words, "content": {"application/problem+json": {}}}
    for status, words in {
        400: "Refused; `detail` says which field and what would be right",
        401: "No token, or one that is not known",
        403: "The token's scope is too small",
        404: "There is no such thing",
        409: "Not now: superseded, out of order, or already something else",
        413: "The body is too large",
        422: "Not a valid request; `detail` names the field",
        429: "Too many failures; see Retry-After",
        503: "Something is away for the moment; repeat the call",
    }.items()
}
