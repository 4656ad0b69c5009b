"""Recipes: what a run is, as data. `load_recipe` is the way in; nothing in this package imports torch."""

from diffusion.recipe.autoencoder import AnyRecipe, AutoencoderRecipe
from diffusion.recipe.keys import Duration, to_dict
from diffusion.recipe.load import (
    RecipeError,
    any_recipe_from_yaml,
    changed_fields,
    load_any_recipe,
    load_or_exit,
    load_recipe,
    of_another_run,
    recipe_from_yaml,
    refuse_changes,
    to_yaml,
)
from diffusion.recipe.schema import Recipe
