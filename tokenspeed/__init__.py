"""TokenSpeed: a deployment appliance for open-weight language models.

``LLM`` generates offline, ``AsyncLLM`` under an event loop; both run the engine that the server runs, in a process of
its own. Importing this package imports neither torch nor the engine.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenspeed.launch.offline import LLM, AsyncLLM, Completion

__all__ = ["LLM", "AsyncLLM", "Completion", "__version__"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name in ("LLM", "AsyncLLM", "Completion"):
        from tokenspeed.launch import offline

        return getattr(offline, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
