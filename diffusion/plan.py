"""Plan training before any GPU is rented: memory, time and the whole bill of one or more recipes.

    python -m diffusion.plan RECIPE ... [key=value ...] [--gpu h200] [--gpus 8,16,32 | 8..256] [--throughput FILE | NUMBER | published]
                             [--mfu 0.35 | 0.25..0.4] [--price 2.49 | spot]

Several recipes are phases one after another. Images per second come from --throughput or --mfu; without either from a published table of the same
network, GPU and resolution, else from an MFU of 24 to 36 %: the plan says which. Prices are those of cost/prices.yaml, other assumptions are in
cost/assumptions.yaml. docs/plan.md explains every line. Weights, data, a GPU and the network are not needed. Exit code 2 if something is wrong.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Self

from pydantic import BeforeValidator, PositiveInt, model_validator

from diffusion.common.command_line import option, positional
from diffusion.common.files import write_text
from diffusion.common.text import counted, print_message, print_page
from diffusion.contracts.errors import InputError, run_command
from diffusion.cost.assumptions import Assumptions, draw_all, encoding_at, load_assumptions
from diffusion.cost.encoders import encoder_of
from diffusion.cost.facts import Cluster, Counts, Facts, known_images, load_for_planning
from diffusion.cost.formulas import Uncertain
from diffusion.cost.hardware import MEMORY_GB, GpuCounts, gpu_counts, gpu_without_kernels, memory_gb
from diffusion.cost.prices import Price, PriceOptions, Prices, asked_price, load_prices, price_of_gpu, price_of_run
from diffusion.cost.project import ProjectPlan, column, project_plan
from diffusion.cost.text import plan_text
from diffusion.cost.throughput import rate_sources
from diffusion.families.counting.counts import Counter
from diffusion.recipe import AnyRecipe, AutoencoderRecipe, RecipeError
from diffusion.recipe.rules import starts_before_the_end

DEFAULT_GPUS = '8..128'


def _split_range(text: str) -> float | list[float]:
    """Return a share such as `0.35`, or the ends of a range of shares such as `0.25..0.4`."""
    try:
        ends = [float(end) for end in text.split('..')]
    except ValueError:
        ends = []
    if len(ends) not in (1, 2) or ends != sorted(ends) or not 0 < ends[0] <= ends[-1] <= 1:
        raise ValueError('is neither a share above 0 and of at most 1 nor a range of them; write 0.35 or 0.25..0.4')
    return ends if len(ends) == 2 else ends[0]


class PlanRequest(PriceOptions):
    """Recipes to plan, the GPUs, and where numbers come from."""

    recipes: list[str] = positional('RECIPE | key=value', 'phases in their order; overrides apply to all of them')
    gpu: str | None = option(None, "by the names of the list of prices (default: the recipe's cost.gpu)")
    gpus: GpuCounts | None = option(
        None, f'numbers of GPUs; 8..256 doubles (default {DEFAULT_GPUS}; 1 for adapters and batches of one pass)', 'N,N,...'
    )
    gpus_per_node: PositiveInt = option(8, '', 'N')
    throughput: str | None = option(
        None, 'a file of benchmarks.throughput; images/s of all GPUs, 11600@128 or 256=11600@128,512=4590@128; or published[:TABLE]', 'SOURCE'
    )
    mfu: Annotated[Uncertain, BeforeValidator(_split_range)] = option(None, 'assumed model FLOP utilisation (0..1), or a range: 0.25..0.4', 'SHARE')
    assume: list[str] = option([], 'changes diffusion/cost/assumptions.yaml; repeatable', 'key=value')
    assumptions: Path | None = option(None, 'what differs from diffusion/cost/assumptions.yaml', 'FILE')
    bill_gpus: PositiveInt | None = option(None, 'the number of GPUs of the bill (default: the most of --gpus that fit)', 'N')
    json_: Path | None = option(None, 'write the table of rows, unrounded', 'FILE')

    @model_validator(mode='after')
    def _one_source(self) -> Self:
        if self.throughput is not None and self.mfu is not None:
            raise ValueError('--mfu: not allowed with --throughput, which says the images/s too; give one of them')
        return self


def make_plan(request: PlanRequest) -> ProjectPlan:
    """Make the plan of a request, in the order in which mistakes (InputError, ManifestError) are cheapest to find."""
    recipes = _recipes(request.recipes)
    gpu = _gpu(request.gpu, recipes)
    prices, price = _price(request, recipes, gpu)
    known = [known_images(recipe) for recipe in recipes]
    small = all(recipe.adapter is not None for recipe in recipes)  # jobs of an hour: one GPU, and nobody's month of work
    assumed = draw_all(_assumptions(request.assumptions, [*(['work.person_months=0'] if small else []), *request.assume], recipes, known))
    one_gpu = small or all(recipe.batch.micro_size == recipe.batch.global_size for recipe in recipes)
    counts = {*(request.gpus or gpu_counts('1' if one_gpu else DEFAULT_GPUS)), *filter(None, [request.bill_gpus])}
    clusters = [Cluster(gpu, memory_gb(gpu), num, request.gpus_per_node) for num in sorted(counts)]

    counter = Counter.from_file()

    def counts_of(recipe: AnyRecipe) -> Counts:
        if not isinstance(recipe, AutoencoderRecipe):
            return counter.counts(recipe)
        from diffusion.autoencoding.planning import counts  # on the spot, which takes seconds, most of them to import PyTorch

        return counts(recipe)

    facts = []
    for recipe, num_images in zip(recipes, known, strict=True):
        encoded = assumed.encoding.get(str(recipe.data.resolution))
        guess = {'images': assumed.preparation.num_images, 'latents': encoded and encoded.num_images}.get(recipe.data.kind)
        facts.append(Facts(recipe, counts_of(recipe), guess if num_images is None else num_images, num_images is not None))
    for one in facts:
        if errors := starts_before_the_end(one.recipe, one.num_batches):
            raise RecipeError(one.name, errors)
    sources = rate_sources(request.throughput, request.mfu, facts, clusters)
    encoders = [encoder_of(one, assumed, prices, price, gpu) for one in facts]
    columns = [column(facts, sources, cluster, assumed, encoders) for cluster in clusters]

    # The bill is for the number of GPUs that was asked for, or the most on which the recipes are sound and fit, else are sound.
    asked = [one for one in columns if request.bill_gpus in (None, one.cluster.num_gpus)]
    sound = [one for one in asked if one.phases]
    if not sound:
        mistakes = [f'  - {counted(one.cluster.num_gpus, "GPU")}: {error}' for one in asked for error in one.errors]
        raise InputError('\n'.join(['the recipes are sound on none of these numbers of GPUs:', *mistakes]))
    fitting = [one for one in sound if all(phase.memory.fits for phase in one.phases)]
    return project_plan(columns, (fitting or sound)[-1], assumed, prices, price, counts_of)


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
        raise InputError('no recipe is named; give at least one, such as yamls/sd2-base-256.yaml')
    return recipes


def _gpu(named: str | None, recipes: Sequence[AnyRecipe]) -> str:
    gpus = {named} if named is not None else {recipe.cost.gpu for recipe in recipes if recipe.cost.gpu is not None}
    if len(gpus) != 1:
        what = f'the recipes name {" and ".join(sorted(gpus))} (cost.gpu)' if gpus else 'the recipe names none (cost.gpu)'
        raise InputError(f'which GPU? {what}; choose with --gpu: {", ".join(MEMORY_GB)}')
    gpu = gpus.pop()
    try:
        memory_gb(gpu)
    except ValueError as error:
        raise InputError(f'--gpu: {error}') from None
    return gpu


def _price(request: PriceOptions, recipes: Sequence[AnyRecipe], gpu: str) -> tuple[Prices, Price]:
    """Return the list, and the price of a GPU-hour: that of the command line, the recipe's if it is for this GPU, or the list's."""
    prices = load_prices(request.prices, request.price)
    price = asked_price(request.price, gpu, prices)
    if price is None:
        own = {recipe.name: found for recipe in recipes if recipe.cost.gpu == gpu and (found := price_of_run(recipe.cost, prices)) is not None}
        if len({found.dollars for found in own.values()}) > 1:
            texts = ', '.join(f'{name} ${found.dollars:g}' for name, found in own.items())
            raise InputError(f'at which price? the recipes differ (cost.price_per_gpu_hour: {texts}); choose with --price')
        price = next(iter(own.values()), None)
    return prices, price or price_of_gpu(gpu, prices, 'give one with --price DOLLARS')


def _assumptions(path: Path | None, changes: Sequence[str], recipes: Sequence[AnyRecipe], known: Sequence[int | None]) -> Assumptions:
    """Load the assumptions with known numbers of images in place of assumed ones.

    Of datasets of one resolution the largest counts, and the largest of all for the images. Of a resolution of which nothing is assumed the shipped
    number of images says nothing.
    """
    assumptions = load_assumptions(path, changes)
    preparation, encoding = assumptions.preparation, dict(assumptions.encoding)
    counts = [(recipe.data, count) for recipe, count in zip(recipes, known, strict=True) if count is not None]
    named = any(text.startswith('preparation.num_images=') for text in changes)
    named = named or preparation.num_images != load_assumptions().preparation.num_images
    for px in {recipe.data.resolution for recipe in recipes if recipe.data.kind == 'latents'}:
        here = [count for data, count in counts if (data.kind, data.resolution) == ('latents', px)]
        found = encoding_at(assumptions.encoding, px)
        if found is not None and (here or (named and str(px) not in encoding)):
            encoding[str(px)] = replace(found[0], num_images=max(here, default=None))
    if counts:
        preparation = replace(preparation, num_images=max(count for _, count in counts))
    return replace(assumptions, encoding=encoding, preparation=preparation)


def print_plan(request: PlanRequest) -> None:
    """Make the plan, print it, and write --json."""
    plan = make_plan(request)
    if request.json_ is not None:
        try:
            write_text(request.json_, json.dumps(plan.values, indent=1) + '\n')
        except OSError as error:
            raise InputError(f'--json {request.json_}: cannot be written: {error.strerror}') from None
    print_page(plan_text(plan))
    for text in (*plan.unfit, *filter(None, [gpu_without_kernels(plan.cluster.gpu)])):
        print_message(f'warning: {text}')


def main() -> int:
    request = PlanRequest.parse('diffusion.plan', __doc__)
    return run_command(lambda: print_plan(request))


if __name__ == '__main__':
    raise SystemExit(main())
