"""Plan training before any GPU is rented: memory, time and the whole bill of one or more recipes.

    python -m diffusion.plan RECIPE ... [key=value ...] [--gpu h200] [--gpus 8,16,32 | 8..256] [--throughput FILE | NUMBER | published]
                             [--mfu 0.35 | 0.25..0.4] [--price 2.49 | spot]

Several recipes are phases one after another. Images per second come from --throughput or --mfu; without either from a published table of the same
network, GPU and resolution, else from an MFU of 24 to 36 %: the plan says which. Prices are those of cost/prices.yaml, other assumptions are in
cost/assumptions.yaml. docs/cost.md explains every line. Weights, data, a GPU and the network are not needed. Exit code 2 if something is wrong.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from diffusion.common.arguments import CommandParser, add_prices, gpu_counts, positive_int, share_or_range
from diffusion.common.files import replacing
from diffusion.common.text import counted, print_message, print_page
from diffusion.contracts.errors import InputError, run_command
from diffusion.cost.assumptions import Assumptions, draw_all, encoding_at, load_assumptions
from diffusion.cost.encoders import encoder_of, read_encoding_rows
from diffusion.cost.facts import Cluster, Counts, Facts, known_images, load_for_planning
from diffusion.cost.hardware import MEMORY_GB, gpu_without_kernels, memory_gb
from diffusion.cost.prices import Price, Prices, asked_price, load_prices, price_of_gpu, price_of_run
from diffusion.cost.project import ProjectPlan, column, project_plan
from diffusion.cost.text import plan_text
from diffusion.cost.throughput import rate_sources
from diffusion.families.counting.counts import Counter
from diffusion.recipe import AnyRecipe, AutoencoderRecipe, RecipeError
from diffusion.recipe.rules import starts_before_the_end

DEFAULT_GPUS = '8..128'


class PlanInputError(InputError):
    """The arguments do not fit together."""


def make_plan(args: argparse.Namespace) -> ProjectPlan:
    """Make the plan of a command line, in the order in which mistakes (InputError, ManifestError) are cheapest to find."""
    recipes = _recipes(args.recipes)
    gpu = _gpu(args.gpu, recipes)
    prices, price = _price(args, recipes, gpu)
    known = [known_images(recipe) for recipe in recipes]
    small = all(recipe.adapter is not None for recipe in recipes)  # jobs of an hour: one GPU, and nobody's month of work
    assume = [*(['work.person_months=0'] if small else []), *args.assume]
    loaded = load_assumptions(args.assumptions, assume)
    named = any(text.startswith('preparation.num_images=') for text in assume)
    images_given = named or loaded.preparation.num_images != load_assumptions().preparation.num_images
    assumed = draw_all(_with_known_images(loaded, recipes, known, images_given))
    one_gpu = small or all(recipe.batch.micro_size == recipe.batch.global_size for recipe in recipes)
    counts = args.gpus if args.gpus is not None else gpu_counts('1' if one_gpu else DEFAULT_GPUS)
    clusters = [Cluster(gpu, memory_gb(gpu), num, args.gpus_per_node) for num in sorted({*counts, *filter(None, [args.bill_gpus])})]

    counter = Counter.from_file()

    def counts_of(recipe: AnyRecipe) -> Counts:
        return autoencoder_counts(recipe) if isinstance(recipe, AutoencoderRecipe) else counter.counts(recipe)

    facts = []
    for recipe, num_images in zip(recipes, known, strict=True):
        encoded = assumed.encoding.get(str(recipe.data.resolution))
        guess = {'images': assumed.preparation.num_images, 'latents': encoded and encoded.num_images}.get(recipe.data.kind)
        facts.append(Facts(recipe, counts_of(recipe), guess if num_images is None else num_images, num_images is not None))
    for one in facts:
        if errors := starts_before_the_end(one.recipe, one.num_batches):
            raise RecipeError(one.name, errors)
    sources = rate_sources(args.throughput, args.mfu, facts, clusters)
    measured = read_encoding_rows(args.encoding_rates) if args.encoding_rates is not None else []
    encoders = [encoder_of(one, assumed, prices, price, gpu, measured) for one in facts]
    columns = [column(facts, sources, cluster, assumed, encoders) for cluster in clusters]

    # The bill is for the number of GPUs that was asked for, or the most on which the recipes are sound and fit, else are sound.
    asked = [one for one in columns if args.bill_gpus in (None, one.cluster.num_gpus)]
    sound = [one for one in asked if one.phases]
    if not sound:
        mistakes = [f'  - {counted(one.cluster.num_gpus, "GPU")}: {error}' for one in asked for error in one.errors]
        raise PlanInputError('\n'.join(['the recipes are sound on none of these numbers of GPUs:', *mistakes]))
    fitting = [one for one in sound if all(phase.memory.fits for phase in one.phases)]
    return project_plan(columns, (fitting or sound)[-1], assumed, prices, price, counts_of)


def autoencoder_counts(recipe: AutoencoderRecipe) -> Counts:
    """Count on the spot, which takes seconds, most of them to import PyTorch."""
    from diffusion.autoencoding.planning import counts

    return counts(recipe)


def _recipes(texts: Sequence[str]) -> list[AnyRecipe]:
    """Load all recipes, sound on one GPU at least, or raise the errors of all of them."""
    paths, overrides = [text for text in texts if '=' not in text], [text for text in texts if '=' in text]
    recipes, errors = list[AnyRecipe](), list[str]()
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


def _gpu(named: str | None, recipes: Sequence[AnyRecipe]) -> str:
    gpus = {named} if named is not None else {recipe.cost.gpu for recipe in recipes if recipe.cost.gpu is not None}
    if len(gpus) != 1:
        what = f'the recipes name {" and ".join(sorted(gpus))} (cost.gpu)' if gpus else 'the recipe names none (cost.gpu)'
        raise PlanInputError(f'which GPU? {what}; choose with --gpu: {", ".join(MEMORY_GB)}')
    gpu = gpus.pop()
    try:
        memory_gb(gpu)
    except ValueError as error:
        raise PlanInputError(f'--gpu: {error}') from None
    return gpu


def _price(args: argparse.Namespace, recipes: Sequence[AnyRecipe], gpu: str) -> tuple[Prices, Price]:
    """Return the list, and the price of a GPU-hour: that of the command line, the recipe's if it is for this GPU, or the list's."""
    prices = load_prices(args.prices, args.price)
    price = asked_price(args.price, gpu, prices)
    if price is None:
        own = {recipe.name: found for recipe in recipes if recipe.cost.gpu == gpu and (found := price_of_run(recipe.cost, prices)) is not None}
        if len({found.dollars for found in own.values()}) > 1:
            texts = ', '.join(f'{name} ${found.dollars:g}' for name, found in own.items())
            raise PlanInputError(f'at which price? the recipes differ (cost.price_per_gpu_hour: {texts}); choose with --price')
        price = next(iter(own.values()), None)
    return prices, price or price_of_gpu(gpu, prices, 'give one with --price DOLLARS')


def _with_known_images(assumptions: Assumptions, recipes: Sequence[AnyRecipe], known: Sequence[int | None], images_given: bool) -> Assumptions:
    """Put known numbers of images in place of assumed ones: of datasets of one resolution the largest, and the largest of all for the images.

    Args:
        images_given: `preparation.num_images` is not the shipped one, which says nothing of a resolution of which nothing is assumed.
    """
    counts = [(recipe, count) for recipe, count in zip(recipes, known, strict=True) if count is not None]
    encoding = dict(assumptions.encoding)
    for px in {recipe.data.resolution for recipe in recipes if recipe.data.kind == 'latents'} - set(map(int, encoding)) if images_given else ():
        if (found := encoding_at(assumptions.encoding, px)) is not None:
            encoding[str(px)] = replace(found[0], num_images=None)
    for px in {recipe.data.resolution for recipe, _ in counts if recipe.data.kind == 'latents'}:
        if (found := encoding_at(encoding, px)) is not None:
            largest = max(count for recipe, count in counts if (recipe.data.kind, recipe.data.resolution) == ('latents', px))
            encoding[str(px)] = replace(found[0], num_images=largest)
    preparation = replace(assumptions.preparation, num_images=max(count for _, count in counts)) if counts else assumptions.preparation
    return replace(assumptions, encoding=encoding, preparation=preparation)


def parser() -> argparse.ArgumentParser:
    made = CommandParser('diffusion.plan', __doc__)
    made.add_argument('recipes', nargs='+', metavar='RECIPE | key=value', help='phases in their order; overrides apply to all of them')
    made.add_argument('--gpu', help="by the names of the list of prices (default: the recipe's cost.gpu)")
    made.add_argument(
        '--gpus',
        type=gpu_counts,
        metavar='N,N,...',
        help=f'numbers of GPUs; 8..256 doubles (default {DEFAULT_GPUS}; 1 for adapters and batches of one pass)',
    )
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
    made.add_argument('--bill-gpus', type=positive_int, metavar='N', help='the number of GPUs of the bill (default: the most of --gpus that fit)')
    made.add_argument('--encoding-rates', type=Path, metavar='FILE', help='images/s of encoders, measured: rows of benchmarks.encode')
    made.add_argument('--json', type=Path, metavar='FILE', help='write the table of rows, unrounded')
    return made


def print_plan(args: argparse.Namespace) -> None:
    """Make the plan, print it, and write --json."""
    plan = make_plan(args)
    if args.json is not None:
        try:
            with replacing(args.json) as temporary:
                temporary.write_text(json.dumps(plan.values, indent=1) + '\n')
        except OSError as error:
            raise PlanInputError(f'--json {args.json}: cannot be written: {error.strerror}') from None
    print_page(plan_text(plan))
    for text in (*plan.unfit, *filter(None, [gpu_without_kernels(plan.cluster.gpu)])):
        print_message(f'warning: {text}')


def main() -> int:
    args = parser().parse_intermixed_args()
    return run_command(lambda: print_plan(args))


if __name__ == '__main__':
    raise SystemExit(main())
