"""How Kubernetes calls each vendor's devices, and by which labels its nodes tell what they have."""

from dataclasses import dataclass

from tokenspeed.recipes.render.yaml_text import Node


@dataclass(frozen=True, kw_only=True)
class DeviceResource:
    """The resource a vendor's device plugin offers, and who puts the labels on the nodes."""

    resource: str
    plugin: str
    labels_by: str


RESOURCES: dict[str, DeviceResource] = {
    "nvidia": DeviceResource(
        resource="nvidia.com/gpu",
        plugin="NVIDIA's device plugin (GPU operator)",
        labels_by="NVIDIA's GPU feature discovery",
    ),
    "amd": DeviceResource(
        resource="amd.com/gpu",
        plugin="AMD's device plugin",
        labels_by="AMD's node labeller",
    ),
    "npu": DeviceResource(
        resource="huawei.com/Ascend910",
        plugin="the Ascend device plugin and Ascend Docker Runtime",
        labels_by="the Ascend cluster components",
    ),
}

_NEWER_ASCEND = "huawei.com/npu"
"""What the plugin calls devices after the 910 series."""

_AMD_DEVICE_IDS = {"gfx942": ("74a1", "74a5"), "gfx950": ("75a0", "75a3")}
"""PCI device ids: MI300X, MI325X; MI350X, MI355X."""

_ASCEND_SERVERS = {"a2": ("module-910b-8",), "a3": ("module-a3-16", "module-a3-16-super-pod")}


def device_resource(vendor: str, architectures: tuple[str, ...]) -> str:
    """The resource that a pod asks for."""
    if vendor == "npu" and architectures and not set(architectures) & set(_ASCEND_SERVERS):
        return _NEWER_ASCEND
    return RESOURCES[vendor].resource


def node_choices(vendor: str, architecture: str) -> list[tuple[str, list[str]]]:
    """Labels that a node with such devices carries, each with the values that will do; empty where none is known."""
    if vendor == "nvidia" and architecture.startswith("sm"):
        capability = architecture.removeprefix("sm")
        return [
            ("nvidia.com/gpu.compute.major", [capability[:-1]]),
            ("nvidia.com/gpu.compute.minor", [capability[-1:]]),
        ]
    if vendor == "amd" and architecture in _AMD_DEVICE_IDS:
        return [("amd.com/gpu.device-id", list(_AMD_DEVICE_IDS[architecture]))]
    if vendor == "npu" and architecture in _ASCEND_SERVERS:
        return [("accelerator-type", list(_ASCEND_SERVERS[architecture]))]
    return []


def placement(vendor: str, architectures: tuple[str, ...]) -> dict[str, Node]:
    """``nodeSelector`` where every label has one value, else ``affinity`` with an alternative for each architecture."""
    choices = [found for found in (node_choices(vendor, name) for name in architectures) if found]
    if not choices or len(choices) < len(architectures):
        return {}
    if len(choices) == 1 and all(len(values) == 1 for _, values in choices[0]):
        return {"nodeSelector": {label: values[0] for label, values in choices[0]}}
    terms: list[Node] = [
        {"matchExpressions": [{"key": label, "operator": "In", "values": values} for label, values in found]}
        for found in choices
    ]
    required: dict[str, Node] = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    return {"affinity": {"nodeAffinity": required}}
