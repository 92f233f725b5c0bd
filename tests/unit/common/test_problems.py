"""What a service did not foresee is answered with problem details as well."""

from __future__ import annotations

from typing import Annotated

from fastapi import FastAPI, Path
from fastapi.testclient import TestClient

from services.common.errors import UNFORESEEN
from services.common.problems import install_problem_handlers


def test_an_unforeseen_exception_is_answered_with_problem_details_without_its_text() -> None:
    app = FastAPI()
    install_problem_handlers(app)

    @app.get("/broken")
    def broken() -> None:
        raise KeyError("a value that may be secret")

    answer = TestClient(app, raise_server_exceptions=False).get("/broken")
    assert answer.status_code == 500
    assert answer.headers["content-type"] == "application/problem+json"
    problem = answer.json()
    assert problem["type"] == UNFORESEEN
    assert problem["detail"] == (
        "GET /broken met an unforeseen KeyError; the log of the service has its traceback"
    )


def test_a_text_that_matches_no_pattern_is_answered_with_the_rule_in_words() -> None:
    app = FastAPI()
    install_problem_handlers(app, {"^[a-z]+$": "a name has lower-case letters"})

    @app.get("/runs/{name}/steps/{step}")
    def read(
        name: Annotated[str, Path(pattern="^[a-z]+$")],
        step: Annotated[str, Path(pattern="^[0-9]+$")],
    ) -> None: ...

    problem = TestClient(app).get("/runs/Mine/steps/x").json()
    assert problem["detail"] == (
        "path.name is 'Mine': a name has lower-case letters; "
        "path.step: String should match pattern '^[0-9]+$'"
    )
