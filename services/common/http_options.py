"""Arguments with which every httpx client is made."""

from __future__ import annotations

import os
import ssl
from typing import Any
from urllib.parse import urlsplit

import httpx

from bapo_core.errors import ConfigError
from services.common.proxies import proxy_for


def client_options(url: str) -> dict[str, Any]:
    """Returns the arguments of an httpx client that calls `url`, and nothing elsewhere.

    Raises `ConfigError` for a file of certificates that does not exist.
    """
    return {**direct_options(url), "proxy": proxy_for(url)}


def direct_options(url: str = "") -> dict[str, Any]:
    """Returns the arguments of an httpx client that uses no proxy, such as a client of replicas.

    Raises `ConfigError` for a file of certificates that does not exist.
    """
    # `trust_env` is off, because httpx would fail for variables of proxies that it cannot read.
    if urlsplit(url).scheme == "http":
        # Reads the certificates of the system only; a client for HTTP needs none.
        return {"trust_env": False, "verify": ssl.create_default_context()}
    check_certificates()
    return {"trust_env": False, "verify": httpx.create_ssl_context()}


def check_certificates() -> None:
    """Raises `ConfigError` if a variable names a file of certificates that does not exist.

    ssl says only "No such file or directory", without its name, or reads no certificates at all.
    """
    for name in ("SSL_CERT_FILE", "SSL_CERT_DIR"):
        path = os.environ.get(name)
        if path and not os.path.exists(path):
            raise ConfigError(
                f"{name} is {path}, which does not exist; name the certificates of the "
                "authorities that you trust, or unset the variable"
            )
