"""What a person sees at the terminal while a server starts, and when it is ready."""

import json
import shlex
import sys

from tokenspeed.launch.memory_report import report_memory
from tokenspeed.messages import EngineFacts, EngineStatus
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


def print_ready(config: ResolvedConfig, facts: EngineFacts, admin: str = "") -> None:
    """Prints the way in: what serves, the URL, a curl line, how to watch, and where the administration is, if it is."""
    if sys.stdout.isatty():
        print("\r\x1b[K", end="")
    base = f"http://{_reachable(config.api.host)}:{config.api.port}"
    random = config.model.kind == "random"
    # The label is in the request's own words: a comment behind the command would not do in every shell.
    hello = "Hello! (RANDOM weights: the answer is noise)" if random else "Hello!"
    body = json.dumps({"model": config.served_name, "messages": [{"role": "user", "content": hello}]})
    kv_tokens, kv_bytes = facts.get("kv_tokens"), facts.get("kv_bytes")
    if isinstance(kv_tokens, int) and isinstance(kv_bytes, int):
        longest = facts.get("max_model_len")
        print(f"  KV cache: {kv_tokens} tokens ({kv_bytes / GIB:.2f} GiB), requests up to {longest} tokens")
    for line in report_memory(config, facts):
        print(line)
    if random:
        print(f"  RANDOM WEIGHTS: {config.served_name} is not {config.recipe or config.name}; its text means nothing")
    print(f"ready: {config.served_name} at {base}/v1")
    print(f"  curl {base}/v1/chat/completions -H 'Content-Type: application/json' -d {shlex.quote(body)}")
    if admin:
        print(f"  administration at {admin}")
    port = "" if config.api.port == 8000 else f" PORT={config.api.port}"
    url = "" if config.api.port == 8000 else f" --url {base}"
    print(f"  make top{port}   (without make: tokenspeed top{url})", flush=True)


def _reachable(host: str) -> str:
    """Returns how a client on this machine names the host in a URL."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]" if ":" in host else host
