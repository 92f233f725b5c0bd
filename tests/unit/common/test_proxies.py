"""Services of this machine are reached without a proxy."""

from __future__ import annotations

import os
import socket
from typing import Any
from urllib.request import getproxies, proxy_bypass

import pytest

from services.common.proxies import bypass_proxies, proxy_for


@pytest.mark.parametrize("name", ["no_proxy", "NO_PROXY"])
def test_local_hosts_are_added_to_those_that_the_environment_names(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("no_proxy", "NO_PROXY"):
        # Once monkeypatch has set a variable, it also undoes what `bypass_proxies` sets it to.
        monkeypatch.setenv(variable, "")
        monkeypatch.delenv(variable)
    monkeypatch.setenv("HTTP_PROXY", "http://proxy:3128")
    monkeypatch.setenv(name, ".svc")
    bypass_proxies()
    bypass_proxies()
    assert getproxies()["http"] == "http://proxy:3128"
    assert os.environ["NO_PROXY"] == ".svc,127.0.0.1,localhost,::1"
    for host in ("127.0.0.1:8700", "localhost:9000", "s3.storage.svc"):
        assert proxy_bypass(host)
    assert not proxy_bypass("s3.example.com")


@pytest.mark.parametrize(
    ("host", "addresses", "proxied"),
    [
        ("node-7.example.com", ["192.0.2.1", "127.0.1.1"], False),
        ("Node-7.example.com", ["::1"], False),
        ("node-7.example.com", ["192.0.2.1", "2001:db8::5"], True),
        ("node-7.example.com", [], True),
        ("node-8.example.com", None, True),
        ("example.com", None, True),
    ],
)
@pytest.mark.parametrize("own", ["node-7", "NODE-7", "node-7.local"])
def test_a_longer_name_of_this_machine_is_reached_without_a_proxy(
    own: str,
    host: str,
    addresses: list[str] | None,
    proxied: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Names with another first label are not looked up."""
    asked: list[str] = []

    def look_up(name: str, *_: object, **__: object) -> list[tuple[Any, ...]]:
        asked.append(name)
        if not addresses:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, 0, 0, "", (address, 0)) for address in addresses]

    for variable in ("http_proxy", "HTTP_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HTTP_PROXY", "http://proxy:3128")
    monkeypatch.setattr(socket, "gethostname", lambda: own)
    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    assert (proxy_for(f"http://{host}:8700") is not None) == proxied
    assert asked == ([] if addresses is None else [host.lower()])
