"""Manifests: what they say, that their parts fit together, and that Kubernetes' own schemas take them."""

from pathlib import Path
from typing import Any

import pytest
from deployments import SECRETS, make_deployment, pod_templates, read_objects
from kubernetes_schemas import BY_KIND

from tokenspeed.recipes.container_devices import Volume
from tokenspeed.recipes.render.deployment import Deployment
from tokenspeed.recipes.render.kubernetes import manifests
from tokenspeed.recipes.render.node_labels import device_resource, placement

SHIPPED = sorted((Path(__file__).parents[2] / "images" / "kubernetes").glob("*.yaml"))
OLDEST, NEWEST = "1.30", "1.37"


def pod_of(deployment: Deployment) -> dict[str, Any]:
    (template,) = pod_templates(read_objects(manifests(deployment)))
    return dict(template["spec"])


def container_of(deployment: Deployment) -> dict[str, Any]:
    (container,) = pod_of(deployment)["containers"]
    return dict(container)


def test_one_node_is_a_stateful_set_with_its_own_volume() -> None:
    objects = read_objects(manifests(make_deployment()))
    assert list(objects) == ["Service/model-1-5", "StatefulSet/model-1-5", "PodDisruptionBudget/model-1-5"]
    (claim,) = objects["StatefulSet/model-1-5"]["spec"]["volumeClaimTemplates"]
    assert claim["spec"]["accessModes"] == ["ReadWriteOnce"]
    stored = int(claim["spec"]["resources"]["requests"]["storage"].removesuffix("Gi"))
    assert 112 + 10 <= stored <= 150, "100 GB of weights, caches, and room"


def test_the_pod_is_confined() -> None:
    spec = pod_of(make_deployment())
    assert spec["securityContext"] == {
        "runAsNonRoot": True,
        "runAsUser": 10001,
        "runAsGroup": 0,
        "fsGroup": 10001,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    (container,) = spec["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert spec["automountServiceAccountToken"] is False and spec["enableServiceLinks"] is False


@pytest.mark.parametrize("weight_bytes", [90 * 10**6, 600 * 10**9])
def test_probes_wait_as_long_as_the_weights_take(weight_bytes: int) -> None:
    deployment = make_deployment(weight_bytes=weight_bytes)
    container = container_of(deployment)
    startup = container["startupProbe"]
    assert startup["httpGet"] == {"path": "/ready", "port": "http"}
    assert startup["periodSeconds"] * startup["failureThreshold"] >= deployment.start_s
    assert container["readinessProbe"]["httpGet"]["path"] == "/ready"
    assert container["livenessProbe"]["httpGet"]["path"] == "/live"


def test_the_drain_has_its_time() -> None:
    spec = pod_of(make_deployment(container={"grace_s": 130}))
    waits = spec["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert spec["terminationGracePeriodSeconds"] == 130 + waits


def test_shared_memory_is_a_volume_in_memory() -> None:
    spec = pod_of(make_deployment())
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    assert volumes["shared-memory"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "16Gi"}
    mounts = {mount["mountPath"]: mount["name"] for mount in spec["containers"][0]["volumeMounts"]}
    assert mounts["/dev/shm"] == "shared-memory" and mounts["/tmp"] == "temporary" and mounts["/cache"] == "cache"


@pytest.mark.parametrize(
    ("vendor", "architectures", "resource"),
    [
        ("nvidia", ("sm90",), "nvidia.com/gpu"),
        ("amd", ("gfx950",), "amd.com/gpu"),
        ("npu", ("a3",), "huawei.com/Ascend910"),
        ("npu", ("950",), "huawei.com/npu"),
    ],
)
def test_devices_are_asked_for_and_their_nodes_tolerated(
    vendor: str, architectures: tuple[str, ...], resource: str
) -> None:
    spec = pod_of(make_deployment(container={"vendor": vendor}, architectures=architectures, devices=4))
    assert spec["containers"][0]["resources"]["limits"] == {resource: 4}
    assert spec["tolerations"] == [{"key": resource, "operator": "Exists", "effect": "NoSchedule"}]
    assert device_resource(vendor, architectures) == resource


def test_nodes_are_chosen_by_their_devices() -> None:
    selector = {"nvidia.com/gpu.compute.major": "10", "nvidia.com/gpu.compute.minor": "3"}
    assert placement("nvidia", ("sm103",)) == {"nodeSelector": selector}
    both = placement("nvidia", ("sm90", "sm100"))["affinity"]
    terms = both["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]  # type: ignore[call-overload, index]
    assert [[part["values"] for part in term["matchExpressions"]] for term in terms] == [
        [["9"], ["0"]],
        [["10"], ["0"]],
    ]
    assert "affinity" in placement("amd", ("gfx942",)) and "affinity" in placement("npu", ("a3",))
    # A device that no label is known for: the resource alone decides.
    assert placement("amd", ("gfx1100",)) == placement("npu", ("950",)) == {}
    assert placement("nvidia", ("sm90", "unheard-of")) == {}, "an alternative left out would shut its nodes out"


def test_the_cpu_asks_for_memory_and_no_device() -> None:
    deployment = make_deployment(container={"vendor": "cpu"}, devices=0, architectures=())
    spec = pod_of(deployment)
    assert spec["containers"][0]["resources"]["limits"] == {"memory": "80Gi"}
    assert not {"tolerations", "nodeSelector", "affinity"} & set(spec)


def test_groups_of_device_files_are_numbers() -> None:
    groups = {"vendor": "amd", "groups": ("video", "render", "992")}
    security = pod_of(make_deployment(container=groups, architectures=("gfx950",)))["securityContext"]
    assert security["supplementalGroups"] == [44, 109, 992]


def test_secrets_are_mounted_as_files_and_only_the_token_may_be_missing() -> None:
    text = manifests(make_deployment(container={"secrets": SECRETS}, monitoring=True))
    objects = read_objects(text)
    assert not any(found["kind"] == "Secret" for found in objects.values())
    (template,) = pod_templates(objects)
    volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
    sources = [source["secret"] for source in volumes["secrets"]["projected"]["sources"]]
    assert [(source["items"][0]["path"], source.get("optional", False)) for source in sources] == [
        ("api-key", False),
        ("hf-token", True),
    ]
    assert "kubectl create secret generic model-1-5-secrets --from-file=api-key=FILE --from-file=hf-token=FILE" in text
    (endpoint,) = objects["ServiceMonitor/model-1-5"]["spec"]["endpoints"]
    assert endpoint["authorization"]["credentials"] == {"name": "model-1-5-secrets", "key": "api-key"}
    plain = read_objects(manifests(make_deployment(monitoring=True)))
    assert "authorization" not in plain["ServiceMonitor/model-1-5"]["spec"]["endpoints"][0]


def test_variables_of_kubernetes_are_not_replaced() -> None:
    container = container_of(make_deployment(container={"arguments": ("m", "$(A)"), "environment": {"B": "$(C)"}}))
    assert container["args"] == ["m", "$$(A)"] and container["env"] == [{"name": "B", "value": "$$(C)"}]


def test_an_own_recipe_goes_along() -> None:
    deployment = make_deployment(recipe_folder="/home/me", recipe_files={"mine.yaml": "name: mine\ncontext: 4096\n"})
    objects = read_objects(manifests(deployment))
    assert objects["ConfigMap/model-1-5-recipe"]["data"] == {"mine.yaml": "name: mine\ncontext: 4096\n"}
    container = container_of(deployment)
    assert {"name": "TOKENSPEED_RECIPES", "value": "/etc/tokenspeed/recipes"} in container["env"]
    assert "/etc/tokenspeed/recipes" in {mount["mountPath"] for mount in container["volumeMounts"]}
    assert "/home/me" not in manifests(deployment)


def test_several_nodes_are_a_leader_and_workers() -> None:
    deployment = make_deployment(nodes=4, status="unsupported", missing=("several nodes (parallel.nodes = 4)",))
    text = manifests(deployment)
    assert "UNSUPPORTED" in text.split("\n---\n")[0] and "several nodes" in text.split("\n---\n")[0]
    objects = read_objects(text)
    template = objects["LeaderWorkerSet/model-1-5"]["spec"]["leaderWorkerTemplate"]
    assert template["size"] == 4 and template["restartPolicy"] == "RecreateGroupOnPodRestart"
    leader, worker = pod_templates(objects)
    assert {"startupProbe", "readinessProbe", "livenessProbe", "ports"} <= set(leader["spec"]["containers"][0])
    assert not {"startupProbe", "readinessProbe", "livenessProbe", "ports"} & set(worker["spec"]["containers"][0])
    assert objects["PersistentVolumeClaim/model-1-5-cache"]["spec"]["accessModes"] == ["ReadWriteMany"]
    assert objects["PodDisruptionBudget/model-1-5"]["spec"]["minAvailable"] == 4


def test_several_nodes_without_the_leader_worker_set() -> None:
    objects = read_objects(manifests(make_deployment(nodes=3), "stateful-set"))
    leader, worker = objects["StatefulSet/model-1-5-leader"]["spec"], objects["StatefulSet/model-1-5-worker"]["spec"]
    assert (leader["replicas"], worker["replicas"], worker["ordinals"]["start"]) == (1, 2, 1)
    peers = objects["Service/model-1-5-peers"]["spec"]
    assert peers["clusterIP"] == "None" and peers["publishNotReadyAddresses"] is True
    variables = {one["name"]: one for one in worker["template"]["spec"]["containers"][0]["env"]}
    assert variables["TOKENSPEED_LEADER"]["value"] == "model-1-5-leader-0.model-1-5-peers"


def every_form() -> dict[str, str]:
    volumes = (Volume(source="tokenspeed-cache", target="/cache"), Volume(source="/m", target="/m", read_only=True))
    container = {"secrets": SECRETS, "volumes": volumes, "environment": {"A": "1"}}
    files = {"recipe_folder": "/r", "recipe_files": {"mine.yaml": "name: mine\nfamily: llama\n"}}
    one = make_deployment(container=container, monitoring=True, **files)
    several = make_deployment(container=container, monitoring=True, nodes=2, **files)
    cpu = make_deployment(container={"vendor": "cpu"}, devices=0, architectures=())
    amd = make_deployment(
        container={"vendor": "amd", "groups": ("video", "render")}, architectures=("gfx942", "gfx950")
    )
    texts = {
        "one": manifests(one),
        "cpu": manifests(cpu),
        "amd": manifests(amd),
        "leader-worker-set": manifests(several),
        "stateful-set": manifests(several, "stateful-set"),
    }
    return texts | {path.stem: path.read_text() for path in SHIPPED}


EVERY_FORM = every_form()


@pytest.mark.parametrize("text", EVERY_FORM.values(), ids=EVERY_FORM.keys())
def test_the_parts_fit_together(text: str) -> None:
    objects = read_objects(text)
    templates = pod_templates(objects)
    pods = [template["metadata"]["labels"] for template in templates]

    def selected(selector: dict[str, str]) -> int:
        return sum(selector.items() <= labels.items() for labels in pods)

    api = [one for one in templates if "ports" in one["spec"]["containers"][0]]
    assert len(api) == 1, "one kind of pod answers HTTP"
    for found in objects.values():
        spec = found.get("spec", {})
        if found["kind"] == "Service" and spec.get("clusterIP") != "None":
            assert selected(spec["selector"]) == 1
            assert spec["selector"].items() <= api[0]["metadata"]["labels"].items()
        elif found["kind"] == "Service":
            assert selected(spec["selector"]) == len(templates)
        elif found["kind"] == "StatefulSet":
            assert selected(spec["selector"]["matchLabels"]) == 1
            assert f"Service/{spec['serviceName']}" in objects
        elif found["kind"] == "PodDisruptionBudget":
            assert selected(spec["selector"]["matchLabels"]) == len(templates)
        elif found["kind"] == "ServiceMonitor":
            services = [one for one in objects.values() if one["kind"] == "Service"]
            wanted = spec["selector"]["matchLabels"].items()
            assert [one for one in services if wanted <= one["metadata"]["labels"].items()]
    for template in templates:
        check_volumes(template["spec"], objects)


def check_volumes(spec: dict[str, Any], objects: dict[str, dict[str, Any]]) -> None:
    claims = [
        claim["metadata"]["name"]
        for found in objects.values()
        for claim in found.get("spec", {}).get("volumeClaimTemplates", [])
    ]
    defined = [volume["name"] for volume in spec["volumes"]] + claims
    mounted = [mount["name"] for mount in spec["containers"][0]["volumeMounts"]]
    paths = [mount["mountPath"] for mount in spec["containers"][0]["volumeMounts"]]
    assert sorted(defined) == sorted(mounted) and len(set(paths)) == len(paths)
    for volume in spec["volumes"]:
        if "persistentVolumeClaim" in volume:
            assert f"PersistentVolumeClaim/{volume['persistentVolumeClaim']['claimName']}" in objects
        if "configMap" in volume:
            assert f"ConfigMap/{volume['configMap']['name']}" in objects


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@pytest.mark.parametrize("text", EVERY_FORM.values(), ids=EVERY_FORM.keys())
def test_kubernetes_takes_them(text: str, version: str) -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    jsonschema = pytest.importorskip("jsonschema")
    objects = read_objects(text)
    for found in objects.values():
        own = BY_KIND.get(found["kind"])
        if own is None:
            validator.validate(found, version, strict=True)
        else:
            jsonschema.validate(found, own)
    for template in pod_templates(objects):
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "x", **template["metadata"]},
            "spec": template["spec"],
        }
        validator.validate(pod, version, strict=True)


def test_the_schemas_refuse_a_wrong_key() -> None:
    """They are worth asking."""
    validator = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    jsonschema = pytest.importorskip("jsonschema")
    objects = read_objects(EVERY_FORM["one"])
    objects["StatefulSet/model-1-5"]["spec"]["template"]["spec"]["containers"][0]["command_line"] = ["x"]
    with pytest.raises(validator.ValidationError):
        validator.validate(objects["StatefulSet/model-1-5"], NEWEST, strict=True)
    group = read_objects(EVERY_FORM["leader-worker-set"])["LeaderWorkerSet/model-1-5"]
    group["spec"]["leaderWorkerTemplate"]["groupSize"] = 2
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(group, BY_KIND["LeaderWorkerSet"])


def test_names_are_names_of_hosts() -> None:
    assert make_deployment(recipe="DeepSeek_V3.2").name == "deepseek-v3-2"
    assert make_deployment(recipe="kimi-k2.5", profile="smoke").name == "kimi-k2-5-smoke"
