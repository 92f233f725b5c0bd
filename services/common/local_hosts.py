"""Services of this machine are reached without a proxy."""

from __future__ import annotations

import os
from urllib.request import getproxies

LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")


def bypass_proxies() -> None:
    """Lets this process and its children reach services of this machine without a proxy.

    A proxy that the environment names for every host could not reach them, and would get their
    tokens.
    """
    named = [host for host in getproxies().get("no", "").split(",") if host]
    for name in ("no_proxy", "NO_PROXY"):
        os.environ[name] = ",".join(dict.fromkeys([*named, *LOCAL_HOSTS]))
