"""Kinds that are not Kubernetes' own, as far as the chart uses them; nothing else passes."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def _closed(required: list[str], **properties: Schema) -> Schema:
    return {
        "type": "object",
        "additionalProperties": False,
        "required": required,
        "properties": properties,
    }


def _list(items: Schema) -> Schema:
    return {"type": "array", "minItems": 1, "items": items}


def _object(api_version: str, kind: str, spec: Schema) -> Schema:
    metadata = _closed(["name", "namespace", "labels"], name=TEXT, namespace=TEXT, labels=LABELS)
    return _closed(
        ["apiVersion", "kind", "metadata", "spec"],
        apiVersion={"const": api_version},
        kind={"const": kind},
        metadata=metadata,
        spec=spec,
    )


TEXT: Schema = {"type": "string", "minLength": 1}
PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}
LABELS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}
EXPRESSION = _closed(
    ["key", "operator"],
    key=TEXT,
    operator={"enum": ["In", "NotIn", "Exists", "DoesNotExist"]},
    values=_list(TEXT),
)

# https://prometheus-operator.dev/docs/api-reference/api/#monitoring.coreos.com/v1.ServiceMonitor
SERVICE_MONITOR = _object(
    "monitoring.coreos.com/v1",
    "ServiceMonitor",
    _closed(
        ["selector", "endpoints"],
        selector=_closed([], matchLabels=LABELS, matchExpressions=_list(EXPRESSION)),
        targetLabels=_list(TEXT),
        endpoints=_list(
            _closed(
                ["port"],
                port=TEXT,
                path={"type": "string", "pattern": "^/"},
                interval={"type": "string", "pattern": "^[0-9]+(ms|s|m|h)$"},
            )
        ),
    ),
)

# https://gateway-api.sigs.k8s.io/reference/spec/#httproute
HTTP_ROUTE = _object(
    "gateway.networking.k8s.io/v1",
    "HTTPRoute",
    _closed(
        ["parentRefs", "rules"],
        parentRefs=_list(_closed(["name"], name=TEXT, namespace=TEXT, sectionName=TEXT, port=PORT)),
        hostnames=_list(TEXT),
        rules=_list(
            _closed(
                ["backendRefs"],
                matches=_list(
                    _closed(
                        ["path"],
                        path=_closed(
                            ["type", "value"],
                            type={"enum": ["Exact", "PathPrefix"]},
                            value={"type": "string", "pattern": "^/"},
                        ),
                    )
                ),
                backendRefs=_list(_closed(["name", "port"], name=TEXT, port=PORT)),
            )
        ),
    ),
)

CUSTOM: dict[str, Schema] = {"ServiceMonitor": SERVICE_MONITOR, "HTTPRoute": HTTP_ROUTE}
