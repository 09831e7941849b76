"""The engine's own account of its memory, and the plan's beside it after every start."""

from pathlib import Path

from tokenspeed.device.specs import DeviceSpecs
from tokenspeed.messages import EngineFacts
from tokenspeed.recipes.observed import TOTAL, keep, observe, render_observation
from tokenspeed.recipes.resolved import ResolvedConfig


def proportional_bytes(proc: Path = Path("/proc/self")) -> int | None:
    """The proportional set size of this process; None where the system does not tell."""
    try:
        text = (proc / "smaps_rollup").read_text()
    except OSError:
        return None
    for line in text.splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return None


def memory_account(specs: DeviceSpecs, before: int | None, after: int | None) -> dict[str, int]:
    """Term of the plan to bytes.

    ``before`` and ``after`` are the process's size with its imports and with its first token. What lies between them
    misses only the part of the reserved caches that nothing was written to yet. Where the system tells one of these
    not, the sum is not known and left out.
    """
    account = {
        "weights": specs.weight_bytes,
        "workspace": specs.workspace_bytes,
        "KV cache": specs.arena_bytes,
        **({"host pool": specs.host_bytes} if specs.host_bytes else {}),
    }
    if before is None or after is None or specs.untouched_bytes is None:
        return account
    total = after - before + specs.untouched_bytes
    return {**account, "libraries": max(0, total - sum(account.values())), TOTAL: total}


def report_memory(config: ResolvedConfig, facts: EngineFacts) -> list[str]:
    """Pairs what was planned with what the engine says, keeps it for the next plan, and returns it as lines."""
    memory = facts.get("memory")
    if not isinstance(memory, dict):
        return []
    observation = observe(config, {name: int(size) for name, size in memory.items()})
    if observation is None:
        return []
    keep(observation)
    return render_observation(observation)
