"""Evaluates NetworkPolicies by the rules of Kubernetes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address, ip_network
from typing import Any

from tests.charts.helm import NAMESPACE, Object, of_kind

Labels = Mapping[str, str]


@dataclass(frozen=True)
class Pod:
    labels: Labels
    namespace: str = NAMESPACE

    @property
    def namespace_labels(self) -> Labels:
        return {"kubernetes.io/metadata.name": self.namespace}


@dataclass(frozen=True)
class Address:
    """An address outside the cluster. `ipBlock` matches no pods here, unlike in some CNIs."""

    ip: str


End = Pod | Address


@dataclass(frozen=True)
class Flow:
    source: End
    destination: End
    port: int
    protocol: str = field(default="TCP")


def allowed(objects: list[Object], flow: Flow) -> bool:
    """Whether the policies let the source send and the destination receive."""
    policies = of_kind(objects, "NetworkPolicy")
    sends = _passes(policies, "Egress", flow.source, flow.destination, flow)
    return sends and _passes(policies, "Ingress", flow.destination, flow.source, flow)


def _passes(policies: list[Object], direction: str, end: End, other: End, flow: Flow) -> bool:
    if isinstance(end, Address):
        return True
    selecting = [
        policy["spec"]
        for policy in policies
        if direction in policy["spec"]["policyTypes"]
        and policy["metadata"]["namespace"] == end.namespace
        and selects(policy["spec"]["podSelector"], end.labels)
    ]
    if not selecting:
        return True
    rules = [rule for spec in selecting for rule in spec.get(direction.lower(), [])]
    peers = "to" if direction == "Egress" else "from"
    return any(_to_port(rule, flow) and _to_peer(rule.get(peers), other) for rule in rules)


def _to_port(rule: Mapping[str, Any], flow: Flow) -> bool:
    ports = rule.get("ports")
    return not ports or any(
        flow.protocol == port.get("protocol", "TCP")
        and port["port"] <= flow.port <= port.get("endPort", port["port"])
        for port in ports
    )


def _to_peer(peers: list[Mapping[str, Any]] | None, other: End) -> bool:
    return not peers or any(_is_peer(peer, other) for peer in peers)


def _is_peer(peer: Mapping[str, Any], other: End) -> bool:
    if isinstance(other, Address):
        return "ipBlock" in peer and ip_address(other.ip) in ip_network(peer["ipBlock"]["cidr"])
    if "ipBlock" in peer:
        return False
    if "namespaceSelector" in peer:
        in_namespace = selects(peer["namespaceSelector"], other.namespace_labels)
    else:
        in_namespace = other.namespace == NAMESPACE
    return in_namespace and selects(peer.get("podSelector", {}), other.labels)


def selects(selector: Mapping[str, Any], labels: Labels) -> bool:
    match_labels = selector.get("matchLabels", {})
    return all(labels.get(key) == value for key, value in match_labels.items()) and all(
        _holds(expression, labels) for expression in selector.get("matchExpressions", [])
    )


def _holds(expression: Mapping[str, Any], labels: Labels) -> bool:
    key, values = expression["key"], expression.get("values", [])
    match expression["operator"]:
        case "In":
            return labels.get(key) in values
        case "NotIn":
            return labels.get(key) not in values
        case "Exists":
            return key in labels
        case "DoesNotExist":
            return key not in labels
    raise ValueError(expression)
