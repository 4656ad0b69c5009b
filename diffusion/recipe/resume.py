"""Which keys of a recipe may differ when a run resumes: those declared with `may_change` (schema.py).

Composer takes the optimizer's settings and the data order of a resumed run from its checkpoint, and everything else from the
recipe: a changed learning rate would be recorded and never used, a changed objective used halfway. So what shapes the result
must stay; what does not may change. So must what the scores of drawn images depend on, once there are some: the log and the report draw
one curve over them.
"""

from typing import Any

from diffusion.recipe.autoencoder import AnyRecipe, AutoencoderRecipe
from diffusion.recipe.keys import Keys, declared
from diffusion.recipe.load import RecipeError, any_recipe_from_yaml, to_dict
from diffusion.recipe.schema import Recipe, present
from diffusion.recipe.strict_yaml import dotted, leaves

DURATION, STREAMS, ENCODERS, SCORES = ('train', 'duration'), ('data', 'streams'), ('data', 'encoders'), ('eval', 'samples')
ENCODED = {(*ENCODERS, 'ray', 'moments'): 'float32'}  # also by the GPUs that train: a run may go from one way to the other


def changed_fields(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return `optimizer.lr: 0.0001 -> 0.001` for every key that differs and may not; recipes as plain dictionaries."""
    kind = AutoencoderRecipe if 'autoencoder' in now else Recipe
    kept = before['data']['streams'].keys() & now['data']['streams'].keys()  # of the others their names say enough
    old, new = (
        {
            **ENCODED,
            **{path: value for path, value in leaves(recipe) if path != ENCODERS and (path[:2] != STREAMS or path[2:] == () or path[2] in kept)},
            STREAMS: sorted(present(recipe['data']['streams'])),
        }
        for recipe in (before, now)
    )
    # The learning rate, towards the end of the run, which must stay; and the discriminator begins at a share of it.
    falls = now['optimizer']['decay'] != 'constant' or now.get('autoencoder', {}).get('adversarial') is not None
    free = SCORES if old.get((*SCORES, 'every')) is None else None  # nothing has been scored that other scores would have to be like
    return [
        f'{dotted(path)}: {old.get(path)} -> {new.get(path)}'
        for path in sorted({**old, **new})
        if old.get(path) != new.get(path) and path[: len(SCORES)] != free and (not _may_change(kind, path) or (path == DURATION and falls))
    ]


def _may_change(kind: type, path: Keys) -> bool:
    return any(declared(kind, path[:length])[1].may_change for length in range(1, len(path) + 1))


def refuse_changes(recipe: AnyRecipe, begun_with: str) -> None:
    """Raise RecipeError if resuming with `recipe` would not continue the run whose resolved recipe is `begun_with`, as YAML.

    A key that is younger than the run has its default there, which stands for what was done before it existed.
    """
    changes = changed_fields(to_dict(any_recipe_from_yaml(begun_with, recipe.run_folder)), to_dict(recipe))
    if changes:
        remedy = f'undo it, or train another run from these weights: {of_another_run(recipe)} load_path={recipe.run_folder}'
        raise RecipeError(f'{recipe.run_folder} was begun with another recipe; {remedy}', changes)


def of_another_run(recipe: AnyRecipe) -> str:
    """The overrides that make it another run: its name, and each folder that may not follow from it, which a resolved recipe does not say."""
    default = {'run_folder': f'runs/{recipe.name}', 'checkpoint.folder': f'{recipe.run_folder}/checkpoints'}
    folders = {'run_folder': recipe.run_folder, 'checkpoint.folder': recipe.checkpoint.folder}
    written = [key for key in folders if folders[key] != default[key]]
    return ' '.join(f'{key}={"ANOTHER" if key.startswith("checkpoint") else "NEW"}' for key in ['name', *written])
