"""Options and fixtures of the chart's tests."""

from __future__ import annotations

import pytest

from tests.charts.cases import CASES
from tests.charts.helm import VERSIONS, Object, render


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="overwrite tests/charts/golden with what the chart renders",
    )


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    # The option exists only when pytest is started on this folder.
    return bool(request.config.getoption("--update-golden", default=False))


@pytest.fixture(params=VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    """Each version of Helm that the chart supports."""
    return str(request.param)


@pytest.fixture(params=CASES)
def objects(request: pytest.FixtureRequest) -> list[Object]:
    """The objects that each case renders."""
    return render(CASES[request.param])


@pytest.fixture
def dev() -> list[Object]:
    return render(CASES["dev"])


@pytest.fixture
def production() -> list[Object]:
    return render(CASES["production"])


@pytest.fixture
def everything() -> list[Object]:
    return render(CASES["everything"])
