"""Servers answer in clusters of IPv4, of IPv6, and of both."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from bapo_core.errors import BapoError
from services.common.listener import bind_address
from tests.charts.cases import DEV
from tests.charts.helm import container_of, render
from tests.outside.only_ipv6 import ADDRESS, KEYS
from tests.outside.servers import check_message

ROOT = Path(__file__).parents[2]


def test_the_socket_for_all_addresses_takes_both_families() -> None:
    with bind_address("::", 0) as listener:
        assert listener.family == socket.AF_INET6
        assert listener.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY) == 0
        listener.listen()
        port = listener.getsockname()[1]
        socket.create_connection(("127.0.0.1", port), timeout=10).close()


def test_without_ipv6_the_socket_for_all_addresses_takes_ipv4(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    with bind_address("::", 0) as listener:
        listener.listen()
        assert listener.getsockname()[0] == "0.0.0.0"
        socket.create_connection(listener.getsockname(), timeout=10).close()


def test_answers_are_sent_without_delay() -> None:
    async def connect() -> int:
        accepted: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        async def read_option(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connection = writer.get_extra_info("socket")
            accepted.set_result(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        listener = bind_address("::", 0)
        async with await asyncio.start_server(read_option, sock=listener):
            _, writer = await asyncio.open_connection("127.0.0.1", listener.getsockname()[1])
            option = await asyncio.wait_for(accepted, 10)
            writer.close()
            return option

    assert asyncio.run(connect()) == 1


def test_an_address_in_use_is_named_with_the_remedy() -> None:
    with bind_address("127.0.0.1", 0) as listener:
        listener.listen()
        port = listener.getsockname()[1]
        for host in ("127.0.0.1", "::"):
            with pytest.raises(
                BapoError, match=rf"cannot listen on {host}, port {port} .*BAPO_PO"
            ) as caught:
                bind_address(host, port)
            check_message(str(caught.value))


@pytest.mark.outside
def test_servers_of_the_chart_answer_where_there_is_only_ipv6(tmp_path: Path) -> None:
    """A pod of a cluster of IPv6 alone also has 127.0.0.1, which other pods do not reach."""
    unshare = shutil.which("unshare")
    if unshare is None or shutil.which("ip") is None:
        pytest.skip("needs unshare and ip: apt-get install util-linux iproute2")
    namespace = [unshare, "--net", "--kill-child"]
    if os.geteuid() != 0:  # Postgres refuses to run as root.
        namespace += ["--map-current-user", "--keep-caps"]
    allowed = subprocess.run([*namespace, "true"], capture_output=True, text=True)
    if allowed.returncode:
        pytest.skip(f"needs the right to make a network namespace: {allowed.stderr.strip()}")
    identities = tmp_path / "identities.json"
    identity = {"name": "bapo", "credentials": [KEYS], "actions": ["Admin"]}
    identities.write_text(json.dumps({"identities": [identity]}))
    (tmp_path / "data").mkdir()
    paths = {
        "/identities/identities.json": str(identities),
        "-dir=/data": f"-dir={tmp_path}/data",
        "$(POD_IP)": ADDRESS,
    }
    objects = render(DEV)
    command = container_of(objects, "StatefulSet", "bapo-s3")["command"]
    verifier = container_of(objects, "Deployment", "bapo-verifier")
    (host,) = (each["value"] for each in verifier["env"] if each["name"] == "BAPO_HOST")
    for inside, outside in paths.items():
        command = [argument.replace(inside, outside) for argument in command]
    command[0] = str(Path(sys.executable).with_name("weed"))
    addresses = f"ip link set lo up && ip -6 addr add {ADDRESS}/128 dev lo"
    program = [sys.executable, "-m", "tests.outside.only_ipv6"]
    program += [str(tmp_path), host, json.dumps(command)]
    done = subprocess.run(
        [*namespace, "sh", "-c", f'{addresses} && exec "$@"', "sh", *program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
