"""Which calls go through the proxy that the environment names.

Calls to this machine and to the cluster never do: a proxy could not reach these hosts, and would
get their tokens. httpx reads the proxy variables when a client is made, whatever it calls, and
fails for what it cannot read, such as IPv6 networks. So our clients decide here for their one
address (`proxy_for`), and other people's clients get variables that httpx can read
(`bypass_proxies`).
"""

from __future__ import annotations

import os
import socket
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from urllib.parse import SplitResult, urlsplit
from urllib.request import getproxies

LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")
CLUSTER_DOMAINS = (".svc", ".cluster.local")
"""Ends of the names of a cluster's Services."""
_exceptions: list[str] = []
"""Entries of NO_PROXY that `bypass_proxies` has removed, because httpx cannot read them."""


def bypass_proxies() -> None:
    """Lets libraries of this process and its children reach this machine without a proxy.

    Removes the entries of NO_PROXY for which httpx raises `InvalidURL` whenever a client is made.
    """
    named = [entry.strip() for entry in getproxies().get("no", "").split(",") if entry.strip()]
    readable = [entry for entry in map(_without_brackets, named) if _is_readable(entry)]
    _exceptions.extend(entry for entry in named if _without_brackets(entry) not in readable)
    for name in ("no_proxy", "NO_PROXY"):
        os.environ[name] = ",".join(dict.fromkeys([*readable, *LOCAL_HOSTS]))


def proxy_for(url: str) -> str | None:
    """Returns the address of the proxy through which `url` is called; None for none."""
    address = urlsplit(url)
    if _is_local(address.hostname or ""):
        return None
    proxies = getproxies()
    proxy = proxies.get(address.scheme) or proxies.get("all")
    entries = [*_exceptions, *proxies.get("no", "").split(",")]
    if not proxy or any(_is_excepted(address, entry.strip()) for entry in entries):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"


def _is_local(host: str) -> bool:
    """Returns whether a host is this machine or in the cluster; only names of others have dots,
    but for this machine's own."""
    try:
        return _is_own(ip_address(host))
    except ValueError:
        own = socket.gethostname().lower()
        if "." not in host or host.endswith(CLUSTER_DOMAINS) or host == own:
            return True
        # The host name is mostly the first label alone. No other name is looked up, because a
        # machine behind a proxy may wait long for the addresses of hosts elsewhere.
        same_label = host.partition(".")[0] == own.partition(".")[0]
        return same_label and any(map(_is_own, _addresses_of(host)))


def _addresses_of(host: str) -> list[IPv4Address | IPv6Address]:
    """Returns the addresses of a name; none if it has none or cannot be looked up."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return [ip_address(address[0]) for *_, address in found]


def _is_own(address: IPv4Address | IPv6Address) -> bool:
    """Returns whether this machine has an address: it would then call the address from itself."""
    if address.is_loopback:
        return True
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((str(address), 9))  # Sends nothing: UDP has no connections.
            return bool(probe.getsockname()[0] == str(address))
    except OSError:  # There is no way to the address.
        return False


def _is_excepted(address: SplitResult, entry: str) -> bool:
    """Returns whether an entry of NO_PROXY stands for the host of an address.

    An entry is `*`, a name (which stands for the names that end with it, too), an address, or a
    network such as `10.0.0.0/8` and `fd00::/8`. A name or an address may have a port.
    """
    host = address.hostname or ""
    if entry == "*":
        return True
    try:
        return ip_address(host) in ip_network(_without_brackets(entry), strict=False)
    except ValueError:  # One of them is a name, or the entry has a port.
        name, _, port = entry.lower().rpartition(":")
        if not port.isdecimal():
            name, port = entry.lower(), ""
        name = _without_brackets(name).lstrip("*.")
        same_port = not port or int(port) == (address.port or _port_of(address.scheme))
        return bool(name) and same_port and (host == name or host.endswith(f".{name}"))


def _port_of(scheme: str) -> int:
    return 443 if scheme == "https" else 80


def _without_brackets(entry: str) -> str:
    """Returns an entry of NO_PROXY with an IPv6 address as httpx reads it, without brackets."""
    return entry[1:-1] if entry.startswith("[") and entry.endswith("]") else entry


def _is_readable(entry: str) -> bool:
    """Returns whether httpx can make a client while NO_PROXY has this entry."""
    if (entry.isascii() and ":" not in entry) or is_address(entry):
        return True
    # Imported here: every command calls this, and importing httpx takes a tenth of a second.
    import httpx

    try:
        httpx.URL(f"all://*{entry}")
    except httpx.InvalidURL:
        return False
    return True


def is_address(host: str) -> bool:
    """Returns whether a host is an IP address, and not a name."""
    try:
        ip_address(host)
    except ValueError:
        return False
    return True
