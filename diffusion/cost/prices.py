"""Prices with date and source, from diffusion/cost/prices.yaml, a user's own file, or the command line; and rows, quantities at a price."""

import math
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from diffusion.common.files import read_regular
from diffusion.common.text import counted, did_you_mean, one_line
from diffusion.contracts.errors import InputError
from diffusion.cost.formulas import Number, quantiles
from diffusion.recipe import rules as recipe_rules
from diffusion.recipe.autoencoder import AnyRecipe
from diffusion.recipe.reading import MAX_BYTES, read_yaml, yaml_problem
from diffusion.recipe.schema import Cost, Recipe

DEFAULT = Path(__file__).with_name('prices.yaml')

# What is counted, by section of the file.
UNITS = {
    'gpu_hour': 'GPU-hour',
    'machine_hour': 'machine-hour',
    'storage_tb_month': 'TB-month',
    'requests_1000': '1,000 requests',
    'egress_gb': 'GB',
    'person_month': 'person-month',
}


class PriceError(InputError):
    """A price is missing, or malformed."""


@dataclass(frozen=True)
class Price:
    """Dollars for one unit of something, with date and source."""

    name: str  # dotted path in the file, such as gpu_hour.a100-40gb.on-demand
    dollars: float
    unit: str
    date: str
    source: str

    @property
    def offer(self) -> str:
        """Last part of the name, such as `on-demand` or `spot`."""
        return self.name.rpartition('.')[2]

    @property
    def amount(self) -> str:
        """`$2.00`, with as many digits as it was written with."""
        decimals = len(f'{self.dollars:.6f}'.rstrip('0').partition('.')[2])
        return f'${self.dollars:,.{max(2, decimals)}f}'

    def __str__(self) -> str:
        return f'{self.amount} per {self.unit} ({self.name}; {self.source}; {self.date})'


@dataclass(frozen=True)
class CostRow:
    """One line of a plan or a bill: a quantity of something, at a price if it has one, and where the quantity is from.

    Attributes:
        quantity: a number or draws; None: nobody knows, and `formula` says why.
        formula: in words and numbers, as people read it.
        kind: of the source: measured, published, predicted, scaled, limited, given, counted or assumed.
        recipe, num_gpus: what it is about, unless it is the whole plan.
        is_surcharge: the price is a difference to another one, on what other rows have already.
        fixed_dollars: of payments at several prices.
    """

    group: str
    what: str
    quantity: Number
    unit: str
    price: Price | None = None
    formula: str = ''
    source: str = ''
    kind: str = ''
    recipe: str = ''
    num_gpus: int | None = None
    is_surcharge: bool = False
    fixed_dollars: Number = None

    @property
    def dollars(self) -> Number:
        """Quantity times price; 0 for what has none."""
        if self.fixed_dollars is not None:
            return self.fixed_dollars
        return 0.0 if self.price is None or self.quantity is None else self.quantity * self.price.dollars

    @property
    def values(self) -> dict[str, Any]:
        """The row for machines: unrounded, [p10, p50, p90] of what is uncertain; what is empty is left out."""
        found = {item.name: getattr(self, item.name) for item in fields(self) if item.name != 'fixed_dollars'}
        found |= {'price': self.price and asdict(self.price), 'dollars': None if self.price is None else quantiles(self.dollars)}
        found['quantity'] = quantiles(self.quantity) if isinstance(self.quantity, np.ndarray) else self.quantity
        return {name: value for name, value in found.items() if name == 'quantity' or value not in (None, '', False)}


class Prices(UserDict[str, Price]):
    """All prices by dotted name; a look-up may leave out the last part, and then gets the first of its kind."""

    def __missing__(self, name: str) -> Price:
        for known, price in self.data.items():
            if known.startswith(f'{name}.'):
                return price
        section = [known for known in self.data if known.startswith(name.partition('.')[0] + '.')] or list(self.data)
        hint = did_you_mean(name, self.data, cutoff=0.5)
        raise PriceError(f"no price '{name}'{hint} There are {', '.join(section)}; add one to the file of prices or give --price NAME=DOLLARS")

    def gpus(self) -> list[str]:
        """GPUs that a GPU-hour has a price for."""
        return list(dict.fromkeys(name.split('.')[1] for name in self.data if name.startswith('gpu_hour.')))

    def plans(self, gpu: str) -> dict[str, Price]:
        """Prices of one GPU and hour by plan (on-demand, reserved-1y, spot ...)."""
        return {price.offer: price for name, price in self.data.items() if name.startswith(f'gpu_hour.{gpu}.')}

    def preferring(self, price: Price) -> 'Prices':
        """Return the same list with this price as the first of its kind."""
        return Prices({price.name: price} | {name: other for name, other in self.data.items() if name != price.name})


def load_prices(path: Path | None = None, asked: Sequence[str] = ()) -> Prices:
    """Read a file of prices, the shipped one if none is named, changed by what is NAME=DOLLARS of --price options.

    Raises:
        PriceError: the file or an override is not understood; all mistakes at once.
    """
    path, prices, errors = DEFAULT if path is None else path, Prices(), list[str]()
    try:
        content = read_yaml(read_regular(path, MAX_BYTES).decode())
    except yaml.YAMLError as error:
        raise PriceError(f'{path}: cannot be read: {yaml_problem(error)}') from error
    except (OSError, ValueError) as error:
        raise PriceError(f'{path}: cannot be read: {one_line(error)}') from error
    entries = list(_entries(content, errors))
    for name, is_override, text in (text.partition('=') for text in asked):
        if is_override:
            entries.append((name, {'dollars': _number(text), 'date': 'now', 'source': 'given on the command line'}))
    for name, entry in entries:
        try:
            prices[name] = _price(name, entry)
        except PriceError as error:
            errors.append(str(error))
    if errors:
        raise PriceError('\n'.join([f'{path}: {counted(len(errors), "error")}', *(f'  - {error}' for error in errors)]))
    return prices


def _entries(value: Any, errors: list[str], path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, its value): a section holds things, a thing its offers."""
    if len(path) == 3:
        yield '.'.join(path), value
    elif path and path[0] not in UNITS:
        errors.append(f"'{path[0]}' is not a section; there are {', '.join(UNITS)}")
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _entries(inner, errors, (*path, str(name)))
    elif path:
        price = '{dollars: 2, date: 2026-01, source: ...}'
        errors.append(f'{".".join(path)}: {value!r} holds no offers; write {path[0]}: {{thing: {{offer: {price}}}}}')
    else:
        errors.append('holds no sections; a file of prices is section: {thing: {offer: {dollars: ..., date: ..., source: ...}}}')


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text  # whoever reads it reports it


def _price(name: str, entry: Any) -> Price:
    unit = UNITS.get(name.partition('.')[0])
    if unit is None or '.' not in name:
        raise PriceError(f"'{name}' is not the name of a price, such as gpu_hour.h200.on-demand; the first part is one of {', '.join(UNITS)}")
    if not isinstance(entry, Mapping) or set(entry) != {'dollars', 'date', 'source'}:
        raise PriceError(f'{name}: {entry} is not a price; write {{dollars: 2.00, date: 2026-01, source: ...}}')
    value = entry['dollars']
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < 1e9:
        raise PriceError(f'{name}: {value!r} is not a number of dollars from 0 to 1e9')
    return Price(name, float(value), unit, str(entry['date']), str(entry['source']))


def price_of_run(cost: Cost, prices: Prices | None = None) -> Price | None:
    """Return the price of a GPU-hour by a recipe's `cost` section: its own number, or the list's for its GPU, if it names one (PriceError else)."""
    if cost.price_per_gpu_hour is not None:
        source = f'the recipe, for {cost.gpu or "the machine"}'
        return Price('cost.price_per_gpu_hour', cost.price_per_gpu_hour, UNITS['gpu_hour'], 'as given', source)
    if cost.gpu is None:
        return None
    return price_of_gpu(cost.gpu, load_prices() if prices is None else prices, 'set cost.price_per_gpu_hour')


def price_of_gpu(gpu: str, prices: Prices, remedy: str) -> Price:
    """Return the first price of a GPU in the list, or raise PriceError with a remedy."""
    if gpu not in prices.gpus():
        hint = did_you_mean(gpu, prices.gpus(), cutoff=0.5, by_prefix=True)
        raise PriceError(f"no price for a '{gpu}'{hint} There are prices for {', '.join(prices.gpus())}; or {remedy}")
    return prices[f'gpu_hour.{gpu}']


def gpu_of(name: str) -> str | None:
    """Return the GPU of a price's name, `a10g` of `gpu_hour.a10g.spot`; None if it is of something else."""
    section, _, rest = name.partition('.')
    return rest.partition('.')[0] if section == 'gpu_hour' else None


def asked_price(texts: Sequence[str], gpu: str, prices: Prices) -> Price | None:
    """Return the price of a GPU-hour that --price options ask for; None if they ask for none, PriceError if for two or for no offer of the list.

    Dollars and offers such as `spot` count first, and else an offer of this GPU that was changed by NAME=DOLLARS.
    """

    def asked_for(text: str) -> Price:
        amount = _number(text)
        if isinstance(amount, str) or math.isnan(amount) or not 0 <= amount < 1e9:
            offers = ', '.join(prices.plans(gpu)) or 'none'
            raise PriceError(f'--price {text}: neither dollars, NAME=DOLLARS nor an offer for {gpu} in the list of prices (there: {offers})')
        return Price(f'gpu_hour.{gpu}.given', amount, UNITS['gpu_hour'], 'now', 'given on the command line')

    changed = [text.partition('=')[0] for text in texts if '=' in text]
    asked = [prices.plans(gpu).get(text) or asked_for(text) for text in texts if '=' not in text]
    if not asked:
        asked = [prices[name] for name in changed if name.startswith(f'gpu_hour.{gpu}.')]
    if len(set(asked)) > 1:
        named = ', '.join(f'{price.amount} ({price.name})' for price in dict.fromkeys(asked))
        remedy = f'name it as well, such as --price {asked[0].offer}' if len(changed) == len(texts) else 'give one of them'
        raise PriceError(f'at which price? --price names {named}; {remedy}')
    return asked[0] if asked else None


def gpu_has_a_price(recipe: AnyRecipe, _: int) -> list[str]:
    """Refuse a recipe without a price of its own whose `cost.gpu` is not in the list; a rule like those of recipe/rules.py."""
    try:
        price_of_run(recipe.cost)
    except PriceError as error:
        return [f'cost.gpu: {error}']
    return []


def encoder_price_has_encoders(recipe: Recipe, _: int) -> list[str]:
    """Refuse a price of encoders that a recipe has not."""
    if recipe.cost.price_per_encoder_hour is None or recipe.data.encoders is not None:
        return []
    return ['cost.price_per_encoder_hour: has no effect without data.encoders; set it to null']


# Rules of recipes for commands that end with an error before anything is built.
RULES: tuple[Callable[[Any, int], list[str]], ...] = (*recipe_rules.RULES, gpu_has_a_price, encoder_price_has_encoders)
