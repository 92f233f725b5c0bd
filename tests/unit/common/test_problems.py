"""What a service did not foresee is answered with problem details as well."""

from __future__ import annotations

from fastapi import FastAPI
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
