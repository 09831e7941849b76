"""Container or native: a container only where the vendor's image is here, or the recipe's reference can be pulled."""

from dataclasses import dataclass
from typing import Literal

from tokenspeed.cli.containers import PROGRAMS, EngineState, Program, can_pull, engine_state, has_image
from tokenspeed.recipes.container import image_of, vendor_of
from tokenspeed.recipes.container_command import ContainerEngine
from tokenspeed.recipes.resolve import Resolution

Wanted = Literal["", "container", "native"]
"""What the operator asks for; "" leaves it to what is here."""


@dataclass(frozen=True)
class EngineChoice:
    """How a server will run.

    Attributes:
        engine: what runs the container; None runs natively.
        image: reference of the image, "" natively.
        line: why, for the operator.
        problem: why it cannot be as asked, with the line that mends it; "" where it can.
    """

    engine: ContainerEngine | None
    image: str = ""
    line: str = ""
    problem: str = ""


def choose_engine(wanted: Wanted, resolution: Resolution, image: str = "") -> EngineChoice:
    """Chooses; ``image`` replaces the profile's and the vendor's. Builds nothing; a pull happens at the run only."""
    if wanted == "native":
        return EngineChoice(None, line="engine    native, as asked")
    reference = image or image_of(resolution)
    built_here = reference == f"tokenspeed-{vendor_of(resolution)}"
    states = {program: engine_state(program) for program in PROGRAMS} if wanted == "container" else _cheap(reference)
    able = [state.engine for state in states.values() if state.engine is not None]
    for engine in able:
        if has_image(engine, reference):
            return EngineChoice(engine, reference, f"engine    {engine.program} {engine.version}, image {reference}")
    if not built_here:
        able = able or [state.engine for state in map(engine_state, PROGRAMS) if state.engine is not None]
        for engine in able:
            if can_pull(engine, reference):
                return EngineChoice(engine, reference, f"engine    {engine.program} pulls {reference}")
    mend = _mend(resolution, reference, built_here)
    if wanted == "container":
        return EngineChoice(
            _fallback(able),
            reference,
            f"engine    container, image {reference}",
            _problem(states, able, reference, mend),
        )
    return EngineChoice(None, line=f"engine    native; no image {reference} on this machine ({mend})")


def _cheap(reference: str) -> dict[Program, EngineState]:
    """Asks a program for its state only where it has the image: that is one quick look, the state is a slow one."""
    present = [program for program in PROGRAMS if has_image(ContainerEngine(program=program), reference)]
    return {program: engine_state(program) for program in present}


def _mend(resolution: Resolution, reference: str, built_here: bool) -> str:
    if built_here:
        return f"to build it: make image VENDOR={vendor_of(resolution)}"
    return f"to fetch it: docker pull {reference}"


def _problem(states: dict[Program, EngineState], able: list[ContainerEngine], reference: str, mend: str) -> str:
    if able:
        return f"there is no image {reference} on this machine, and no registry gives it; {mend}, or ENGINE=native"
    reasons = "; ".join(f"{program}: {state.reason}" for program, state in states.items())
    return f"no container engine works here ({reasons}); install one: apt install podman, or run with ENGINE=native"


def _fallback(able: list[ContainerEngine]) -> ContainerEngine:
    """Whose command a dry run shows where none can run it."""
    return able[0] if able else ContainerEngine(program="docker")
