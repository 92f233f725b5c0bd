"""Services of this machine are reached without a proxy."""

from __future__ import annotations

import os
from urllib.request import getproxies, proxy_bypass

import pytest

from services.common.proxies import bypass_proxies


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
