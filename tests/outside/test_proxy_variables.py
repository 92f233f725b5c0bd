"""Commands and services work whatever the proxy variables hold, and no proxy gets local calls."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import httpx
import psutil
import pytest

from bapo_core.errors import ConfigError
from services.common.http_options import client_options
from services.common.objectstore import ObjectStore
from services.common.proxies import proxy_for
from services.common.settings import ObjectStoreSettings
from services.stack.stack import Endpoints
from tests.outside.servers import check_message

CLOSED = "127.0.0.1:9"
"""Where no proxy listens."""
VARIABLES = (
    {"ALL_PROXY": f"socks5://{CLOSED}"},
    {"HTTP_PROXY": f"http://{CLOSED}", "NO_PROXY": "[::1]"},
    {"HTTP_PROXY": f"http://{CLOSED}", "NO_PROXY": "fd00::/8,.svc,10.0.0.0/8"},
    {"HTTP_PROXY": f"socks5h://{CLOSED}", "NO_PROXY": "[::1]:8700"},
    {"SSL_CERT_FILE": "/etc/no-such-file.pem"},
)


@pytest.fixture(autouse=True)
def no_proxy_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy", "SSL_CERT_FILE"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.mark.parametrize("variables", VARIABLES, ids=str)
def test_a_command_reaches_the_stack_of_this_machine(
    variables: dict[str, str], stack: Endpoints
) -> None:
    environment = {**os.environ, "BAPO_BUFFER_URL": stack.buffer_url, "BAPO_TOKEN": stack.token}
    listed = subprocess.run(
        [sys.executable, "-m", "services.cli", "runs"],
        env={**environment, **variables},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (listed.returncode, "Traceback" in listed.stderr) == (0, False), listed.stderr


@pytest.mark.parametrize("variables", VARIABLES[:-1], ids=str)
def test_libraries_can_make_clients_after_the_start_of_a_process(variables: dict[str, str]) -> None:
    code = "from services.common.proxies import bypass_proxies; bypass_proxies(); import httpx; "
    made = subprocess.run(
        [sys.executable, "-c", f"{code}httpx.Client().close()"],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert made.returncode == 0, made.stderr


@pytest.mark.parametrize(
    ("entry", "url", "proxied"),
    [
        ("", "https://bapo.example.com", True),
        ("example.com", "https://bapo.example.com", False),
        ("*.example.com", "https://bapo.example.com", False),
        ("ample.com", "https://bapo.example.com", True),
        ("bapo.example.com:443", "https://bapo.example.com", False),
        ("bapo.example.com:8443", "https://bapo.example.com", True),
        ("*", "https://bapo.example.com", False),
        ("10.0.0.0/8", "http://10.1.2.3:8700", False),
        ("10.0.0.0/8", "http://11.1.2.3:8700", True),
        ("fd00::/8", "http://[fd00::5]:8700", False),
        ("[fd00::5]", "http://[fd00::5]:8700", False),
        ("[fd00::5]:8700", "http://[fd00::5]:8700", False),
        ("fd00::/8", "http://[2001:db8::5]:8700", True),
        ("", "http://127.0.0.1:8700", False),
        ("", "http://[::1]:8700", False),
        ("", "http://localhost:8700", False),
        ("", "http://bapo-buffer.team.svc:8700", False),
        ("", "http://bapo-buffer.team.svc.cluster.local:8700", False),
        ("", "http://bapo-buffer:8700", False),
    ],
)
def test_what_no_proxy_stands_for(
    entry: str, url: str, proxied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", f"http://{CLOSED}")
    monkeypatch.setenv("HTTPS_PROXY", f"http://{CLOSED}")
    monkeypatch.setenv("NO_PROXY", entry)
    assert (proxy_for(url) is not None) == proxied


def test_no_address_of_this_machine_is_proxied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", f"http://{CLOSED}")
    monkeypatch.setattr(socket, "gethostname", lambda: "Node-7.example.com")
    own = [
        f"[{each.address}]" if each.family == socket.AF_INET6 else each.address
        for addresses in psutil.net_if_addrs().values()
        for each in addresses
        if each.family in (socket.AF_INET, socket.AF_INET6) and "%" not in each.address
    ]
    assert own
    for host in (*own, "node-7.example.com"):
        assert proxy_for(f"http://{host}:8700") is None
    for host in ("192.0.2.1", "[2001:db8::5]", "node-8.example.com"):
        assert proxy_for(f"http://{host}:8700") is not None


@pytest.fixture
def socks_proxy() -> Iterator[str]:
    """Serves SOCKS5 without authentication; answers each request of HTTP with the asked host."""

    def serve(client: socket.socket) -> None:
        with client:
            client.recv(client.recv(2)[1])  # methods
            client.sendall(b"\x05\x00")
            head = client.recv(5)
            host = client.recv(head[4] + 2)[:-2]
            client.sendall(b"\x05\x00\x00\x01" + bytes(6))
            client.recv(65536)
            client.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(host) + host)

    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            client, _ = listener.accept()
            serve(client)

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield f"socks5h://127.0.0.1:{listener.getsockname()[1]}"
        thread.join(10)


def test_a_service_elsewhere_is_called_through_a_socks_proxy(
    socks_proxy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALL_PROXY", socks_proxy)
    url = "http://bapo.example.com"
    with httpx.Client(**client_options(url)) as client:
        assert client.get(url).text == "bapo.example.com"


def test_an_object_store_behind_a_socks_proxy_is_refused_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ALL_PROXY", "socks5://user:swordfish@127.0.0.1:1080")
    settings = ObjectStoreSettings.model_validate(
        {
            "endpoint": "https://s3.example.com",
            "bucket": "bapo",
            "access_key": "access-key",
            "secret_key": "secret-key",
        }
    )
    with pytest.raises(ConfigError, match=r"through the proxy socks5://.*NO_PROXY") as caught:
        ObjectStore(settings)
    assert "swordfish" not in check_message(str(caught.value))


def test_a_file_of_certificates_that_does_not_exist_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", "/etc/no-such-file.pem")
    with pytest.raises(
        ConfigError, match=r"SSL_CERT_FILE is /etc/no-such-file.pem, which does not"
    ) as caught:
        client_options("https://bapo.example.com")
    check_message(str(caught.value))
