"""GET /v1/internal/configuration: every key with its value and source, and memory as predicted and as observed."""

from collections.abc import Mapping

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tokenspeed.messages import EngineFacts
from tokenspeed.server.context import ServerContext, context_of, json_response
from tokenspeed.telemetry.redaction import Redactor, known_secrets, secret_values

TOTAL = "sum"
"""The term that stands for all of them, in the engine's account and in the plan's."""

ENVIRONMENT = "env."
"""Keys of this section are variables of the engine's environment: their names say which of them hold secrets."""

Scalar = str | int | float | bool | None


class KeyBody(msgspec.Struct, kw_only=True):
    """One key of the configuration, dotted; ``source`` is "default" where nothing set it."""

    key: str
    value: Scalar
    source: str


class MemoryBody(msgspec.Struct, kw_only=True):
    """Term of the memory plan to bytes on the rank, with their ``sum``; what is not known is left out.

    Attributes:
        predicted: by the plan; empty where nothing was planned.
        observed: by the engine, of its last start; empty until it was ready once.
    """

    predicted: dict[str, int]
    observed: dict[str, int]


class ConfigurationBody(msgspec.Struct, kw_only=True):
    """What this server runs with. ``started`` is when its process began, in seconds since the epoch."""

    model: str
    recipe: str
    profile: str
    recipe_hash: str
    started: float
    keys: list[KeyBody]
    memory: MemoryBody


def configuration_of(context: ServerContext) -> ConfigurationBody:
    """Returns the configuration with secrets blanked; reads the secret files there are, to know what to blank."""
    llm = context.llm
    config = llm.config
    redact = Redactor(known_secrets(config.api.api_key_file) | secret_values(config.env))
    return ConfigurationBody(
        model=config.served_name,
        recipe=config.recipe,
        profile=config.profile,
        recipe_hash=config.recipe_hash,
        started=context.started_at,
        keys=[
            KeyBody(key=key, value=_shown(key, value, redact), source=config.sources.get(key, "default"))
            for key, value in config.settings.items()
        ],
        memory=MemoryBody(predicted=_with_total(config.predicted), observed=_observed(llm.engine.facts)),
    )


async def configuration(request: Request) -> Response:
    """The configuration once; it changes with the process, the observed memory with the engine's start."""
    return json_response(configuration_of(context_of(request)))


def _shown(key: str, value: Scalar, redact: Redactor) -> Scalar:
    """The value without secrets: a variable with a secret's name is blanked whole, other texts where they hold one.

    Names of other keys say nothing: ``api.api_key_file`` is a path, ``api.default_sampling.max_tokens`` a number.
    """
    if not isinstance(value, str):
        return value
    if key.startswith(ENVIRONMENT):
        name = key.removeprefix(ENVIRONMENT)
        shown = redact.values({name: value})
        assert isinstance(shown, dict)
        return str(shown[name])
    return redact(value)


def _with_total(terms: Mapping[str, int]) -> dict[str, int]:
    return {**terms, TOTAL: sum(terms.values())} if terms else {}


def _observed(facts: EngineFacts) -> dict[str, int]:
    """The engine's own account; empty where it gave none."""
    memory = facts.get("memory")
    return {name: size for name, size in memory.items() if isinstance(size, int)} if isinstance(memory, dict) else {}
