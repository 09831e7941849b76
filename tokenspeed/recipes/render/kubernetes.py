"""Manifests for Kubernetes: a StatefulSet on one node; on several a LeaderWorkerSet, or two StatefulSets."""

from typing import Literal

from tokenspeed.recipes.render.deployment import Deployment, header, minutes_text, size_text
from tokenspeed.recipes.render.pod import OPTIONAL_SECRET, labels, pod
from tokenspeed.recipes.render.yaml_text import Comment, Mapped, Node, comment_lines, write_yaml

Workload = Literal["leader-worker-set", "stateful-set"]

LEADER, WORKER = "leader", "worker"

_WHY_STATEFUL = (
    "A StatefulSet, not a Deployment: an update takes the old pod away before the new one comes (the devices are there "
    "once), and each replica keeps a cache volume of its own, so that a restart fetches and compiles nothing."
)
_WHY_TWO = (
    "Two StatefulSets, for clusters without LeaderWorkerSet. What they cannot do: a pod that is started again leaves "
    "the others waiting for the old one; delete the pods of both, then."
)
_NOT_READ = "Where the nodes meet, and which of them this is; this version's engine reads neither."


def manifests(deployment: Deployment, workload: Workload = "leader-worker-set") -> str:
    """Returns the text of all objects; ``workload`` matters for several nodes only."""
    objects = [*_recipe_map(deployment), _service(deployment)]
    if deployment.nodes == 1:
        objects.append(_stateful_set(deployment))
    elif workload == "leader-worker-set":
        objects += [_shared_claim(deployment), _leader_worker_set(deployment)]
    else:
        objects += [_shared_claim(deployment), _peers(deployment), *_two_stateful_sets(deployment)]
    objects.append(_disruption_budget(deployment))
    if deployment.monitoring:
        objects.append(_service_monitor(deployment))
    top = comment_lines(header(deployment, _how(deployment, workload)))
    return top + "".join("\n---\n" + write_yaml(found) for found in objects)


def _how(deployment: Deployment, workload: Workload) -> str:
    lines = ["  kubectl apply -f FILE"]
    secrets = [secret.name for secret in deployment.container.secrets]
    if secrets:
        files = " ".join(f"--from-file={name}=FILE" for name in secrets)
        lines.insert(0, f"  kubectl create secret generic {deployment.secret} {files}")
        if OPTIONAL_SECRET in secrets:
            lines.insert(0, f"  ({OPTIONAL_SECRET} is for gated repositories, and may be left out)")
    if deployment.nodes > 1 and workload == "leader-worker-set":
        lines.insert(0, "  (LeaderWorkerSet must be in the cluster: its controller is installed apart)")
    lines += [
        f"  kubectl wait --for=condition=Ready pod --selector app.kubernetes.io/instance={deployment.name} "
        f"--timeout={deployment.start_s}s",
        f"  kubectl port-forward service/{deployment.name} {deployment.container.port}",
        "",
        "What to change: the image (your registry's, by digest), the cache's size and storage class, cores and memory.",
        "Needs Kubernetes 1.30 or newer.",
    ]
    if deployment.nodes > 1:
        lines += ["The cache is one volume for all nodes: its storage class must know ReadWriteMany."]
    return "\n".join(lines)


def _metadata(deployment: Deployment, name: str = "") -> Mapped:
    return {"name": name or deployment.name, "labels": labels(deployment)}


def _api_role(deployment: Deployment) -> str:
    return LEADER if deployment.nodes > 1 else ""


def _recipe_map(deployment: Deployment) -> list[Mapped]:
    if not deployment.recipe_files:
        return []
    name = f"{deployment.name}-recipe"
    data: dict[str, Node] = dict(deployment.recipe_files)
    return [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": _metadata(deployment, name), "data": data}]


def _service(deployment: Deployment) -> Mapped:
    spec: Mapped = {
        "selector": labels(deployment, _api_role(deployment)),
        "ports": [{"name": "http", "port": deployment.container.port, "targetPort": "http"}],
    }
    return {"apiVersion": "v1", "kind": "Service", "metadata": _metadata(deployment), "spec": spec}


def _claim(deployment: Deployment, mode: str) -> Mapped:
    return {
        "accessModes": [mode],
        Comment(
            "Weights, compile caches. Without a class the cluster's default one is taken: storageClassName: NAME"
        ): None,
        "resources": {"requests": {"storage": size_text(deployment.cache_bytes)}},
    }


def _shared_claim(deployment: Deployment) -> Mapped:
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": _metadata(deployment, f"{deployment.name}-cache"),
        "spec": _claim(deployment, "ReadWriteMany"),
    }


def _stateful_set(deployment: Deployment) -> Mapped:
    spec: Mapped = {
        "replicas": 1,
        "serviceName": deployment.name,
        "podManagementPolicy": "Parallel",
        "selector": {"matchLabels": labels(deployment)},
        "template": pod(deployment),
        "volumeClaimTemplates": [{"metadata": {"name": "cache"}, "spec": _claim(deployment, "ReadWriteOnce")}],
    }
    return {
        Comment(_WHY_STATEFUL): None,
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": _metadata(deployment),
        "spec": spec,
    }


def _field(name: str, path: str) -> Mapped:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _leader_worker_set(deployment: Deployment) -> Mapped:
    rank = "metadata.labels['leaderworkerset.sigs.k8s.io/worker-index']"
    place: list[Mapped] = [
        {Comment(_NOT_READ): None, "name": "TOKENSPEED_LEADER", "value": "$(LWS_LEADER_ADDRESS)"},
        _field("TOKENSPEED_NODE_RANK", rank),
    ]
    claim = f"{deployment.name}-cache"
    template: Mapped = {
        "size": deployment.nodes,
        Comment("A rank that dies takes its group along: the others could only wait for it."): None,
        "restartPolicy": "RecreateGroupOnPodRestart",
        "leaderTemplate": pod(deployment, role=LEADER, extra=place, cache_claim=claim),
        Comment(
            "Workers compute and answer no HTTP, so there is nothing to probe; the group stands and falls together."
        ): None,
        "workerTemplate": pod(deployment, role=WORKER, extra=place, cache_claim=claim, api=False),
    }
    return {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": _metadata(deployment),
        "spec": {"replicas": 1, "startupPolicy": "LeaderCreated", "leaderWorkerTemplate": template},
    }


def _peers(deployment: Deployment) -> Mapped:
    """Names for the pods, known before they are ready: they must meet to become so."""
    spec: Mapped = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": labels(deployment)}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(deployment, f"{deployment.name}-peers"),
        "spec": spec,
    }


def _two_stateful_sets(deployment: Deployment) -> list[Mapped]:
    peers, claim = f"{deployment.name}-peers", f"{deployment.name}-cache"
    leader_name = f"{deployment.name}-{LEADER}"
    place: list[Mapped] = [
        {Comment(_NOT_READ): None, "name": "TOKENSPEED_LEADER", "value": f"{leader_name}-0.{peers}"},
        _field("TOKENSPEED_NODE_RANK", "metadata.labels['apps.kubernetes.io/pod-index']"),
    ]
    sets: list[Mapped] = []
    for role, count, first in ((LEADER, 1, 0), (WORKER, deployment.nodes - 1, 1)):
        spec: Mapped = {
            "replicas": count,
            **({"ordinals": {"start": first}} if first else {}),
            "serviceName": peers,
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": labels(deployment, role)},
            "template": pod(deployment, role=role, extra=place, cache_claim=claim, api=role == LEADER),
        }
        sets.append(
            {
                **({Comment(_WHY_TWO): None} if role == LEADER else {}),
                "apiVersion": "apps/v1",
                "kind": "StatefulSet",
                "metadata": _metadata(deployment, f"{deployment.name}-{role}"),
                "spec": spec,
            }
        )
    return sets


def _disruption_budget(deployment: Deployment) -> Mapped:
    why = (
        f"Draining a node waits until somebody lets this pod go: a start takes up to "
        f"{minutes_text(deployment.start_s)}. "
        "With more replicas, say maxUnavailable: 1 instead. A pod that is not ready holds nobody up."
    )
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": _metadata(deployment),
        "spec": {
            Comment(why): None,
            "minAvailable": deployment.nodes,
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {"matchLabels": labels(deployment)},
        },
    }


def _service_monitor(deployment: Deployment) -> Mapped:
    endpoint: dict[str, Node] = {"port": "http", "path": "/metrics", "interval": "15s"}
    if any(secret.name == "api-key" for secret in deployment.container.secrets):
        credentials: Mapped = {"name": deployment.secret, "key": "api-key"}
        endpoint["authorization"] = {"type": "Bearer", "credentials": credentials}
    return {
        Comment("For the Prometheus operator; its Prometheus may want a label here (release: NAME)."): None,
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "ServiceMonitor",
        "metadata": _metadata(deployment),
        "spec": {"selector": {"matchLabels": labels(deployment)}, "endpoints": [endpoint]},
    }
