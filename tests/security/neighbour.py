"""Acts as another user of the machine."""

from __future__ import annotations

import json
import os
import pwd
import socket
import traceback
from collections.abc import Callable
from contextlib import suppress
from ipaddress import ip_address
from typing import Any

import psutil

OTHER_USER = "nobody"


def other_user() -> dict[str, Any]:
    """Returns arguments of `subprocess` that run a program as another user, where we are root.

    Other users than root cannot; their tests act as a process that has no file of the stack.
    """
    if os.geteuid():
        return {}
    entry = pwd.getpwnam(OTHER_USER)
    return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}


def as_other_user(work: Callable[[], Any], entry: pwd.struct_passwd | None = None) -> Any:
    """Calls a function as another user, in a fork of this process; returns what it returns.

    entry: the user, `OTHER_USER` unless given.

    Python's interpreter may be in a directory that the other user cannot enter.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        status = 1
        try:
            if not os.geteuid():
                entry = entry or pwd.getpwnam(OTHER_USER)
                os.setgroups([])
                os.setgid(entry.pw_gid)
                os.setuid(entry.pw_uid)
            os.write(writer, json.dumps(work()).encode())
            status = 0
        except BaseException:  # noqa: BLE001 - the process must not go on as a test runner
            traceback.print_exc()
        os._exit(status)
    os.close(writer)
    with os.fdopen(reader, "rb") as answer:
        text = answer.read()
    _, status = os.waitpid(child, 0)
    assert status == 0, "the other user's process failed; its error is above"
    return json.loads(text)


def answers_beyond_loopback(process: psutil.Process) -> dict[str, bytes]:
    """Returns what a process and its children answer to HTTP, by the address where they listen.

    Addresses of loopback are left out, and so is a program that says nothing.
    """
    answers: dict[str, bytes] = {}
    for each in [process, *process.children(recursive=True)]:
        for connection in each.net_connections("inet"):
            if connection.status != psutil.CONN_LISTEN:
                continue
            address = ip_address(connection.laddr.ip)
            if address.is_loopback:
                continue
            # What listens on all addresses is reached at that of loopback, too.
            host = "localhost" if address.is_unspecified else str(address)
            with socket.create_connection((host, connection.laddr.port), 10) as client:
                client.settimeout(5)
                # Another protocol may end the connection, or wait for a message of its own.
                with suppress(TimeoutError, ConnectionError):
                    client.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n")
                    if answer := client.recv(100):
                        answers[f"{host}:{connection.laddr.port}"] = answer
    return answers
