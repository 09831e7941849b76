"""The flags of ``serve`` and ``run``: each stands for exactly one key of a recipe. docs/recipes.md shows this table.

The command line builds its options from it, so this file imports nothing that takes time.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Flag:
    """``name`` sets ``key``; ``kind`` is the type on the command line ("gib": GiB, written as bytes)."""

    name: str
    key: str
    kind: Literal["text", "integer", "number", "switch", "gib"]
    help: str

    @property
    def parameter(self) -> str:
        """The flag as a Python name."""
        return self.name.removeprefix("--").replace("-", "_")


FLAGS: tuple[Flag, ...] = (
    Flag("--host", "api.host", "text", "address to listen on"),
    Flag("--port", "api.port", "integer", "port to listen on; 0 takes a free one"),
    Flag("--served-name", "served_name", "text", "the model's id under /v1/models"),
    Flag("--max-model-len", "scheduler.max_len", "integer", "longest prompt plus output of one request, in tokens"),
    Flag("--max-num-seqs", "scheduler.max_seqs", "integer", "requests that run together"),
    Flag("--chunked-prefill-size", "scheduler.chunk", "integer", "tokens computed in one step"),
    Flag("--mixed-batches", "scheduler.mixed", "switch", "prefill and decode in one step"),
    Flag("--overlap-depth", "scheduler.overlap", "integer", "steps planned ahead of the device: 0 or 1"),
    Flag("--prefix-cache", "scheduler.prefix_cache", "switch", "share the cache of equal prompt beginnings"),
    Flag("--headroom-tokens", "scheduler.headroom", "integer", "output tokens to reserve for a request at admission"),
    Flag(
        "--max-recorded-seqs", "scheduler.max_recorded_seqs", "integer", "largest decode step that is recorded; 0: none"
    ),
    Flag("--graphs", "scheduler.graphs", "text", "what captures steps: auto, off, or dispatch (debugging, on the CPU)"),
    Flag("--max-capture-batch", "scheduler.max_capture_batch", "integer", "largest decode step captured as a graph"),
    Flag("--scheduler", "scheduler.implementation", "text", "native, or reference: its plain twin, for comparisons"),
    Flag("--journal", "scheduler.journal", "text", "new file for every input of the scheduler, prompts included"),
    Flag("--kv-cache-dtype", "kv.dtype", "text", "auto, float32, bfloat16, float16 or float8_e4m3"),
    Flag("--kv-cache-gb", "kv.bytes", "gib", "size of the KV cache in GiB"),
    Flag("--host-cache-gb", "kv.host_bytes", "gib", "host memory behind the KV cache in GiB; 0: none"),
    Flag("--storage-dir", "kv.storage_dir", "text", "directory that keeps KV blocks over restarts"),
    Flag("--storage-gb", "kv.storage_bytes", "gib", "bound of that directory in GiB; 0: a tenth of its file system"),
    Flag("--block-granularity", "kv.granularity", "integer", "tokens of one KV block: 16, 32, 64 or 128"),
    Flag("--threads", "threads", "integer", "compute threads; 0 takes the cores this process may use"),
    Flag("--objective", "enforce", "text", "latency, throughput, determinism or portability"),
    Flag(
        "--activations",
        "activations",
        "text",
        "input of products: auto, float32, bfloat16, int16, int8 or fp4",
    ),
    Flag("--seed", "seed", "integer", "seed for requests that give none; 0 draws one"),
    Flag("--drain-seconds", "drain_s", "number", "how long SIGTERM waits for open streams"),
    Flag("--chat-template", "api.chat_template", "text", "file with a chat template instead of the model's own"),
    Flag(
        "--embedding-pooling", "api.embeddings.pooling", "text", "what /v1/embeddings pools: last, mean, none, or auto"
    ),
    Flag("--embedding-dimensions", "api.embeddings.dimensions", "text", "sizes that embeddings may be cut to: 32-1024"),
    Flag(
        "--tool-format", "formats.tools", "text", "how the model writes tool calls: hermes, qwen3_coder, kimi_k2, ..."
    ),
    Flag("--reasoning-format", "formats.reasoning", "text", "how the model writes reasoning: qwen3, deepseek_r1, ..."),
    Flag("--thinking-switch", "formats.thinking_switch", "text", "template variable that reasoning_effort sets"),
    Flag("--api-key-file", "api.api_key_file", "text", "file with the keys that clients must send"),
    Flag("--requests-per-minute", "api.requests_per_minute", "integer", "requests of one key a minute; 0: no bound"),
    Flag("--max-concurrent-requests", "api.max_concurrent", "integer", "requests of one key at a time; 0: no bound"),
    Flag(
        "--max-waiting", "api.max_waiting", "integer", "choices without a token beyond which requests get 429; 0: all"
    ),
    Flag("--max-request-seconds", "api.max_request_s", "number", "longest time of any request; 0: no bound"),
    Flag("--admin-port", "api.admin_port", "integer", "port of the administration, on this machine only"),
    Flag("--log-level", "log.level", "text", "debug, info, warning or error"),
    Flag("--log-format", "log.format", "text", "text, or json: one object a line"),
    Flag("--log-file", "log.file", "text", "file for the log, rotated by size, instead of standard error"),
    Flag("--tensor-parallel-size", "parallel.tp", "integer", "ranks that share every layer"),
)
