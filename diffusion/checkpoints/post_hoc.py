"""Averages that a run did not keep, out of those that it did: post-hoc EMA of EDM2 (arXiv 2312.02696, section 3.2 and appendix C.3).

Each checkpoint of a run with `ema.sigma_rel` holds averages whose profiles are power functions of the batches so far. A weighted sum of averages has
the weighted sum of their profiles; the weights are those by which it comes closest to the profile that is asked for.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from diffusion.checkpoints.manifest import OURS, batches_of, file_of, manifest_of
from diffusion.checkpoints.reading import batches_trained, check_against_manifest, num_averages, read_checkpoint, recipe_yaml, weights_by_part
from diffusion.checkpoints.uploading import log
from diffusion.common.text import counted
from diffusion.contracts.errors import CheckpointError
from diffusion.recipe import Recipe, recipe_from_yaml
from diffusion.recipe.averaging import Profile
from diffusion.recipe.schema import LARGEST_SIGMA_REL

# Of a small network's trajectory sums with this residual were off by at most 0.8 of what the nearest kept average is off (tests/checkpoints).
LARGEST_RESIDUAL = 0.1
Floats = NDArray[np.float64]


def inner_products(batches: Floats, gammas: Floats, other_batches: Floats, other_gammas: Floats) -> Floats:
    """Return the integrals over all batches of products of two profiles, (gamma + 1) t ** gamma / T ** (gamma + 1) for t <= T; arrays broadcast.

    As `p_dot_p` in EDM2's algorithm 3: the power is that of the profile that reaches further, so nothing overflows.
    """
    earlier, later = np.minimum(batches, other_batches), np.maximum(batches, other_batches)
    power = np.where(batches < other_batches, other_gammas, gammas)
    return (gammas + 1) * (other_gammas + 1) / (gammas + other_gammas + 1) * (earlier / later) ** power / later


def solve(batches: Sequence[int], profiles: Sequence[Profile], until: int, wanted: Profile) -> tuple[dict[tuple[int, int], float], float]:
    """Find the sum of averages, `profiles` at each of `batches`, that is closest to the `wanted` one after batch `until`.

    Least squares as in EDM2's algorithm 3, and the weights of the sum add up to 1, which is ours: without it the sum of few checkpoints is mostly
    off by a factor, 10 times as far as with it (docs/recipes.md). Averages that hardly differ make the system nearly singular: the smallest of the
    solutions that are equal to rounding is taken.

    Returns:
        The weight of each average by (batch, index in `profiles`), and the residual: the distance of the sum's profile from the one asked for, as a
        share of that one's norm (both as functions of the batches).
    """
    times = np.repeat(np.array(batches, np.float64), len(profiles))
    gammas = np.tile(np.array([profile.gamma for profile in profiles]), len(batches))
    end, gamma = np.array([until], np.float64), np.array([wanted.gamma])
    norms = np.sqrt(inner_products(times, gammas, times, gammas))
    norm = np.sqrt(inner_products(end, gamma, end, gamma))
    among = inner_products(times[:, None], gammas[:, None], times, gammas) / np.outer(norms, norms)
    to_wanted = inner_products(times, gammas, end, gamma) / (norms * norm)
    ones = norm / norms  # times the solution is the sum of the weights, which must be 1: a Lagrange multiplier holds it there
    bordered = np.block([[among, ones[:, None]], [ones[None, :], np.zeros((1, 1))]])
    found = np.linalg.lstsq(bordered, np.append(to_wanted, 1.0), rcond=None)[0][:-1]
    residual = np.sqrt(max(0.0, float(1 - 2 * found @ to_wanted + found @ among @ found)))
    averages = [(batch, number) for batch in batches for number in range(len(profiles))]
    return dict(zip(averages, map(float, found * norm / norms), strict=True)), residual


def reconstruct(file: Path, recipe: Recipe, component: str, sigma_rel: float) -> tuple[dict[str, dict[str, Tensor]], dict[str, object]]:
    """Return the weights averaged with a width that the run did not keep, by part and name as `weights_by_part`, and what export.json says of them.

    Takes what the folder has of the run's checkpoints up to `file`. Reads them one by one: in memory there is the sum, and one tensor more.

    Raises:
        CheckpointError: the run has no such averages, or they do not come close enough.
    """
    if not recipe.ema.sigma_rel:
        raise CheckpointError(
            f'--sigma-rel: {file} is of a run with ema.half_life={recipe.ema.half_life}, whose averages are no power functions; train with '
            'ema.sigma_rel=[0.05,0.10], ema.half_life=null and ema.start=0ba'
        )
    if not 0 < sigma_rel <= LARGEST_SIGMA_REL:
        raise CheckpointError(f'--sigma-rel: {sigma_rel:g} is no width; set it above 0 and to {LARGEST_SIGMA_REL} at most')
    profiles = [Profile.of_sigma_rel(kept) for kept in recipe.ema.sigma_rel]
    batches = [batch for batch, _ in _whole(file, recipe)]
    if not batches:
        raise CheckpointError(
            f'{file}: neither it nor a checkpoint before it in {file.parent} holds averages; take a later one, or --weights training'
        )
    weights, residual = solve(batches, profiles, batches[-1], Profile.of_sigma_rel(sigma_rel))
    if residual > LARGEST_RESIDUAL:
        span = f'batch {batches[0]:,}' if len(batches) == 1 else f'batches {batches[0]:,} to {batches[-1]:,}'
        raise CheckpointError(
            f'--sigma-rel: {sigma_rel:g} is out of reach of the averages in {counted(len(batches), "checkpoint")} of {file.parent} '
            f'({span}; sigma_rel={recipe.ema.sigma_rel}): their best sum misses its profile by {residual:.0%}, at most '
            f'{LARGEST_RESIDUAL:.0%} may be. Ask for a width nearer to those, or keep more checkpoints (checkpoint.keep_every)'
        )
    summed: dict[str, dict[str, Tensor]] = {}
    for batch, state in _whole(file, recipe, set(batches)):
        for number in range(len(profiles)):
            parts = weights_by_part(state, component, average=True, number=number)
            assert parts is not None
            for part, named in parts.items():
                into = summed.setdefault(part, {})
                for name, tensor in named.items():
                    if name in into:
                        into[name].add_(tensor, alpha=weights[batch, number])
                    else:
                        into[name] = tensor * weights[batch, number]
    return summed, {'sigma_rel': sigma_rel, 'from_checkpoints': batches, 'residual': residual}


def _whole(file: Path, recipe: Recipe, among: set[int] | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield batch and state of the run's checkpoints up to `file` that hold averages, one in memory at a time; damaged ones are named on stderr.

    Args:
        among: those that were whole before, which are not hashed again.

    Raises:
        CheckpointError: one is of another run, or `file` is not named as a checkpoint is.
    """
    if OURS.fullmatch(file.name) is None:
        raise CheckpointError(f'--sigma-rel: {file} has another name than training gave it; name the folder of the run')
    for batch in batches_of(entry.name for entry in file.parent.iterdir()):
        path = file.parent / file_of(batch)
        if path.name > file.name or (among is not None and batch not in among):
            continue
        try:
            if among is None:
                check_against_manifest(path, file.parent / manifest_of(batch))
        except CheckpointError as error:
            log(f'{error}; left out')
            continue
        state = read_checkpoint(path)
        ema = recipe_from_yaml(recipe_yaml(state), str(path)).ema
        if (ema.sigma_rel, ema.interval) != (recipe.ema.sigma_rel, recipe.ema.interval):
            raise CheckpointError(f'{path}: is of another run, with ema.sigma_rel={ema.sigma_rel}; move it away')
        if num_averages(state) == len(ema.sigma_rel):
            yield batches_trained(state), state
