"""How a container of ours is run, whatever runs it: docker, podman, compose and Kubernetes are rendered from this."""

from dataclasses import dataclass, field
from pathlib import Path

from tokenspeed.recipes.container_devices import Volume, device_access
from tokenspeed.recipes.flags import FLAGS
from tokenspeed.recipes.machine import Machine
from tokenspeed.recipes.resolve import Resolution, settings
from tokenspeed.recipes.resolved import GIB
from tokenspeed.recipes.schema import HuggingFaceWeights, PackageWeights, PathWeights, RandomWeights, Vendor

__all__ = ["ContainerSpec", "Secret", "Volume", "container_spec", "image_of", "vendor_of"]

USER = "10001:0"
"""User and group of the images; group 0 may write the caches, so that any uid works with it."""

CACHE_FOLDER = "/cache"
CACHE_VOLUME = "tokenspeed-cache"
SECRETS_FOLDER = "/run/secrets"
DEFAULT_PORT = 8000

SHM_BYTES = GIB
SHM_BYTES_OF_RANKS = 16 * GIB
"""/dev/shm for one rank, and where ranks exchange tensors through it. It is a bound, not a reservation."""

_AFTER_DRAIN_S = 10

INHERITED = ("HF_ENDPOINT", "HF_HUB_OFFLINE", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
"""Variables that reach the container by their name where they are set: a proxy's password shows in no command."""


@dataclass(frozen=True, kw_only=True)
class Secret:
    """A file of the host that the container reads as ``/run/secrets/<name>``; it is never an environment variable."""

    name: str
    file: str

    @property
    def target(self) -> str:
        """Where the container reads it."""
        return f"{SECRETS_FOLDER}/{self.name}"


@dataclass(frozen=True, kw_only=True)
class ContainerSpec:
    """One container.

    Attributes:
        name: of the container, service and workload.
        image: reference, with its digest where the recipe pins one.
        vendor: whose devices it takes: "cpu", "nvidia", "amd" or "npu".
        arguments: after the image's name: what goes to ``tokenspeed serve``.
        environment: names to values; no secret is ever in it.
        cdi_devices: names by the Container Device Interface (``nvidia.com/gpu=all``), preferred where they are.
        gpus: what docker's ``--gpus`` takes, for NVIDIA devices on a machine without a CDI specification.
        devices: device files of the host, where the vendor is handed over by them.
        groups: supplementary groups that may open those files, by name or number.
        volumes, secrets: what is mounted; the root itself is read-only and /tmp a tmpfs.
        shm_bytes: size of /dev/shm.
        memlock: whether locked memory must be unbounded (pinned transfers).
        host: address of the host that the port is published on.
        port: the same inside and outside, so that what the server prints is what a client uses.
        grace_s: from SIGTERM to SIGKILL: the drain and a little more.
    """

    name: str
    image: str
    vendor: str
    arguments: tuple[str, ...]
    port: int
    host: str = "127.0.0.1"
    environment: dict[str, str] = field(default_factory=dict)
    cdi_devices: tuple[str, ...] = ()
    gpus: str = ""
    devices: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    volumes: tuple[Volume, ...] = ()
    secrets: tuple[Secret, ...] = ()
    shm_bytes: int = SHM_BYTES
    memlock: bool = False
    grace_s: int = 40


def vendor_of(resolution: Resolution) -> Vendor:
    """Whose devices the profile runs on; a bare path runs on the CPU."""
    if resolution.loaded is None:
        return "cpu"
    return resolution.loaded.recipe.profiles[resolution.profile].when.vendor


def image_of(resolution: Resolution) -> str:
    """The image the profile names, else the one that ``make image`` builds for its vendor."""
    named = resolution.loaded.recipe.profiles[resolution.profile].image if resolution.loaded is not None else ""
    return named or f"tokenspeed-{vendor_of(resolution)}"


def container_spec(
    resolution: Resolution,
    machine: Machine,
    *,
    image: str = "",
    name: str = "",
    portable: bool = False,
    token_file: str = "",
    certificates: str = "",
) -> ContainerSpec:
    """Builds the container that serves ``resolution`` on ``machine``.

    Args:
        image: instead of the profile's and the vendor's.
        name: instead of ``tokenspeed-<port>``.
        portable: for another host, as compose and Kubernetes are: the recipe is the image's own, and weights are
            fetched into the cache volume. Else this host's recipe and weights are handed in, read-only.
        token_file: a file with a token for gated repositories, "" for none.
        certificates: a file of certificates that downloads trust in place of the image's own, "" for none.
    """
    keys, vendor = resolution.keys, vendor_of(resolution)
    port = keys.api.port
    access = device_access(vendor, machine)
    secrets = _secrets(resolution, token_file)
    own = [] if portable else _recipe_volumes(resolution) + _weight_volumes(resolution)
    environment = {"TOKENSPEED_RECIPES": own[0].source} if not portable and resolution.loaded is not None else {}
    if certificates:
        own.append(Volume(source=_absolute(certificates), target=_absolute(certificates), read_only=True))
        environment["SSL_CERT_FILE"] = _absolute(certificates)
    if token_file:
        environment["HF_TOKEN_PATH"] = f"{SECRETS_FOLDER}/hf-token"
    return ContainerSpec(
        name=name or f"tokenspeed-{port}",
        image=image or image_of(resolution),
        vendor=vendor,
        arguments=_arguments(resolution),
        host=keys.api.host,
        port=port,
        environment=environment,
        cdi_devices=access.cdi,
        gpus=access.gpus,
        devices=access.devices,
        groups=access.groups,
        volumes=(Volume(source=CACHE_VOLUME, target=CACHE_FOLDER), *own, *_named_volumes(resolution), *access.volumes),
        secrets=secrets,
        shm_bytes=SHM_BYTES_OF_RANKS if keys.parallel.tp > 1 else SHM_BYTES,
        memlock=vendor != "cpu",
        grace_s=int(keys.drain_s) + _AFTER_DRAIN_S,
    )


def _arguments(resolution: Resolution) -> tuple[str, ...]:
    """The same target and profile, and every key that the command line set; addresses are the container's own."""
    if isinstance(resolution.weights, PathWeights) and resolution.loaded is None:
        arguments = [resolution.weights.path]
    else:
        arguments = [resolution.name, "--profile", resolution.profile]
    flags = {flag.key: flag for flag in FLAGS}
    for key, value in settings(resolution.keys).items():
        given = resolution.sources[key].startswith(("--", "SET"))
        if key == "api.port" and value != DEFAULT_PORT:
            arguments += ["--port", str(value)]
        elif key == "api.api_key_file" and value:
            arguments += ["--api-key-file", f"{SECRETS_FOLDER}/api-key"]
        elif given and not key.startswith("api.port") and key != "api.host":
            flag = flags.get(key)
            if flag is None or flag.kind == "gib":
                arguments += ["--set", f"{key}={'' if value is None else value}"]
            elif flag.kind == "switch":
                arguments += [flag.name if value else f"--no-{flag.name[2:]}"]
            else:
                arguments += [flag.name, str(value)]
    return tuple(arguments)


def _secrets(resolution: Resolution, token_file: str) -> tuple[Secret, ...]:
    key_file = resolution.keys.api.api_key_file
    return tuple(
        Secret(name=name, file=_absolute(file))
        for name, file in (("api-key", key_file), ("hf-token", token_file))
        if file
    )


def _recipe_volumes(resolution: Resolution) -> list[Volume]:
    """The folder of the recipe, under its own path: what the operator edited is what runs, and errors name it."""
    if resolution.loaded is None:
        return []
    folder = str(resolution.loaded.path.absolute().parent)
    return [Volume(source=folder, target=folder, read_only=True)]


def _weight_volumes(resolution: Resolution) -> list[Volume]:
    """Weights that are on this host, where the container looks for them; else it fetches them into its cache."""
    weights, located = resolution.weights, resolution.located
    if isinstance(weights, RandomWeights) or not located.present or not located.path:
        return []
    path = Path(located.path)
    if isinstance(weights, PackageWeights):
        target = f"{CACHE_FOLDER}/tokenspeed/packages/{path.parent.name}"
        return [Volume(source=str(path.parent), target=target, read_only=True)]
    if isinstance(weights, HuggingFaceWeights):
        repository = path.parent.parent  # hub/models--owner--name/snapshots/<commit>: its files are links to blobs
        target = f"{CACHE_FOLDER}/huggingface/hub/{repository.name}"
        return [Volume(source=str(repository), target=target, read_only=True)]
    return [Volume(source=str(path), target=str(path), read_only=True)]


def _named_volumes(resolution: Resolution) -> list[Volume]:
    """What the configuration names by path, under the same path."""
    keys = resolution.keys
    volumes = []
    if keys.kv.storage_dir:
        folder = _absolute(keys.kv.storage_dir)
        volumes.append(Volume(source=folder, target=folder))
    template = keys.api.chat_template
    if template and "{{" not in template and "{%" not in template:
        file = _absolute(template)
        volumes.append(Volume(source=file, target=file, read_only=True))
    return volumes


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute())
