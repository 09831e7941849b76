"""Schemas of the objects that are no part of Kubernetes itself, written from their documented fields."""

from typing import Any

_WHOLE = {"type": "integer", "minimum": 0}
_METADATA = {
    "type": "object",
    "required": ["name"],
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"},
        "labels": {"type": "object", "additionalProperties": {"type": "string"}},
    },
    "additionalProperties": False,
}
_SELECTOR = {
    "type": "object",
    "properties": {"matchLabels": {"type": "object", "additionalProperties": {"type": "string"}}},
    "additionalProperties": False,
}
_SECRET_KEY = {
    "type": "object",
    "required": ["key"],
    "properties": {"name": {"type": "string"}, "key": {"type": "string"}, "optional": {"type": "boolean"}},
    "additionalProperties": False,
}


def _object(api_version: str, kind: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "required": ["apiVersion", "kind", "metadata", "spec"],
        "properties": {
            "apiVersion": {"const": api_version},
            "kind": {"const": kind},
            "metadata": _METADATA,
            "spec": spec,
        },
        "additionalProperties": False,
    }


LEADER_WORKER_SET = _object(
    "leaderworkerset.x-k8s.io/v1",
    "LeaderWorkerSet",
    {
        "type": "object",
        "required": ["leaderWorkerTemplate"],
        "properties": {
            "replicas": _WHOLE,
            "startupPolicy": {"enum": ["LeaderCreated", "LeaderReady"]},
            "rolloutStrategy": {"type": "object"},
            "networkConfig": {
                "type": "object",
                "properties": {"subdomainPolicy": {"enum": ["Shared", "UniquePerReplica"]}},
                "additionalProperties": False,
            },
            "leaderWorkerTemplate": {
                "type": "object",
                "required": ["workerTemplate"],
                "properties": {
                    "size": {"type": "integer", "minimum": 1},
                    "restartPolicy": {
                        "enum": ["Default", "RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"]
                    },
                    # pods are compared with the schema of Kubernetes itself
                    "leaderTemplate": {"type": "object"},
                    "workerTemplate": {"type": "object"},
                },
                "additionalProperties": False,
            },
        },
        "additionalProperties": False,
    },
)

SERVICE_MONITOR = _object(
    "monitoring.coreos.com/v1",
    "ServiceMonitor",
    {
        "type": "object",
        "required": ["selector", "endpoints"],
        "properties": {
            "selector": _SELECTOR,
            "endpoints": {
                "type": "array",
                "minItems": 1,
                "items": {
                    "type": "object",
                    "properties": {
                        "port": {"type": "string"},
                        "path": {"type": "string", "pattern": "^/"},
                        "interval": {"type": "string", "pattern": "^[0-9]+(ms|s|m|h)$"},
                        "authorization": {
                            "type": "object",
                            "properties": {"type": {"type": "string"}, "credentials": _SECRET_KEY},
                            "additionalProperties": False,
                        },
                    },
                    "additionalProperties": False,
                },
            },
        },
        "additionalProperties": False,
    },
)

RULE_GROUPS = {
    "type": "object",
    "required": ["groups"],
    "properties": {
        "groups": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "required": ["name", "rules"],
                "properties": {
                    "name": {"type": "string"},
                    "rules": {
                        "type": "array",
                        "minItems": 1,
                        "items": {
                            "type": "object",
                            "required": ["alert", "expr", "labels", "annotations"],
                            "properties": {
                                "alert": {"type": "string", "pattern": "^TokenSpeed[A-Za-z]+$"},
                                "expr": {"type": "string", "minLength": 1},
                                "for": {"type": "string", "pattern": "^[0-9]+(s|m|h)$"},
                                "labels": {
                                    "type": "object",
                                    "required": ["severity"],
                                    "properties": {"severity": {"enum": ["page", "ticket"]}},
                                    "additionalProperties": False,
                                },
                                "annotations": {
                                    "type": "object",
                                    "required": ["summary", "description", "action"],
                                    "additionalProperties": {"type": "string", "minLength": 10},
                                },
                            },
                            "additionalProperties": False,
                        },
                    },
                },
                "additionalProperties": False,
            },
        }
    },
    "additionalProperties": False,
}
"""A file of rules, and the spec of a PrometheusRule."""

BY_KIND = {"LeaderWorkerSet": LEADER_WORKER_SET, "ServiceMonitor": SERVICE_MONITOR}
