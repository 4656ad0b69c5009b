"""Plan training before any GPU is rented: what the recipes take, how long on so many GPUs, and the whole bill.

    python -m diffusion.plan RECIPE ... [key=value ...] [--gpu h200] [--gpus 8,16,32 | 8..256] [--throughput FILE | NUMBER | published]
                             [--mfu 0.35 | 0.25..0.4] [--price 2.49 | spot] [--deadline-days 30]

Several recipes are phases one after another. Images per second come from --throughput or --mfu; without either from a published table of the same
U-Net, GPU and resolution, else from an MFU of 24 to 36 %: the plan says which. Prices are those of cost/prices.yaml, what else is assumed is in
cost/assumptions.yaml. docs/cost.md explains every line. Weights, data, a GPU and the network are not needed. Exit code 2 if something is wrong.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from diffusion.common.arguments import CommandParser, add_prices, gpu_counts, positive_float, positive_int, share_or_range
from diffusion.common.files import replacing
from diffusion.common.tables import print_page
from diffusion.common.text import counted
from diffusion.contracts.endings import run_command
from diffusion.contracts.errors import InputError
from diffusion.cost.assumptions import Assumptions, Encoding, draw_all, load_assumptions
from diffusion.cost.bill import make_bill
from diffusion.cost.comparisons import compare_plans, encoding_choice
from diffusion.cost.facts import Cluster, Facts, known_images, load_for_planning
from diffusion.cost.formulas import HOURS_PER_DAY
from diffusion.cost.hardware import memory_gb
from diffusion.cost.origin import origins
from diffusion.cost.prices import Price, Prices, asked_price, load_asked, price_of_run
from diffusion.cost.project import Column, ProjectPlan, column, memory_checks
from diffusion.cost.sources import Asked
from diffusion.cost.text import plan_json, plan_text
from diffusion.families.counting.counts import Counter
from diffusion.recipe import Recipe, RecipeError
from diffusion.recipe.rules import starts_before_the_end

DEFAULT_GPUS = '8..128'


class PlanInputError(InputError):
    """The arguments do not fit together."""


def make_plan(args: argparse.Namespace) -> ProjectPlan:
    """Everything that the command line asks for, in the order in which mistakes are cheapest to find.

    Raises:
        InputError: an option, a recipe or a list is wrong.
    """
    recipes = _recipes([text for text in args.recipes if '=' not in text], [text for text in args.recipes if '=' in text])
    gpu = _gpu(args.gpu, recipes)
    prices, price = _price(args, recipes, gpu)
    assumptions = load_assumptions(args.assumptions, args.assume)
    known = [known_images(recipe) for recipe in recipes]
    _assume_images(assumptions, recipes, known)
    drawn = draw_all(assumptions)
    clusters = [Cluster(gpu, memory_gb(gpu), num_gpus, args.gpus_per_node) for num_gpus in _counts(args)]

    counter = Counter.from_file()
    facts = [
        Facts(recipe, counter.counts(recipe), _assumed_images(recipe, drawn) if num_images is None else num_images, num_images is not None)
        for recipe, num_images in zip(recipes, known, strict=True)
    ]
    for one in facts:
        if errors := starts_before_the_end(one.recipe, one.num_batches):
            raise RecipeError(one.name, errors)
    gpus = [cluster.num_gpus for cluster in clusters]
    sources = origins(args.throughput, args.mfu, [Asked(one, gpu, args.gpus_per_node, gpus) for one in facts])
    columns = [column(facts, sources, cluster, drawn) for cluster in clusters]
    chosen = _chosen(columns, args.bill_gpus)

    offers = [price, *(offer for offer in prices.plans(gpu).values() if offer != price)]
    deadline_hours = None if args.deadline_days is None else args.deadline_days * HOURS_PER_DAY
    bill = make_bill(chosen.uncertain_job, assumptions, prices, price)
    return ProjectPlan(
        price=price,
        assumptions=drawn,
        origins=tuple(sources),
        columns=tuple(columns),
        chosen=chosen,
        remedies=tuple(() if phase.memory.fits else tuple(phase.facts.remedies(chosen.cluster, counter.counts)) for phase in chosen.phases),
        checks=tuple(check for one, origin in zip(facts, sources, strict=True) for check in memory_checks(one, origin, memory_gb(gpu))),
        bill=bill,
        choice=encoding_choice(bill, drawn, prices),
        outcomes=tuple(compare_plans(chosen.uncertain_job, assumptions, prices, offers, deadline_hours)),
        deadline_days=args.deadline_days,
    )


def _recipes(paths: Sequence[str], overrides: Sequence[str]) -> list[Recipe]:
    """All recipes, sound at least on one GPU.

    Raises:
        RecipeError: with the errors of all of them.
    """
    recipes, errors = list[Recipe](), list[str]()
    for path in paths:
        try:
            recipes.append(load_for_planning(path, overrides))
        except RecipeError as error:
            errors += [text if len(paths) == 1 else f'{path}: {text}' for text in error.errors]
    if errors:
        raise RecipeError(' '.join(paths), list(dict.fromkeys(errors)))
    if not recipes:
        raise PlanInputError('no recipe is named; give at least one, such as yamls/sd2-base-256.yaml')
    return recipes


def _gpu(named: str | None, recipes: Sequence[Recipe]) -> str:
    if named is not None:
        gpus = {named}
    else:
        gpus = {recipe.cost.gpu for recipe in recipes if recipe.cost.gpu is not None}
    if len(gpus) != 1:
        what = f'the recipes name {" and ".join(sorted(gpus))} (cost.gpu)' if gpus else 'the recipe names none (cost.gpu)'
        raise PlanInputError(f'which GPU? {what}; choose with --gpu, such as --gpu a100-80gb')
    gpu = gpus.pop()
    try:
        memory_gb(gpu)
    except ValueError as error:
        raise PlanInputError(f'--gpu: {error}') from None
    return gpu


def _price(args: argparse.Namespace, recipes: Sequence[Recipe], gpu: str) -> tuple[Prices, Price]:
    """The list, and the price of a GPU-hour: that of the command line, the recipe's if it is for this GPU, or the list's."""
    prices = load_asked(args.prices, args.price)
    price = asked_price(args.price, gpu, prices) or _recipes_price(recipes, gpu, prices)
    return prices, price or prices[f'gpu_hour.{gpu}']


def _recipes_price(recipes: Sequence[Recipe], gpu: str, prices: Prices) -> Price | None:
    """What the recipes say of a price for this GPU."""
    theirs = {recipe.name: price_of_run(recipe.cost, prices) for recipe in recipes if recipe.cost.gpu == gpu}
    if len({price.dollars for price in theirs.values() if price is not None}) > 1:
        said = ', '.join(f'{name} ${price.dollars:g}' for name, price in theirs.items() if price is not None)
        raise PlanInputError(f'at which price? the recipes differ (cost.price_per_gpu_hour: {said}); choose with --price')
    return next(iter(theirs.values()), None)


def _counts(args: argparse.Namespace) -> list[int]:
    counts = args.gpus if args.gpus is not None else gpu_counts(DEFAULT_GPUS)
    return sorted({*counts, args.bill_gpus}) if args.bill_gpus is not None else counts


def _assume_images(assumptions: Assumptions, recipes: Sequence[Recipe], known: Sequence[int | None]) -> None:
    """The bill need not assume what lies there: of data sets of one resolution the largest, and as many pictures as the largest of all.

    At a resolution of which nothing is assumed a GPU encodes as many pixels a second as at the nearest one.
    """
    counts = [(recipe, count) for recipe, count in zip(recipes, known, strict=True) if count is not None]
    for resolution in {recipe.data.resolution for recipe, _ in counts if recipe.data.kind == 'latents'}:
        if str(resolution) not in assumptions.encoding and assumptions.encoding:
            assumptions.encoding[str(resolution)] = _scaled_by_area(assumptions, resolution)
        sizes = [count for recipe, count in counts if (recipe.data.kind, recipe.data.resolution) == ('latents', resolution)]
        assumptions.encoding[str(resolution)].num_images = max(sizes)
    if counts:
        assumptions.preparation.num_images = max(count for _, count in counts)


def _scaled_by_area(assumptions: Assumptions, resolution: int) -> Encoding:
    nearest = min(assumptions.encoding, key=lambda known: abs(math.log(int(known) / resolution)))
    like, pixels = assumptions.encoding[nearest], (int(nearest) / resolution) ** 2
    rate = like.images_per_gpu_sec
    return replace(like, images_per_gpu_sec=[one * pixels for one in rate] if isinstance(rate, list) else rate * pixels)


def _assumed_images(recipe: Recipe, drawn: Assumptions) -> Any:
    if recipe.data.kind == 'synthetic':
        return None
    if recipe.data.kind == 'images':
        return drawn.preparation.num_images
    encoded = drawn.encoding.get(str(recipe.data.resolution))
    return None if encoded is None else encoded.num_images


def _chosen(columns: Sequence[Column], wanted: int | None) -> Column:
    """The numbers of GPUs that the bill is for: as asked, or the most on which the recipes are sound and fit, else are sound.

    Raises:
        PlanInputError: the recipes are sound on none, or not on the one that was asked for.
    """
    sound = [one for one in columns if one.phases and wanted in (None, one.cluster.num_gpus)]
    if not sound:
        errors = [
            f'{counted(one.cluster.num_gpus, "GPU")}: {error}' for one in columns if wanted in (None, one.cluster.num_gpus) for error in one.errors
        ]
        raise PlanInputError('\n'.join(['the recipes are sound on none of these numbers of GPUs:', *(f'  - {error}' for error in errors)]))
    fitting = [one for one in sound if all(phase.memory.fits for phase in one.phases)]
    return (fitting or sound)[-1]


def _write(path: Path, content: dict[str, Any]) -> None:
    try:
        with replacing(path) as temporary:
            temporary.write_text(json.dumps(content, indent=1) + '\n')
    except OSError as error:
        raise PlanInputError(f'--json {path}: cannot be written: {error.strerror}') from None


def parser() -> argparse.ArgumentParser:
    made = CommandParser('diffusion.plan', __doc__)
    made.add_argument('recipes', nargs='+', metavar='RECIPE | key=value', help='phases in their order; overrides apply to all of them')
    made.add_argument('--gpu', help="by the names of the list of prices (default: the recipe's cost.gpu)")
    made.add_argument('--gpus', type=gpu_counts, metavar='N,N,...', help=f'numbers of GPUs; 8..256 doubles (default {DEFAULT_GPUS})')
    made.add_argument('--gpus-per-node', type=positive_int, default=8, metavar='N', help='default %(default)s')
    source = made.add_mutually_exclusive_group()
    source.add_argument(
        '--throughput', metavar='SOURCE', help='a file of benchmarks.throughput; images/s of all GPUs, 11600@128 or 256=11600@128,512=4590@128; '
        'or published[:TABLE]',
    )  # fmt: skip
    source.add_argument('--mfu', type=share_or_range, metavar='SHARE', help='assumed model FLOP utilisation (0..1), or a range: 0.25..0.4')
    add_prices(made)
    made.add_argument('--assume', action='append', default=[], metavar='key=value', help='changes diffusion/cost/assumptions.yaml; repeatable')
    made.add_argument('--assumptions', type=Path, metavar='FILE', help='what differs from diffusion/cost/assumptions.yaml')
    made.add_argument('--bill-gpus', type=positive_int, metavar='N', help='the number of GPUs of the bill (default: the most of --gpus that will do)')
    made.add_argument('--deadline-days', type=positive_float, metavar='DAYS', help='how probable is it to finish by then?')
    made.add_argument('--json', type=Path, metavar='FILE', help='write the plan for machines')
    return made


def main() -> int:
    args = parser().parse_intermixed_args()
    return run_command(lambda: print_plan(args))


def print_plan(args: argparse.Namespace) -> None:
    """Make the plan, print it, and write --json."""
    plan = make_plan(args)
    if args.json is not None:
        _write(args.json, plan_json(plan))
    print_page(plan_text(plan))
    for text in plan.unfit:
        print(f'warning: {text}', file=sys.stderr)


if __name__ == '__main__':
    raise SystemExit(main())
