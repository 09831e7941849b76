"""Finds and reads recipes and hardware descriptions."""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from tokenspeed.recipes.document import Document, RecipeError, merge, read_document, without_nulls
from tokenspeed.recipes.schema import Hardware, Recipe
from tokenspeed.recipes.validation import nearest, validate

RECIPES_VARIABLE = "TOKENSPEED_RECIPES"
"""A folder of an operator's own recipes; looked into before the ones that come with the package."""


@dataclass(frozen=True)
class LoadedRecipe:
    """A recipe, the document it was read from (with places), and a short hash of the files' content."""

    recipe: Recipe
    document: Document
    path: Path
    content_hash: str


def configs_directory() -> Path:
    """The folder ``configs`` of the checkout, or its copy inside an installed wheel."""
    package = Path(__file__).resolve().parent.parent
    installed = package / "_configs"
    return installed if installed.is_dir() else package.parent / "configs"


def recipe_directories() -> list[Path]:
    """Where recipes are looked for, in order."""
    own = os.environ.get(RECIPES_VARIABLE)
    return [*([Path(own)] if own else []), configs_directory() / "recipes"]


def recipe_names() -> list[str]:
    """The names of all recipes, sorted."""
    return sorted({path.stem for folder in recipe_directories() for path in folder.glob("*.yaml")})


def find_recipe(name: str) -> Path:
    """Returns the file of the recipe ``name``; raises RecipeError with the nearest names."""
    for folder in recipe_directories():
        path = folder / f"{name}.yaml"
        if path.is_file():
            return path
    raise RecipeError(f'there is no recipe "{name}"{nearest(name, recipe_names())}')


def load_recipe(path: Path) -> LoadedRecipe:
    """Reads, extends and checks one recipe; raises RecipeError."""
    document = read_document(path)
    content = path.read_bytes()
    base_name = document.data.pop("extends", None)
    if base_name is not None:
        base, base_content = _read_base(base_name, document)
        document, content = merge(base, document), base_content + content
    document = without_nulls(document)
    recipe = validate(Recipe, document)
    if recipe.name != path.stem:
        place = document.place(("name",))
        raise RecipeError(
            f"{place}: the recipe calls itself {recipe.name!r}, its file is {path.name}; make them the same"
        )
    return LoadedRecipe(recipe, document, path, hashlib.sha256(content).hexdigest()[:12])


def _read_base(name: object, document: Document) -> tuple[Document, bytes]:
    place = document.place(("extends",))
    if not isinstance(name, str):
        raise RecipeError(f"{place}: extends takes the name of one recipe")
    try:
        path = find_recipe(name)
    except RecipeError as error:
        raise RecipeError(f"{place}: extends: {error}") from None
    base = read_document(path)
    if "extends" in base.data:
        raise RecipeError(f"{place}: {name} extends another recipe itself; one level is allowed, so extend that one")
    return base, path.read_bytes()


def hardware_names() -> list[str]:
    """The names of the described machines, sorted."""
    return sorted(path.stem for path in (configs_directory() / "hardware").glob("*.yaml"))


def load_hardware(name: str) -> Hardware:
    """Reads one hardware description; raises RecipeError with the nearest names."""
    path = configs_directory() / "hardware" / f"{name}.yaml"
    if not path.is_file():
        raise RecipeError(f'there is no hardware "{name}"{nearest(name, hardware_names())}')
    return validate(Hardware, read_document(path))
