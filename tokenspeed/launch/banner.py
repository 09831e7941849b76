"""What a person sees at the terminal while a server starts, and when it is ready."""

import json
import shlex
import sys

from tokenspeed.messages import EngineStatus
from tokenspeed.recipes.resolved import GIB, ResolvedConfig


class PhaseLine:
    """Shows where a start stands: rewritten in place on a terminal, one line a phase in a log."""

    def __init__(self) -> None:
        self._phase = ""

    def show(self, phase: str, status: EngineStatus | None) -> None:
        progress = f" {status.done}/{status.total}" if status is not None and status.total else ""
        detail = f" {status.detail}" if status is not None and status.detail else ""
        if sys.stdout.isatty():
            print(f"\r\x1b[K{f'  {phase}{progress}{detail}'[:100]}", end="", flush=True)
        elif phase != self._phase:
            print(f"  {phase}{detail}", flush=True)
        self._phase = phase


def print_ready(config: ResolvedConfig, facts: dict[str, str | int | float | bool | dict[str, str] | None]) -> None:
    """Prints the way in: what serves, the URL, a curl line, and how to watch."""
    if sys.stdout.isatty():
        print("\r\x1b[K", end="")
    base = f"http://{_reachable(config.api.host)}:{config.api.port}"
    body = json.dumps({"model": config.served_name, "messages": [{"role": "user", "content": "Hello!"}]})
    kv_tokens, kv_bytes = facts.get("kv_tokens"), facts.get("kv_bytes")
    if isinstance(kv_tokens, int) and isinstance(kv_bytes, int):
        longest = facts.get("max_model_len")
        print(f"  KV cache: {kv_tokens} tokens ({kv_bytes / GIB:.2f} GiB), requests up to {longest} tokens")
    if config.model.kind == "random":
        print("  NOTE: the weights are RANDOM (smoke profile): the text means nothing")
    print(f"ready: {config.served_name} at {base}/v1")
    print(f"  curl {base}/v1/chat/completions -H 'Content-Type: application/json' -d {shlex.quote(body)}")
    port = "" if config.api.port == 8000 else f" PORT={config.api.port}"
    url = "" if config.api.port == 8000 else f" --url {base}"
    print(f"  make top{port}   (without make: tokenspeed top{url})", flush=True)


def _reachable(host: str) -> str:
    """Returns how a client on this machine names the host in a URL."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]" if ":" in host else host
