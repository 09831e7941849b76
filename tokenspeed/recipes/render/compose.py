"""A compose file (compose specification, one machine) for docker compose and podman."""

from tokenspeed.recipes.container import DEFAULT_PORT, INHERITED, USER
from tokenspeed.recipes.container_devices import Volume
from tokenspeed.recipes.document import RecipeError
from tokenspeed.recipes.render.deployment import (
    RECIPES_FOLDER,
    TEMPORARY_BYTES,
    Deployment,
    header,
    minutes_text,
    size_text,
)
from tokenspeed.recipes.render.yaml_text import Comment, Mapped, Node, comment_lines, write_yaml

PROMETHEUS_IMAGE = "docker.io/prom/prometheus:v3.5.0"
GRAFANA_IMAGE = "docker.io/grafana/grafana:12.1.0"

RESTARTS = 3

_STACK_BYTES = 64 << 20
_OPEN_FILES = 65536
_LOG: Mapped = {"driver": "json-file", "options": {"max-size": "50m", "max-file": "5"}}

_GROUPS: dict[str, str] = {
    "video": "${VIDEO_GID:-44}",
    # The number differs between distributions and the image has no group of that name: no default could be right.
    "render": "${RENDER_GID:?export RENDER_GID=$$(getent group render | cut -d: -f3)}",
}
"""Groups of the host by number: docker looks a name up in the image."""

_WITHOUT_CDI = """\
Devices by the Container Device Interface. Where docker has no specification of them (nvidia-ctk cdi generate \
--output=/etc/cdi/nvidia.yaml writes one), take this instead of the next line:
  deploy: {resources: {reservations: {devices: [{driver: nvidia, count: all, capabilities: [gpu]}]}}}"""


def compose_file(deployment: Deployment) -> str:
    """Returns the text; raises RecipeError where one machine is not enough."""
    if deployment.nodes > 1:
        raise RecipeError(
            f"{deployment.recipe} spans {deployment.nodes} nodes and compose is for one machine; "
            "take --as kubernetes, or --nodes 1"
        )
    if deployment.monitoring and deployment.container.port != DEFAULT_PORT:
        raise RecipeError(
            f"--monitoring scrapes port {DEFAULT_PORT} of the container and api.port is {deployment.container.port}; "
            f"leave it at {DEFAULT_PORT} and publish another: PORT={deployment.container.port} docker compose up"
        )
    services: dict[str, Node] = {"tokenspeed": _service(deployment)}
    document: dict[str, Node] = {"name": deployment.name, "services": services}
    volumes: dict[str, Node] = {
        volume.source: {"name": volume.source}
        for volume in deployment.container.volumes
        if not volume.source.startswith("/")
    }
    if deployment.monitoring:
        services |= _monitoring()
        volumes |= {"prometheus": {}, "grafana": {}}
    document["volumes"] = volumes
    secrets = _secret_files(deployment)
    if secrets:
        document["secrets"] = secrets
    return comment_lines(header(deployment, _how(deployment))) + "\n" + write_yaml(document)


def _how(deployment: Deployment) -> str:
    container = deployment.container
    monitoring = " --profile monitoring" if deployment.monitoring else ""
    lines = [
        f"  docker compose -f FILE{monitoring} up --detach --wait   (ready within {minutes_text(deployment.start_s)})",
        "  docker compose -f FILE logs --follow",
        f"  docker compose -f FILE down   (open streams may finish: up to {container.grace_s} s)",
        "",
        "What to change, here or in the environment:",
        "  TOKENSPEED_IMAGE  the image, by digest in production: name@sha256:...",
        f"  BIND_ADDRESS      {container.host}; 0.0.0.0 lets other machines in: set a key then (--api-key-file)",
        f"  PORT              {container.port}",
    ]
    if deployment.monitoring:
        lines[2:2] = ["  http://127.0.0.1:3000 is Grafana with the dashboard, http://127.0.0.1:9090 Prometheus"]
        lines += ["  TOKENSPEED_OBSERVABILITY  the folder images/observability; ../observability, seen from this file"]
    for secret in container.secrets:
        lines += [f"  {_file_variable(secret.name):<17} file that holds the {secret.name}"]
    if container.secrets:
        lines += ["  Files of secrets must be readable by group 0: chgrp 0 FILE && chmod 640 FILE"]
    return "\n".join(lines)


def _service(deployment: Deployment) -> Mapped:
    container = deployment.container
    service: dict[str, Node] = {
        "image": f"${{TOKENSPEED_IMAGE:-{container.image}}}",
        "command": [_literal(argument) for argument in container.arguments],
        "ports": [f"${{BIND_ADDRESS:-{container.host}}}:${{PORT:-{container.port}}}:{container.port}"],
        Comment("A wrong setting ends the container (exit code 2 or 3); so it is not started again for ever."): None,
        "restart": f"on-failure:{RESTARTS}",
        Comment("SIGTERM lets open streams finish; this is the drain and a little more."): None,
        "stop_grace_period": f"{container.grace_s}s",
    }
    service["environment"] = {
        **{name: _literal(value) for name, value in deployment.environment().items()},
        Comment("Passed on where they are set."): None,
        **dict.fromkeys(INHERITED),
    }
    service |= _devices(deployment)
    service |= _mounts(deployment)
    service |= _confinement()
    service["healthcheck"] = {
        Comment("Healthy once the model has answered. The weights are fetched and read before that."): None,
        "test": ["CMD", "python", "-c", _ask(container.port)],
        "interval": "10s",
        "timeout": "3s",
        "retries": 3,
        "start_period": f"{deployment.start_s}s",
    }
    service["logging"] = _LOG
    return service


def _ask(port: int) -> str:
    return f"import urllib.request as u; u.urlopen('http://127.0.0.1:{port}/ready', timeout=2)"


def _devices(deployment: Deployment) -> dict[str, Node]:
    container = deployment.container
    part: dict[str, Node] = {}
    if container.gpus:
        device = {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
        part["deploy"] = {"resources": {"reservations": {"devices": [device]}}}
    if container.cdi_devices and container.vendor == "nvidia":
        part[Comment(_WITHOUT_CDI)] = None
    named = [*container.cdi_devices, *(f"{path}:{path}" for path in container.devices)]
    if named:
        part["devices"] = named
    if container.groups:
        part["group_add"] = [_GROUPS.get(group, group) for group in container.groups]
    part["shm_size"] = size_text(container.shm_bytes).removesuffix("i").lower()
    limits: dict[str, Node] = {"nofile": {"soft": _OPEN_FILES, "hard": _OPEN_FILES}}
    if container.memlock:
        limits = {"memlock": {"soft": -1, "hard": -1}, "stack": _STACK_BYTES, **limits}
    part["ulimits"] = limits
    return part


def _mounts(deployment: Deployment) -> dict[str, Node]:
    container = deployment.container
    volumes = container.volumes
    if deployment.recipe_folder:
        volumes += (Volume(source=deployment.recipe_folder, target=RECIPES_FOLDER, read_only=True),)
    part: dict[str, Node] = {"volumes": [_volume(volume) for volume in volumes]}
    if container.secrets:
        # Under the same name: a secret is mounted at /run/secrets/<name>.
        part["secrets"] = [secret.name for secret in container.secrets]
    return part


def _volume(volume: Volume) -> Mapped:
    named = not volume.source.startswith("/")
    mount: dict[str, Node] = {
        "type": "volume" if named else "bind",
        "source": _literal(volume.source),
        "target": _literal(volume.target),
    }
    if volume.read_only:
        mount["read_only"] = True
    if not named:  # a path that is not there is an error, not a new empty folder
        mount["bind"] = {"create_host_path": False}
    return mount


def _confinement() -> dict[str, Node]:
    return {
        Comment("Any uid works with group 0; the root is read-only and no capability is needed."): None,
        "user": USER,
        "init": True,
        "read_only": True,
        "tmpfs": [f"/tmp:mode=1777,exec,nosuid,nodev,size={TEMPORARY_BYTES}"],
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
    }


def _secret_files(deployment: Deployment) -> dict[str, Node]:
    files = {
        secret.name: {"file": f"${{{_file_variable(secret.name)}:-{_literal(secret.file)}}}"}
        for secret in deployment.container.secrets
    }
    if deployment.monitoring:
        # Prometheus sends the server's key, and an empty one where the server asks for none.
        key = next((found.file for found in deployment.container.secrets if found.name == "api-key"), "/dev/null")
        files["metrics-key"] = {"file": f"${{{_file_variable('api-key')}:-{_literal(key)}}}"}
    return dict(files)


def _file_variable(name: str) -> str:
    return f"{name.upper().replace('-', '_')}_FILE"


def _literal(text: str) -> str:
    """The text as it is: compose would read a dollar sign as the start of a variable."""
    return text.replace("$", "$$")


def _monitoring() -> dict[str, Node]:
    folder = "${TOKENSPEED_OBSERVABILITY:-../observability}"
    prometheus: Mapped = {
        "image": f"${{PROMETHEUS_IMAGE:-{PROMETHEUS_IMAGE}}}",
        "profiles": ["monitoring"],
        "ports": ["127.0.0.1:${PROMETHEUS_PORT:-9090}:9090"],
        "restart": "unless-stopped",
        "command": ["--config.file=/etc/prometheus/prometheus.yml", "--storage.tsdb.retention.time=15d"],
        "volumes": [
            _file(f"{folder}/prometheus.yml", "/etc/prometheus/prometheus.yml"),
            _file(f"{folder}/alerts.yaml", "/etc/prometheus/alerts.yaml"),
            {"type": "volume", "source": "prometheus", "target": "/prometheus"},
        ],
        "secrets": ["metrics-key"],
        Comment("Group 0 may read the file of the key."): None,
        "user": "65534:0",
        "read_only": True,
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "logging": _LOG,
    }
    grafana: Mapped = {
        "image": f"${{GRAFANA_IMAGE:-{GRAFANA_IMAGE}}}",
        "profiles": ["monitoring"],
        "ports": ["127.0.0.1:${GRAFANA_PORT:-3000}:3000"],
        "restart": "unless-stopped",
        Comment("Whoever reaches the port may look and nobody may change: there is no account and no password."): None,
        "environment": {
            "GF_AUTH_ANONYMOUS_ENABLED": "true",
            "GF_AUTH_ANONYMOUS_ORG_ROLE": "Viewer",
            "GF_AUTH_BASIC_ENABLED": "false",
            "GF_AUTH_DISABLE_LOGIN_FORM": "true",
            "GF_ANALYTICS_REPORTING_ENABLED": "false",
            "GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH": "/etc/tokenspeed/grafana-dashboard.json",
        },
        "volumes": [
            _file(f"{folder}/grafana-provisioning.yaml", "/etc/grafana/provisioning/datasources/tokenspeed.yaml"),
            _file(f"{folder}/grafana-dashboard.json", "/etc/tokenspeed/grafana-dashboard.json"),
            {"type": "volume", "source": "grafana", "target": "/var/lib/grafana"},
        ],
        "read_only": True,
        "tmpfs": ["/tmp"],
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "logging": _LOG,
    }
    return {
        Comment("Only with: docker compose --profile monitoring up"): None,
        "prometheus": prometheus,
        "grafana": grafana,
    }


def _file(source: str, target: str) -> Mapped:
    return {"type": "bind", "source": source, "target": target, "read_only": True, "bind": {"create_host_path": False}}
