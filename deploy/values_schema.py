"""Writes the chart's values.schema.json: every value by name and type, and nothing else.

    python deploy/values_schema.py          # writes it (a test keeps it fresh)

What `settings` may hold comes from the settings classes of the processes, so that a setting which
is misspelt, or was renamed, is refused before anything is installed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from catenary_agent.settings import AgentSettings
from catenary_gateway.settings import GatewaySettings
from catenary_scheduler.settings import SchedulerSettings
from catenary_services.settings import ProcessSettings

FILE = Path(__file__).parent / "helm" / "catenary" / "values.schema.json"

Schema = dict[str, Any]

# What the chart sets itself, or what differs from pod to pod.
_OURS = {
    "cluster",
    "insecure",
    "tls_cert_file",
    "tls_key_file",
    "tls_ca_file",
    "health_host",
    "health_port",
    "metrics_host",
    "metrics_port",
    "model_repository",
    "scheduler_addresses",
    "scheduler_groups",
    "drain_timeout_s",
    "host",
    "port",
    "control_port",
    "http_port",
    "grpc_port",
    "admin_port",
    "gateway_id",
    "scheduler_id",
    "agent_id",
    "server_id",
    "device",
    "device_class",
    "device_id",
    "virtual_level",
    "transport_host",
    "models",
    "expected_agents",
    "min_agents",
    "max_agents",
    "retire_by_ordinal",
    "redis_url",
    "redis_password_file",
    "redis_ca_file",
    "redis_sentinels",
    "redis_sentinel_service",
    "redis_sentinel_password_file",
    "api_keys_file",
    "otlp_endpoint",
    "trace_sample_ratio",
    "endpoints_insecure",
    "endpoint_cert_file",
    "endpoint_key_file",
}
_USERS = ("gateway", "scheduler", "agent", "redis", "authority")


def schema() -> Schema:
    """Returns the whole schema (JSON Schema draft-07)."""
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Values of the chart catenary",
        **_object(_values()),
        "definitions": {
            "gatewaySettings": _settings(GatewaySettings),
            "schedulerSettings": _settings(SchedulerSettings),
            "agentSettings": _settings(AgentSettings),
        },
    }


def _values() -> Schema:
    return {
        "nameOverride": _text(),
        "fullnameOverride": _text(),
        "insecure": _flag(),
        "cluster": _text(r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,126}[A-Za-z0-9])?$"),
        "image": _object(
            {
                "registry": _text(),
                "repository": _name(),
                "tag": _text(),
                "digest": _text("^(sha256:[0-9a-f]{64})?$"),
                "pullPolicy": _one_of("Always", "IfNotPresent", "Never"),
                "pullSecrets": _list(_object({"name": _name()}, ["name"])),
            }
        ),
        "commonLabels": _texts(),
        "commonAnnotations": _texts(),
        "extraEnv": _objects(),
        "serviceAccount": _object({"create": _flag(), "name": _text(), "annotations": _texts()}),
        "users": _object({role: _whole(1000) for role in _USERS}, list(_USERS)),
        "podSecurityContext": {"type": "object"},
        "containerSecurityContext": {"type": "object"},
        "tls": _tls(),
        "authority": _object(
            {
                "days": _whole(1, 825),
                "storage": _quantity(),
                "storageClassName": _text(),
                "resources": _resources(),
                "enrolResources": _resources(),
            }
        ),
        "apiKeys": _object({"existingSecret": _text(), "key": _name()}),
        "redis": _redis(),
        "models": _list(_name()),
        "modelRepository": _object(
            {
                "existingClaim": _text(),
                "volume": {"type": "object"},
                "subPath": _text(),
                "mountPath": _text("^/"),
            }
        ),
        "telemetry": _object(
            {
                "otlpEndpoint": _text("^(https?://.+)?$"),
                "traceSampleRatio": {"type": "number", "minimum": 0, "maximum": 1},
            }
        ),
        "gateway": _gateway(),
        "scheduler": _object(
            {
                **_pods("schedulerSettings"),
                "replicas": _whole(1),
                "groups": _whole(1, 64),
            }
        ),
        "agentDefaults": _object(_agent_pods()),
        "agents": _list(_agent(), fewest=1),
        "keda": _object(
            {
                "apiKey": _object({"existingSecret": _text(), "key": _name()}),
                "tlsSecret": _text(),
                "pollingIntervalSeconds": _whole(1),
                "scaleDownStabilizationSeconds": _whole(0, 3600),
            }
        ),
        "networkPolicy": _object(
            {
                "enabled": _flag(),
                **dict.fromkeys(
                    ("clients", "operators", "scrapers", "redis", "collector"), _objects()
                ),
            }
        ),
        "monitoring": _monitoring(),
        "inferencePool": _object(
            {
                "enabled": _flag(),
                "endpointPicker": _object({"name": _text(), "port": _port()}),
            }
        ),
        # Helm's own: values for all charts of a parent chart.
        "global": {"type": "object"},
    }


def _tls() -> Schema:
    return _object(
        {
            "mode": _one_of("own", "csi", "secrets"),
            "issuer": _object(
                {
                    "name": _text(),
                    "kind": _one_of("Issuer", "ClusterIssuer"),
                    "group": _name(),
                }
            ),
            "duration": _duration(),
            "renewBefore": _duration(),
            "gatewayDnsNames": _list(_name()),
            "endpointSecret": _text(),
            "endpointsInsecure": _flag(),
            "secrets": _object({role: _text() for role in ("gateway", "scheduler", "agent")}),
            "operators": _list(_object({"name": _dns_label()}, ["name"])),
        }
    )


def _redis() -> Schema:
    return _object(
        {
            "url": _text("^rediss?://"),
            "existingSecret": _text(),
            "passwordKey": _name(),
            "caSecret": _text(),
            "caKey": _name(),
            "sentinels": _list(_text("^.+:[0-9]+$")),
            "sentinelService": _name(),
            "sentinelPasswordKey": _text(),
            "bundled": _object(
                {
                    "enabled": _flag(),
                    "image": _name(),
                    "storage": _quantity(),
                    "storageClassName": _text(),
                    "resources": _resources(),
                }
            ),
        }
    )


def _gateway() -> Schema:
    return _object(
        {
            **_pods("gatewaySettings"),
            "replicas": _whole(1),
            "service": _object(
                {
                    "type": _one_of("ClusterIP", "NodePort", "LoadBalancer"),
                    "annotations": _texts(),
                    "loadBalancerClass": _text(),
                    "loadBalancerSourceRanges": _list(_name()),
                    "exposeAdmin": _flag(),
                }
            ),
            "autoscaling": _object(
                {
                    "enabled": _flag(),
                    "minReplicas": _whole(1),
                    "maxReplicas": _whole(1),
                    "targetCPUUtilizationPercentage": _whole(1, 100),
                }
            ),
        }
    )


def _agent() -> Schema:
    own = {
        "name": _dns_label(),
        "replicas": _whole(0),
        "device": _text(r"^(cpu|cuda:[0-9]+|emulated:.+)$"),
        "deviceClass": _text(),
        "virtualGpus": _whole(1, 16),
        "imageVariant": _dns_label(),
        "gpu": _object({"resource": _text("^.+/.+$"), "count": _whole(1)}, ["resource", "count"]),
        "autoscaling": {
            **_object(
                {
                    "enabled": _flag(),
                    "minReplicas": _whole(1),
                    "maxReplicas": _whole(1),
                    "growthShare": {"type": "number", "minimum": 0, "maximum": 1},
                }
            ),
            "if": {"properties": {"enabled": {"const": True}}, "required": ["enabled"]},
            "then": {"required": ["maxReplicas"]},
        },
    }
    return {
        **_object({**_agent_pods(), **own}, ["name", "device"]),
        "anyOf": [{"required": ["replicas"]}, {"required": ["autoscaling"]}],
    }


def _agent_pods() -> Schema:
    return {
        **_pods("agentSettings"),
        "startupSeconds": _whole(10),
        "runtimeClassName": _text(),
        "modelCache": {"type": "object"},
    }


def _pods(settings: str) -> Schema:
    """What pods of all roles have."""
    return {
        "settings": {"$ref": f"#/definitions/{settings}"},
        "drainTimeoutSeconds": _whole(0),
        "preStopSeconds": _whole(0),
        "resources": _resources(),
        "pdb": _object(
            {
                "enabled": _flag(),
                "maxUnavailable": {"anyOf": [_whole(0), _text("^[0-9]+%$")]},
            }
        ),
        "podAnnotations": _texts(),
        "podLabels": _texts(),
        "nodeSelector": _texts(),
        "tolerations": _objects(),
        "affinity": {"type": "object"},
        "topologySpreadConstraints": _objects(),
        "priorityClassName": _text(),
        "extraEnv": _objects(),
        "extraVolumes": _objects(),
        "extraVolumeMounts": _objects(),
    }


def _monitoring() -> Schema:
    monitor = _object({"enabled": _flag(), "labels": _texts(), "interval": _duration()})
    return _object(
        {
            "podMonitor": monitor,
            "serviceMonitor": monitor,
            "prometheusRule": _object(
                {
                    "enabled": _flag(),
                    "labels": _texts(),
                    "attainment": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
                }
            ),
        }
    )


def _settings(cls: type[ProcessSettings]) -> Schema:
    """Returns what may be set of a process, with the types and bounds of its settings class."""
    properties = {}
    for name, field in cls.model_json_schema()["properties"].items():
        if name not in _OURS:
            properties[name] = _plain(field)
    return _object(properties)


def _plain(part: Any) -> Any:
    """Leaves out of a schema what says nothing about a YAML value."""
    if isinstance(part, list):
        return [_plain(item) for item in part]
    if not isinstance(part, dict):
        return part
    left_out = ("title", "default", "format")
    return {key: _plain(value) for key, value in part.items() if key not in left_out}


def _object(properties: Schema, required: list[str] | None = None) -> Schema:
    made: Schema = {
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
    }
    return {**made, "required": required} if required else made


def _text(pattern: str = "") -> Schema:
    return {"type": "string", "pattern": pattern} if pattern else {"type": "string"}


def _name() -> Schema:
    return {"type": "string", "minLength": 1}


def _dns_label() -> Schema:
    return _text("^[a-z0-9]([a-z0-9-]{0,20}[a-z0-9])?$")


def _duration() -> Schema:
    return _text("^([0-9]+(ms|s|m|h))+$")


def _quantity() -> Schema:
    return {"type": ["string", "number"]}


def _flag() -> Schema:
    return {"type": "boolean"}


def _whole(least: int, most: int | None = None) -> Schema:
    bounds = {"minimum": least} if most is None else {"minimum": least, "maximum": most}
    return {"type": "integer", **bounds}


def _port() -> Schema:
    return _whole(1, 65535)


def _one_of(*values: str) -> Schema:
    return {"type": "string", "enum": list(values)}


def _list(item: Schema, fewest: int = 0) -> Schema:
    return {"type": "array", "items": item, "minItems": fewest}


def _texts() -> Schema:
    return {"type": "object", "additionalProperties": {"type": "string"}}


def _objects() -> Schema:
    """Parts of Kubernetes' own API; its server checks what is in them."""
    return _list({"type": "object"})


def _resources() -> Schema:
    amounts = {"type": "object", "additionalProperties": _quantity()}
    claims = _list({"type": "object"})
    return _object({"requests": amounts, "limits": amounts, "claims": claims})


def text() -> str:
    """Returns the file's text."""
    return json.dumps(schema(), indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
    print(f"wrote {FILE}", file=sys.stderr)
