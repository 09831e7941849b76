"""The pod that every workload of Kubernetes has in common: one container, confined, with its devices and volumes."""

from collections.abc import Sequence

from tokenspeed.recipes.container import SECRETS_FOLDER
from tokenspeed.recipes.render.deployment import (
    GID,
    RECIPES_FOLDER,
    TEMPORARY_BYTES,
    UID,
    Deployment,
    minutes_text,
    size_text,
)
from tokenspeed.recipes.render.node_labels import RESOURCES, device_resource, placement
from tokenspeed.recipes.render.yaml_text import Comment, Mapped, Node

PROBE_S = 10
ENDPOINTS_S = 5
"""How long a pod waits before SIGTERM, so that no new request is on its way when it stops taking them."""

OPTIONAL_SECRET = "hf-token"
"""Public repositories need no token; a key that is asked for must be there."""

_GROUPS = {"video": 44, "render": 109}
"""Debian's numbers; the render group's is chosen at the installation, and the file says so."""


def labels(deployment: Deployment, role: str = "") -> dict[str, str]:
    """Labels of the pods; ``role`` tells the one with the API from the others, "" where there is one kind."""
    own = {"app.kubernetes.io/name": "tokenspeed", "app.kubernetes.io/instance": deployment.name}
    return {**own, "app.kubernetes.io/component": role} if role else own


def pod(
    deployment: Deployment, *, role: str = "", extra: Sequence[Mapped] = (), cache_claim: str = "", api: bool = True
) -> Mapped:
    """A pod's template.

    Args:
        extra: variables of the environment beside the container's.
        cache_claim: an existing claim for the cache; "" where the workload makes one a pod, called ``cache``.
        api: whether it answers HTTP; else there is nothing to probe.
    """
    container = deployment.container
    spec: dict[str, Node] = {
        "automountServiceAccountToken": False,
        Comment("Else a Service called tokenspeed would put TOKENSPEED_PORT into the environment."): None,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": container.grace_s + ENDPOINTS_S,
        "securityContext": _pod_security(deployment),
        **_placed(deployment),
        "containers": [_container(deployment, extra, api=api)],
        "volumes": _volumes(deployment, cache_claim),
    }
    return {"metadata": {"labels": labels(deployment, role)}, "spec": spec}


def _pod_security(deployment: Deployment) -> Mapped:
    context: dict[str, Node] = {
        "runAsNonRoot": True,
        "runAsUser": UID,
        "runAsGroup": GID,
        "fsGroup": UID,
        "fsGroupChangePolicy": "OnRootMismatch",
    }
    groups = [_GROUPS.get(group, group) for group in deployment.container.groups]
    if groups:
        context[Comment("Who may open the device files: getent group video render on the node tells the numbers.")] = (
            None
        )
        context["supplementalGroups"] = [int(group) for group in groups]
    context["seccompProfile"] = {"type": "RuntimeDefault"}
    return context


def _placed(deployment: Deployment) -> dict[str, Node]:
    vendor = deployment.container.vendor
    if vendor not in RESOURCES:
        return {}
    known = RESOURCES[vendor]
    part: dict[str, Node] = {}
    where = placement(vendor, deployment.architectures)
    if where:
        part[Comment(f"Labels of {known.labels_by}.")] = None
        part |= where
    part["tolerations"] = [
        {"key": device_resource(vendor, deployment.architectures), "operator": "Exists", "effect": "NoSchedule"}
    ]
    return part


def _container(deployment: Deployment, extra: Sequence[Mapped], *, api: bool) -> Mapped:
    container = deployment.container
    part: dict[str, Node] = {
        "name": "tokenspeed",
        Comment("By digest in production: name@sha256:..."): None,
        "image": container.image,
        "imagePullPolicy": "IfNotPresent",
        "args": [_literal(argument) for argument in container.arguments],
    }
    environment: list[Node] = [
        {"name": name, "value": _literal(value)} for name, value in deployment.environment().items()
    ]
    if environment or extra:
        part["env"] = [*extra, *environment]
    part["resources"] = _resources(deployment)
    if api:
        part["ports"] = [{"name": "http", "containerPort": container.port}]
        part |= _probes(deployment)
    part["securityContext"] = {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    part["volumeMounts"] = _mounts(deployment)
    return part


def _resources(deployment: Deployment) -> Mapped:
    vendor = deployment.container.vendor
    memory = size_text(deployment.memory_bytes)
    if vendor not in RESOURCES:
        return {
            Comment("The engine sizes its KV cache by this limit."): None,
            "requests": {"cpu": 4, "memory": memory},
            "limits": {"memory": memory},
        }
    known = RESOURCES[vendor]
    return {
        Comment(f"From {known.plugin}. Memory and cores are a start: look at what is used, and set them."): None,
        "requests": {"cpu": max(4, 2 * deployment.devices), "memory": memory},
        "limits": {device_resource(vendor, deployment.architectures): deployment.devices},
    }


def _probes(deployment: Deployment) -> dict[str, Node]:
    def get(path: str) -> Mapped:
        return {"path": path, "port": "http"}

    allowed = minutes_text(deployment.start_s)
    return {
        Comment(f"The first start fetches and reads the weights: {allowed} before it counts as failed."): None,
        "startupProbe": {
            "httpGet": get("/ready"),
            "periodSeconds": PROBE_S,
            "timeoutSeconds": 3,
            "failureThreshold": -(-deployment.start_s // PROBE_S),
        },
        Comment("Draining, or an engine that is started again: no requests, and no restart of the pod."): None,
        "readinessProbe": {
            "httpGet": get("/ready"),
            "periodSeconds": 5,
            "timeoutSeconds": 3,
            "failureThreshold": 2,
        },
        Comment("The API process and its loop; 503 too when an engine is given up."): None,
        "livenessProbe": {
            "httpGet": get("/live"),
            "periodSeconds": PROBE_S,
            "timeoutSeconds": 5,
            "failureThreshold": 6,
        },
        "lifecycle": {"preStop": {"sleep": {"seconds": ENDPOINTS_S}}},
    }


def _mounts(deployment: Deployment) -> list[Node]:
    container = deployment.container
    mounts: list[Node] = []
    for index, volume in enumerate(container.volumes):
        mount: dict[str, Node] = {"name": _volume_name(deployment, index), "mountPath": volume.target}
        if volume.read_only:
            mount["readOnly"] = True
        mounts.append(mount)
    mounts.append({"name": "shared-memory", "mountPath": "/dev/shm"})
    mounts.append({"name": "temporary", "mountPath": "/tmp"})
    if container.secrets:
        mounts.append({"name": "secrets", "mountPath": SECRETS_FOLDER, "readOnly": True})
    if deployment.recipe_files:
        mounts.append({"name": "recipe", "mountPath": RECIPES_FOLDER, "readOnly": True})
    return mounts


def _volume_name(deployment: Deployment, index: int) -> str:
    """The cache is the one named volume; the rest are paths of the host, in their order."""
    return f"host-{index}" if deployment.container.volumes[index].source.startswith("/") else "cache"


def _volumes(deployment: Deployment, cache_claim: str) -> list[Node]:
    container = deployment.container
    volumes: list[Node] = []
    if cache_claim:
        volumes.append({"name": "cache", "persistentVolumeClaim": {"claimName": cache_claim}})
    volumes += [
        {"name": _volume_name(deployment, index), "hostPath": {"path": volume.source}}
        for index, volume in enumerate(container.volumes)
        if volume.source.startswith("/")
    ]
    shared: Mapped = {"medium": "Memory", "sizeLimit": size_text(container.shm_bytes)}
    volumes.append({"name": "shared-memory", "emptyDir": shared})
    volumes.append({"name": "temporary", "emptyDir": {"sizeLimit": size_text(TEMPORARY_BYTES)}})
    if container.secrets:
        sources = [_secret_source(deployment.secret, secret.name) for secret in container.secrets]
        volumes.append({"name": "secrets", "projected": {"sources": sources}})
    if deployment.recipe_files:
        volumes.append({"name": "recipe", "configMap": {"name": f"{deployment.name}-recipe"}})
    return volumes


def _secret_source(secret: str, name: str) -> Mapped:
    source: dict[str, Node] = {"name": secret, "items": [{"key": name, "path": name}]}
    if name == OPTIONAL_SECRET:
        source["optional"] = True
    return {"secret": source}


def _literal(text: str) -> str:
    """The text as it is: Kubernetes would replace ``$(NAME)`` by a variable."""
    return text.replace("$(", "$$(")
