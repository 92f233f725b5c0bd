"""Parses a request's body into responses to score, and encodes results as the answer's body.

Bodies have thousands of responses, so both directions are one pass of compiled code, with as little
Python for each response as possible.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pydantic import ValidationError
from pydantic_core import ErrorDetails, to_json

from bapo_core.reward_files import FUNCTION, LARGEST_FILE
from bapo_core.tasks import task_names
from services.common.problems import Problem
from services.verifier.api.wire import LARGEST_PAYLOAD, MOST_RESPONSES, VerifyRequest
from services.verifier.worker import Result, Work

_SHOWN_ERRORS = 5


def too_large(detail: str) -> Problem:
    return Problem(413, "Too large", detail)


def read_request(body: bytes, known_tasks: Sequence[str]) -> VerifyRequest:
    """Parses a request and checks every limit. Raises `Problem` (400, 413 or 422)."""
    try:
        request = VerifyRequest.model_validate_json(body)
    except ValidationError as error:
        raise _as_problem(error) from error
    # A package with tasks may have been installed since the service started.
    if request.task not in known_tasks and request.task not in (now := task_names()):
        raise _invalid(f"task: {request.task!r} does not exist; choose {', '.join(now)}")
    responses = sum(len(item.responses) for item in request.items)
    if responses > MOST_RESPONSES:
        raise too_large(
            f"items: {responses} responses in one request; send at most {MOST_RESPONSES}"
        )
    options = dict(request.options)
    if request.task == FUNCTION and isinstance(source := options.pop("source", None), str):
        _check_size("options.source", len(source.encode(errors="replace")), LARGEST_FILE)
    _check_size("options", len(to_json(options)))
    for number, item in enumerate(request.items):
        _check_size(f"items.{number}.payload", len(to_json(item.payload)))
    return request


def work_of(request: VerifyRequest) -> list[Work]:
    """Returns (payload, response) pairs, in order."""
    return [(item.payload, response) for item in request.items for response in item.responses]


def answer_body(request: VerifyRequest, results: Sequence[Result]) -> bytes:
    """Returns a `VerifyAnswer` as JSON."""
    flat = iter(
        [
            {
                "reward": reward,
                "status": status,
                "extracted": answer,
                "detail": detail,
                "parts": parts,
            }
            for reward, status, answer, detail, parts in results
        ]
    )
    verdicts = [[next(flat) for _ in item.responses] for item in request.items]
    return to_json({"verdicts": verdicts})


def count_statuses(results: Sequence[Result]) -> Counter[str]:
    return Counter([status for _, status, *_ in results])


def _check_size(field: str, size: int, largest: int = LARGEST_PAYLOAD) -> None:
    if size > largest:
        raise _invalid(f"{field}: {size} bytes as JSON; send at most {largest}")


def _invalid(detail: str) -> Problem:
    return Problem(422, "Invalid request", detail)


def _as_problem(error: ValidationError) -> Problem:
    # Without the input, which may be huge and is hostile.
    errors = error.errors(include_url=False, include_input=False)
    if errors[0]["type"] == "json_invalid":
        return Problem(400, "Bad request", f"body: {errors[0]['msg']}; send JSON in UTF-8")
    lines = [_describe(detail) for detail in errors[:_SHOWN_ERRORS]]
    if len(errors) > _SHOWN_ERRORS:
        lines.append(f"and {len(errors) - _SHOWN_ERRORS} more")
    return _invalid("; ".join(lines))


def _describe(error: ErrorDetails) -> str:
    return f"{'.'.join(map(str, error['loc'])) or 'body'}: {error['msg']}"
