"""Which attention and sampling backends there are on this machine, for a report. Brings torch in."""

from tokenspeed.device.attention import backends as attention_backends
from tokenspeed.device.sampling import backends as sampling_backends
from tokenspeed_kernel.platform import current_platform
from tokenspeed_kernel.plugins.loading import loaded_registry
from tokenspeed_kernel.solutions import solutions_of


def backend_facts() -> dict[str, str]:
    """Per backend the solutions that can compute for it, here and elsewhere."""
    registry, here = loaded_registry(), current_platform()
    found = {}
    for kind, folder in (("attention", attention_backends), ("sampling", sampling_backends)):
        for name in folder.backend_names():
            refusals = solutions_of(registry, folder.backend_operations(name), here)
            running = ", ".join(solution for solution, reason in refusals.items() if reason is None)
            elsewhere = ", ".join(solution for solution, reason in refusals.items() if reason is not None)
            found[f"{kind} backend {name}"] = running + (f"; not here: {elsewhere}" if elsewhere else "")
    return found
