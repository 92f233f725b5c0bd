"""A proxy leaves the path that leads to the buffer service in requests, as an Ingress does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from bapo_core.errors import ConfigError
from services.buffer.settings import OWN_PATHS, BufferSettings
from services.stack.stack import Endpoints
from tests.integration.support.driver import Driver, small_config
from tests.outside.servers import BufferService, buffer_service, check_message
from tests.outside.test_secrets import ENVIRONMENT

PREFIX = "/team/bapo"


@pytest.fixture(scope="module")
def service(stack: Endpoints, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BufferService]:
    """Yields a service that is served below a path as well."""
    directory: Path = tmp_path_factory.mktemp("prefix")
    with buffer_service(stack, directory, variables={"BAPO_ROOT_PATH": PREFIX}) as running:
        yield running


def get(service: BufferService, path: str, token: str = "") -> httpx.Response:
    headers = {"Authorization": f"Bearer {token or service.endpoints.token}"}
    return httpx.get(f"{service.url}{path}", headers=headers)


@pytest.mark.parametrize("path", ["/health", "/readyz", "/metrics", "/v1/runs", "/docs", "/"])
def test_each_path_is_served_with_and_without_the_prefix(service: BufferService, path: str) -> None:
    assert get(service, path).status_code == get(service, PREFIX + path).status_code == 200


def test_the_prefix_alone_is_the_dashboard(service: BufferService) -> None:
    page = get(service, PREFIX)
    assert (page.status_code, page.text) == (200, get(service, "/").text)
    assert f'src="{PREFIX}/dashboard/app.js"' in page.text


def test_the_prefix_is_removed_once_and_as_a_whole(service: BufferService) -> None:
    for path in (PREFIX * 2, f"{PREFIX}{PREFIX}/v1/runs", f"{PREFIX}s/v1/runs", "/team/v1/runs"):
        answer = get(service, path)
        assert answer.status_code == 404
        check_message(answer.json()["detail"])


def test_a_token_of_one_run_reads_that_run_alone_below_the_prefix(service: BufferService) -> None:
    for name in ("mine", "theirs"):
        Driver(service.endpoints, small_config(name))
    token = service.client().create_token("one", "read", run="mine").token
    for prefix in ("", PREFIX):
        assert get(service, f"{prefix}/v1/runs/mine", token).status_code == 200
        assert get(service, f"{prefix}/v1/runs/theirs", token).status_code == 403
    assert get(service, f"{PREFIX * 2}/v1/runs/theirs", token).status_code == 404


@pytest.mark.parametrize(
    "path", ["team", "/team/", "/", "//team", "/a b", "/a/../b", *(f"/{own}" for own in OWN_PATHS)]
)
def test_a_path_that_cannot_be_told_apart_is_refused_by_name(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (ENVIRONMENT | {"BAPO_ROOT_PATH": path}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"BAPO_ROOT_PATH: ") as caught:
        BufferSettings.load()
    check_message(str(caught.value))


def test_the_refused_paths_are_all_that_the_service_serves(service: BufferService) -> None:
    paths = get(service, "/openapi.json").json()["paths"]
    served = {path.split("/")[1] for path in paths} | {"dashboard", "docs", "openapi.json"}
    assert served == set(OWN_PATHS)
