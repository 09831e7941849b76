"""Brings recipe, profile, flags and defaults together: every value with its source, and nothing fetched or loaded."""

import os
from dataclasses import dataclass, field, replace
from pathlib import Path

from tokenspeed.recipes.catalogue import LoadedRecipe, find_recipe, load_recipe, recipe_names
from tokenspeed.recipes.document import Document, RecipeError, Value, merge, without_nulls
from tokenspeed.recipes.features import family_of, missing_features
from tokenspeed.recipes.machine import Machine
from tokenspeed.recipes.resolved import (
    DEVICE_FRACTION,
    ApiSettings,
    EmbeddingSettings,
    FormatSettings,
    KVConfig,
    LogConfig,
    ModelSource,
    ParallelSettings,
    ResolvedConfig,
    SchedulerSettings,
)
from tokenspeed.recipes.schema import HuggingFaceWeights, PathWeights, RandomWeights, RunKeys, Vendor, Weights
from tokenspeed.recipes.selection import SMOKE, Candidate, choose_profile, mismatch, status_of
from tokenspeed.recipes.validation import nearest, validate
from tokenspeed.recipes.weights import Located, locate, random_source, source_of_path

DEVICE_OF_VENDOR: dict[Vendor, str] = {"cpu": "cpu", "nvidia": "cuda", "amd": "cuda", "npu": "npu"}
"""What PyTorch calls a vendor's devices."""

DEVICE_VARIABLE = "TOKENSPEED_DEVICE"
"""Environment: what PyTorch calls the devices of a vendor that no profile can name (docs/add-a-vendor.md)."""

_RUN_KEYS = tuple(RunKeys.model_fields)


class UnsupportedError(ValueError):
    """The configuration asks for what the engine does not have; the message names each thing."""


@dataclass(frozen=True)
class Resolution:
    """The outcome of resolving one target.

    Attributes:
        name: of the recipe, or of the path's last part.
        loaded: the recipe, None for a bare path.
        profile: its profile's name, "" for a bare path.
        status: the profile's.
        weights, located: which weights, and where they lie or will lie.
        keys: the merged, checked keys.
        sources: dotted key to where its value came from; keys that stand at their default are in it too.
        candidates: what became of each profile.
        missing: what it asks for that the engine does not have; empty when it can run.
        warnings: lines to say loudly.
    """

    name: str
    loaded: LoadedRecipe | None
    profile: str
    status: str
    weights: Weights
    located: Located
    keys: RunKeys
    sources: dict[str, str]
    candidates: list[Candidate] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def served_name(self) -> str:
        """The model's id under /v1/models; a random model can not be mistaken for the real one."""
        if self.keys.served_name:
            return self.keys.served_name
        return f"{self.name}-smoke" if self.profile == SMOKE else self.name

    @property
    def vendor(self) -> Vendor:
        """Whose devices it computes on."""
        return self.loaded.recipe.profiles[self.profile].when.vendor if self.loaded else "cpu"

    def refuse_missing(self) -> None:
        """Raises UnsupportedError where the engine lacks something."""
        if self.missing:
            lines = "\n".join(f"  {feature}" for feature in self.missing)
            what = f"profile {self.profile} of {self.name}" if self.profile else self.name
            hint = f"; what runs on any CPU is --profile {SMOKE}" if self.profile not in ("", SMOKE) else ""
            raise UnsupportedError(f"{what} is unsupported; it asks for\n{lines}\n(it can be planned{hint})")

    def located_again(self) -> "Resolution":
        """The same after a download."""
        return replace(self, located=locate(self.weights))

    def config(self, model: ModelSource) -> ResolvedConfig:
        """The configuration the engine runs with, once its weights are here; raises UnsupportedError."""
        self.refuse_missing()
        keys = self.keys
        structured_output = keys.api.structured_output
        assert structured_output != "xgrammar", "refuse_missing lets it not through"
        return ResolvedConfig(
            name=self.name,
            served_name=self.served_name,
            model=model,
            recipe=self.loaded.recipe.name if self.loaded else "",
            profile=self.profile,
            recipe_hash=self.loaded.content_hash if self.loaded else "",
            device=os.environ.get(DEVICE_VARIABLE) or DEVICE_OF_VENDOR[self.vendor],
            threads=keys.threads,
            parallel=ParallelSettings(tp=keys.parallel.tp, ep=keys.parallel.ep),
            kv=KVConfig(
                dtype=keys.kv.dtype,
                granularity=keys.kv.granularity,
                bytes=keys.kv.bytes,
                fraction=keys.kv.fraction or DEVICE_FRACTION,
                host_bytes=keys.kv.host_bytes,
                storage_dir=str(Path(keys.kv.storage_dir).expanduser().absolute()) if keys.kv.storage_dir else "",
                storage_bytes=keys.kv.storage_bytes,
            ),
            scheduler=SchedulerSettings(
                **{**keys.scheduler.model_dump(), "journal": _new_file(keys.scheduler.journal, "scheduler.journal")}
            ),
            api=ApiSettings(
                **{
                    **keys.api.model_dump(),
                    "embeddings": EmbeddingSettings(**keys.api.embeddings.model_dump()),
                    "default_sampling": keys.api.default_sampling.model_dump(exclude_none=True),
                    "chat_template": _existing_file(keys.api.chat_template, "api.chat_template"),
                    "api_key_file": _existing_file(keys.api.api_key_file, "api.api_key_file"),
                    "structured_output": structured_output,
                }
            ),
            formats=FormatSettings(**keys.formats.model_dump()),
            log=LogConfig(**{**keys.log.model_dump(), "file": _new_file(keys.log.file, "log.file")}),
            kernels=keys.kernels,
            enforce=keys.enforce,
            activations=keys.activations,
            seed=keys.seed,
            drain_s=keys.drain_s,
            env=keys.env,
            settings={
                key: value if value is None or isinstance(value, int | float | str) else str(value)
                for key, value in settings(keys).items()
            },
            sources=self.sources,
        )


def resolve(
    target: str, machine: Machine, *, profile: str | None = None, overrides: Document | None = None
) -> Resolution:
    """Resolves a recipe's name, a recipe file, a GGUF file or a checkpoint's folder.

    Raises RecipeError for what cannot be used, DoesNotFit where no profile fits the machine.
    """
    flags = overrides or Document({})
    if target.endswith((".yaml", ".yml")):
        if not Path(target).is_file():
            raise RecipeError(f"{target}: there is no such recipe file")
        return resolve_loaded(load_recipe(Path(target)), machine, profile=profile, overrides=flags)
    if target in recipe_names() or not _looks_like_path(target):
        return resolve_loaded(load_recipe(_recipe_file(target)), machine, profile=profile, overrides=flags)
    if profile is not None:
        raise RecipeError(f"{target} is a path: it has no profile {profile!r}; profiles belong to recipes")
    return _resolve_path(target, flags)


def _recipe_file(name: str) -> Path:
    try:
        return find_recipe(name)
    except RecipeError:
        raise RecipeError(
            f'"{name}" is no recipe and no file or folder{nearest(name, recipe_names())} '
            "(tokenspeed recipe list shows all; a path needs a slash or must exist)"
        ) from None


def _looks_like_path(target: str) -> bool:
    return "/" in target or target.endswith(".gguf") or Path(target).exists()


def _resolve_path(target: str, flags: Document) -> Resolution:
    source = source_of_path(target)
    keys = validate(RunKeys, without_nulls(flags))
    _refuse_storage_alone(keys, flags)
    weights = PathWeights(kind="path", path=source.path)
    path = Path(source.path)
    return Resolution(
        name=path.stem if path.is_file() else path.name,
        loaded=None,
        profile="",
        status="untested",
        weights=weights,
        located=locate(weights),
        keys=keys,
        sources=_sources(keys, [(flags, "")]),
        # The family of a bare path is known once its header is read; that error names it then.
        missing=missing_features("llama", None, "cpu", keys),
    )


def resolve_loaded(
    loaded: LoadedRecipe, machine: Machine, *, profile: str | None = None, overrides: Document | None = None
) -> Resolution:
    """Resolves a recipe that was read already; raises what ``resolve`` raises."""
    recipe, wanted, flags = loaded.recipe, profile, overrides or Document({})
    chosen, candidates = choose_profile(recipe, machine, wanted)
    chosen_profile = recipe.profiles[chosen]
    # What the recipe says of the model's formats is the lowest layer: a profile that stands in with another model, and
    # flags, say their own.
    defaults = merge(_only(loaded.document, ("formats",)), loaded.document.part("defaults"))
    own = _only(loaded.document.part("profiles", chosen), _RUN_KEYS)
    merged = without_nulls(merge(merge(defaults, own), flags))
    keys = validate(RunKeys, merged)
    _refuse_storage_alone(keys, merged)
    weights = chosen_profile.weights or recipe.weights
    family = family_of(recipe, chosen_profile)
    missing = missing_features(family, weights, chosen_profile.when.vendor, keys)
    absent = mismatch(chosen_profile.when, machine)
    if absent:
        missing.insert(0, absent.removeprefix("needs "))
    if keys.scheduler.max_len > recipe.context:
        place = merged.place(("scheduler", "max_len"))
        raise RecipeError(
            f"{place}: scheduler.max_len is {keys.scheduler.max_len}, the model's context is {recipe.context}"
        )
    return Resolution(
        name=recipe.name,
        loaded=loaded,
        profile=chosen,
        status="unsupported" if missing else status_of(recipe, chosen_profile),
        weights=weights,
        located=locate(weights),
        keys=keys,
        sources=_sources(keys, [(flags, ""), (own, f"profile {chosen}"), (defaults, "recipe")]),
        candidates=candidates,
        missing=missing,
        warnings=_warnings(loaded, chosen, candidates, weights, wanted),
    )


def _warnings(
    loaded: LoadedRecipe,
    chosen: str,
    candidates: list[Candidate],
    weights: Weights,
    wanted: str | None,
) -> list[str]:
    recipe = loaded.recipe
    lines: list[str] = []
    passed_over = [
        found.name for found in candidates if found.reason and recipe.profiles[found.name].when.vendor != "cpu"
    ]
    if wanted is None and passed_over and recipe.profiles[chosen].when.vendor == "cpu":
        lines.append(f"no profile for devices runs here ({', '.join(passed_over)}): taking {chosen} on the CPU")
    if isinstance(weights, RandomWeights):
        lines.append(f"RANDOM WEIGHTS, this is not {recipe.name}: {weights.note or 'its text is noise'}")
        family = family_of(recipe, recipe.profiles[chosen])
        if family != recipe.family:
            lines.append(
                f"it is of the family {family}, not {recipe.family}: it stands in until that family has landed"
            )
    if isinstance(weights, HuggingFaceWeights) and len(weights.revision) != 40:
        lines.append(f"{weights.repository} is taken at {weights.revision}, which moves; pin a revision of 40 digits")
    return lines


def _refuse_storage_alone(keys: RunKeys, document: Document) -> None:
    """Raises RecipeError for a storage tier without what it stands on. Of the merged keys: each layer says a part."""
    kv = keys.kv
    if kv.storage_dir and not kv.host_bytes:
        raise RecipeError(
            f"{document.place(('kv', 'storage_dir'))}: kv.storage_dir needs kv.host_bytes: blocks go to the storage "
            "and come from it by the host pool; set --host-cache-gb"
        )
    if kv.storage_dir and not keys.scheduler.prefix_cache:
        raise RecipeError(
            f"{document.place(('kv', 'storage_dir'))}: kv.storage_dir needs scheduler.prefix_cache: what it keeps is "
            "prefixes"
        )
    if kv.storage_bytes and not kv.storage_dir:
        raise RecipeError(
            f"{document.place(('kv', 'storage_bytes'))}: kv.storage_bytes bounds the storage directory, and there is "
            "none; set --storage-dir"
        )


def _only(document: Document, keys: tuple[str, ...]) -> Document:
    return Document({key: value for key, value in document.data.items() if key in keys}, document.places)


def _existing_file(text: str, key: str) -> str:
    if not text or "{{" in text or "{%" in text:  # nothing, or a template's text itself
        return text
    path = Path(text).expanduser().absolute()
    if not path.is_file():
        raise RecipeError(f"{key}: {path} is no file")
    return str(path)


def _new_file(text: str, key: str) -> str:
    if not text:
        return ""
    path = Path(text).expanduser().absolute()
    if path.is_dir() or not path.parent.is_dir():
        raise RecipeError(f"{key}: {path} cannot be made: it needs the name of a file in a folder that exists")
    return str(path)


def settings(keys: RunKeys) -> dict[str, Value]:
    """Every key with its value, flat and dotted, in the order of the schema."""
    flat: dict[str, Value] = {}
    for name, value in keys.model_dump().items():
        _flatten(name, value, flat)
    return flat


def _flatten(name: str, value: Value, flat: dict[str, Value]) -> None:
    if isinstance(value, dict):
        for key, inner in value.items():
            _flatten(f"{name}.{key}", inner, flat)
    else:
        flat[name] = value


def _sources(keys: RunKeys, layers: list[tuple[Document, str]]) -> dict[str, str]:
    """Where each key's value came from: the first layer that says it, else "default"."""
    said: dict[str, str] = {}
    for document, layer in reversed(layers):
        for path, value in document.leaves():
            place = document.place(path).short
            key = ".".join(str(part) for part in path)
            said[key] = "default" if value is None else f"{layer} ({place})" if layer else place
    return {key: said.get(key, "default") for key in settings(keys)}


def model_source(resolution: Resolution) -> ModelSource | None:
    """The source of weights that are on this machine already, else None."""
    if isinstance(resolution.weights, RandomWeights):
        return random_source(resolution.weights)
    return source_of_path(resolution.located.path) if resolution.located.present else None
