"""Which addresses of rollout replicas their callers believe.

Anyone who may report a replica could otherwise have the collector and the trainer send prompts and
weights to any server that these reach.
"""

from __future__ import annotations

import logging
import re

from pydantic import field_validator

from services.buffer.api.wire import REPLICA_URL
from services.common.proxies import LOCAL_HOSTS
from services.common.settings import Settings

log = logging.getLogger(__name__)


class ReplicaCallerSettings(Settings):
    """Settings of a process that calls rollout replicas."""

    replica_hosts: str = ",".join(LOCAL_HOSTS)
    """Hosts at which rollout replicas may be, separated by commas; one that begins with a full stop
    stands for all names that end with it. This machine unless set."""

    @field_validator("replica_hosts")
    @classmethod
    def _require_a_host(cls, value: str) -> str:
        if not _split(value):
            raise ValueError("name at least one host, such as .bapo-rollout.team.svc")
        return value


class ReplicaHosts:
    """Hosts at which a process calls rollout replicas."""

    def __init__(self, hosts: str) -> None:
        """hosts: as in `ReplicaCallerSettings`."""
        self._hosts = _split(hosts)
        self._refused: set[str] = set()

    def admit(self, name: str, url: str) -> bool:
        """Returns whether the replica may be called at this address; logs once why it may not."""
        match = re.match(REPLICA_URL, url)
        host = match[1].strip("[]").lower() if match else ""
        if any(
            host.endswith(each) if each.startswith(".") else host == each for each in self._hosts
        ):
            return True
        if url not in self._refused:
            self._refused.add(url)
            log.warning(
                "replica %s is not called: it reports the address %s, whose host is not one of "
                "BAPO_REPLICA_HOSTS (%s); if it is a replica of this run, add its host",
                *(name, url, ",".join(self._hosts)),
            )
        return False


def _split(hosts: str) -> list[str]:
    return [host.strip().lower() for host in hosts.split(",") if host.strip()]
