"""Binds the address that a server listens on."""

from __future__ import annotations

import socket

from bapo_core.errors import BapoError


def bind_address(host: str, port: int) -> socket.socket:
    """Returns a socket that is bound to an address, or for `::` to all addresses of this machine.

    `::` takes IPv4 and IPv6, where sockets of asyncio take IPv6 alone; where the kernel has no
    IPv6, it takes IPv4. The socket does not listen yet.

    port: 0 takes any free one. Raises `BapoError` if the address is in use or is no address of this
    machine.
    """
    try:
        address = "0.0.0.0" if host == "::" and not socket.has_dualstack_ipv6() else host
        # asyncio sends without delay (TCP_NODELAY) only where a socket names its protocol.
        protocol = socket.IPPROTO_TCP
        family, kind, _, _, place = socket.getaddrinfo(address, port, proto=protocol)[0]
        bound = socket.socket(family, kind, protocol)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            bound.bind(place)
        except OSError:
            bound.close()
            raise
    except OSError as error:
        raise BapoError(
            f"cannot listen on {host}, port {port} (BAPO_HOST, BAPO_PORT): {error}; end the "
            "process that listens there, or choose another port or an address of this machine"
        ) from error
    return bound
