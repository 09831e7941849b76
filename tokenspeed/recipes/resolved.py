"""The configuration an engine runs with, after recipe, profile, flags and defaults were brought together.

It is what is printed at the start and what crosses to the engine process as JSON; printed equals used. No torch here.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict

GIB = 1 << 30

DEVICE_FRACTION = 0.9
"""The part of a device's memory that a rank takes where the recipe does not say."""

Activations = Literal["auto", "float32", "bfloat16", "int16", "int8", "fp4"]
"""What products may round their inputs to; "auto" is bfloat16 for weights, and caches, in bfloat16, else float32."""


GraphsKind = Literal["auto", "off", "dispatch"]
"""What captures forwards: "auto" what the device has (graphs of a GPU or NPU, the native recorder of the CPU's
kernels), "dispatch" a recorder of tensor operations on the CPU, for tests and debugging."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class ModelSource(_Frozen):
    """Where the weights, the tokenizer and the template are.

    Attributes:
        kind: "gguf" (one file), "folder" (config.json, safetensors, tokenizer.json), "random" (a smoke profile: the
            dimensions are in ``random_config``, the tokenizer is the built-in byte tokenizer).
        path: absolute path of the file or folder; "" for random.
        random_config: an HF-style config dictionary for "random", as JSON text.
        seed: of the random weights.
    """

    kind: Literal["gguf", "folder", "random"]
    path: str = ""
    random_config: str = ""
    seed: int = 0


class KVConfig(_Frozen):
    """The KV cache. ``dtype`` "auto" is float32 for float32 checkpoints, float16 for GGUF, else bfloat16; never 8 bits.

    ``bytes`` 0 sizes it: on the CPU min(max_seqs x max_len, a quarter of the memory that the cgroup leaves free), on a
    device what is left of ``fraction`` of its memory beside weights and buffers.

    ``host_bytes`` is the host pool behind it (0: none), ``storage_dir`` an absolute path or "" for no storage tier
    behind that, ``storage_bytes`` its bound (0: a tenth of its file system).
    """

    dtype: Literal["auto", "float32", "bfloat16", "float16", "float8_e4m3"] = "auto"
    granularity: int = 64
    bytes: int = 0
    fraction: float = DEVICE_FRACTION
    host_bytes: int = 0
    storage_dir: str = ""
    storage_bytes: int = 0


class SchedulerSettings(_Frozen):
    """``max_len`` 0 is the model's context length (or the most that the KV cache holds, said at the start).

    ``overlap`` is 0 by measurement on the CPU, where planning beside a step takes cores from it; a profile for a device
    sets 1. Decode steps of up to ``max_recorded_seqs`` rows are recorded and made again with one
    call. Where forwards are captured as graphs (``graphs``), decodes are padded to the next of the ladder's sizes:
    ``capture_sizes``, where empty computed up to ``max_capture_batch`` (None: see capture_ladder.py); and prefills to
    the next of ``capture_prefill_tokens``, if any. ``implementation`` "reference" is the plain Python twin, for
    comparisons. ``journal`` is the absolute path of the file that every input of the scheduler is written to, "" for
    none.
    """

    max_len: int = 0
    max_seqs: int = 64
    chunk: int = 256
    mixed: bool = True
    overlap: int = 0
    prefix_cache: bool = True
    headroom: int = 4096
    max_recorded_seqs: int = 64
    graphs: GraphsKind = "auto"
    max_capture_batch: int | None = None
    capture_sizes: list[int] = []
    capture_prefill_tokens: list[int] = []
    implementation: Literal["native", "reference"] = "native"
    journal: str = ""


class EmbeddingSettings(_Frozen):
    """What /v1/embeddings gives; frontend/embedding_rules.py reads "auto" and ``normalize`` None in the checkpoint."""

    pooling: Literal["auto", "none", "last", "mean"] = "auto"
    normalize: bool | None = None
    dimensions: str = ""


class ParallelSettings(_Frozen):
    """Ranks that share the model: ``tp`` processes, among which the columns of every layer are divided; with ``ep``
    (``tp`` or 1) experts are whole, each on one of them."""

    tp: int = 1
    ep: int = 1


class ApiSettings(_Frozen):
    """What the API does on behalf of the model; docs/recipes.md says what each bound means (0: none).

    ``default_sampling`` holds request fields a client may override.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    default_sampling: dict[str, float | int] = {}
    chat_template: str = ""
    embeddings: EmbeddingSettings = EmbeddingSettings()
    max_body_bytes: int = 32 << 20
    api_key_file: str = ""
    structured_output: Literal["llguidance", "none"] = "llguidance"
    requests_per_minute: int = 0
    max_concurrent: int = 0
    admin_host: str = "127.0.0.1"
    admin_port: int | None = None
    max_connections: int = 4096
    max_waiting: int = 1024
    max_prompt_tokens: int = 0
    max_request_s: float = 0.0
    keep_alive_s: float = 15.0
    slow_reader_s: float = 30.0
    stream_buffer_bytes: int = 1 << 20
    response_store_count: int = 1024
    response_store_bytes: int = 64 << 20
    otlp_endpoint: str = ""


class FormatSettings(_Frozen):
    """How the model writes tool calls and reasoning, by the names of recipes/formats.py, and the variable that switches
    reasoning in its template; "" for none of it."""

    tools: str = ""
    reasoning: str = ""
    thinking_switch: str = ""


class LogConfig(_Frozen):
    """The log; see docs/logs.md. ``file`` is an absolute path, "" for standard error."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["text", "json"] = "text"
    file: str = ""
    max_bytes: int = 64 << 20
    files: int = 5


class ResolvedConfig(_Frozen):
    """Everything, resolved.

    Attributes:
        name: of the recipe, or of the path's last part.
        served_name: the id under /v1/models.
        recipe, profile: where it came from; "" for a bare path.
        recipe_hash: short hash of the recipe file's content, "" without one.
        device: what PyTorch calls it: "cpu", "cuda" (NVIDIA and AMD) or "npu"; each rank has one.
        threads: compute threads of one rank; 0 divides the cores that this process may use among the ranks.
        kernels: op to the name of a kernel or solution that the operator insists on.
        enforce: "latency", "throughput", "determinism" or "portability".
        activations: what products may round their inputs to; "auto" follows the weight or the cache, and the device
            (see auto_activations); "fp4" quantises what meets weights of four bits, and refuses a model without.
        seed: default seed source for requests that give none (0: from the operating system).
        drain_s: how long SIGTERM waits for open streams.
        env: environment for the engine process.
        predicted: term of the memory plan to its bytes on a rank; empty where nothing was planned.
        settings: every configuration key, dotted, with its value as it was written.
        sources: configuration key to where its value came from ("default", "recipe", "profile cpu", "--port").
    """

    name: str
    served_name: str
    model: ModelSource
    recipe: str = ""
    profile: str = ""
    recipe_hash: str = ""
    device: str = "cpu"
    threads: int = 0
    parallel: ParallelSettings = ParallelSettings()
    kv: KVConfig = KVConfig()
    scheduler: SchedulerSettings = SchedulerSettings()
    api: ApiSettings = ApiSettings()
    formats: FormatSettings = FormatSettings()
    log: LogConfig = LogConfig()
    kernels: dict[str, str] = {}
    enforce: Literal["latency", "throughput", "determinism", "portability"] = "latency"
    activations: Activations = "auto"
    seed: int = 0
    drain_s: float = 30.0
    env: dict[str, str] = {}
    settings: dict[str, str | int | float | bool | None] = {}
    sources: dict[str, str] = {}
    predicted: dict[str, int] = {}
