"""Prices with date and source, from diffusion/cost/prices.yaml, a user's own file, or the command line; and rows, quantities at a price."""

from collections import UserDict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from diffusion.common.command_line import Arguments, option
from diffusion.common.text import counted, did_you_mean
from diffusion.contracts.errors import InputError
from diffusion.cost.formulas import Number, quantiles
from diffusion.recipe import rules as recipe_rules
from diffusion.recipe.autoencoder import AnyRecipe
from diffusion.recipe.keys import MISSING, key, keys_of
from diffusion.recipe.merging import merge
from diffusion.recipe.reading import file_layers
from diffusion.recipe.schema import Cost

DEFAULT = Path(__file__).with_name('prices.yaml')


@dataclass
class Offer:
    dollars: float = key(MISSING, 'Dollars for one unit.', low=0, high=1e9)
    date: str = key(MISSING, 'Day or month on which that was true or seen.')
    source: str = key(MISSING, 'Page or paper; `assumption` where there is none.')


Things = dict[str, dict[str, Offer]]  # offers by thing, such as `spot` of `h200`


@dataclass
class PriceList:
    """A file of prices; the text of a section is its unit."""

    gpu_hour: Things = key(dict, 'GPU-hour')
    machine_hour: Things = key(dict, 'machine-hour')
    storage_tb_month: Things = key(dict, 'TB-month')
    requests_1000: Things = key(dict, '1,000 requests')
    egress_gb: Things = key(dict, 'GB')
    person_month: Things = key(dict, 'person-month')


UNITS = {section: unit.doc for section, unit in keys_of(PriceList).items()}


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
    """One line of a plan or a bill: a quantity of something, at a price if it has one, and where the quantity is from."""

    group: str
    what: str
    quantity: Number  # a number or draws; None: nobody knows, and `formula` says why
    unit: str
    price: Price | None = None
    formula: str = ''  # in words and numbers, as people read it
    source: str = ''
    kind: str = ''  # of the source: measured, published, predicted, scaled, limited, given, counted or assumed
    recipe: str = ''  # that it is about; empty: the whole plan
    num_gpus: int | None = None  # that it is about; None: any number
    is_surcharge: bool = False  # the price is a difference to another one, on what other rows have already
    fixed_dollars: Number = None  # of payments at several prices

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


def priced(group: str, what: str, quantity: Number, price: Price, formula: str, kind: str = 'assumed', **more: Any) -> CostRow:
    """Return a row in the unit of its price."""
    return CostRow(group, what, quantity, price.unit, price, formula, kind=kind, **more)


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


class PriceOptions(Arguments):
    """Options of commands that reckon with prices, for `load_prices` and `asked_price`."""

    price: list[str] = option(
        [],
        'of the GPU-hour: dollars, or an offer of the list such as spot; or NAME=DOLLARS for anything in the list, such as '
        'gpu_hour.h200.on-demand=2.50; repeatable',
        'PRICE',
    )
    prices: Path | None = option(None, 'a list of prices in place of diffusion/cost/prices.yaml', 'FILE')


def load_prices(path: Path | None = None, asked: Sequence[str] = ()) -> Prices:
    """Read a file of prices, the shipped one if none is named, changed by NAME=DOLLARS of --price options; PriceError has all mistakes."""
    path, prices, errors = DEFAULT if path is None else path, Prices(), list[str]()
    layers = file_layers(path, errors)
    if errors:
        raise PriceError(errors[0])
    listed = merge(PriceList, layers, errors)
    for section, unit in UNITS.items():
        for thing, offers in getattr(listed, section).items():
            named = {f'{section}.{thing}.{offer}': one for offer, one in offers.items()}
            prices |= {name: Price(name, one.dollars, unit, one.date, one.source) for name, one in named.items()}
    for name, is_override, amount in (text.partition('=') for text in asked):
        unit, dollars = UNITS.get(name.partition('.')[0], ''), _dollars(amount)
        if is_override and (not unit or '.' not in name):
            errors.append(f"'{name}' is not the name of a price, such as gpu_hour.h200.on-demand; the first part is one of {', '.join(UNITS)}")
        elif is_override and dollars is None:
            errors.append(f"{name}: '{amount}' is not a number of dollars from 0 to 1e9")
        elif is_override:
            prices[name] = Price(name, dollars or 0.0, unit, 'now', 'given on the command line')
    if errors:
        head = f'{path}: {counted(len(errors), "error")}; a price is section: {{thing: {{offer: {{dollars: 2.00, date: 2026-01, source: ...}}}}}}'
        raise PriceError('\n'.join([head, *(f'  - {error}' for error in errors)]))
    return prices


def _dollars(text: str) -> float | None:
    """Return the number of a text; None if it is none from 0 to 1e9."""
    try:
        dollars = float(text)
    except ValueError:
        return None
    return dollars if 0 <= dollars < 1e9 else None


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
    offers, changed, asked = prices.plans(gpu), [text.partition('=')[0] for text in texts if '=' in text], list[Price]()
    for text in texts:
        if text in offers:
            asked.append(offers[text])
        elif (amount := _dollars(text)) is not None:
            asked.append(Price(f'gpu_hour.{gpu}.given', amount, UNITS['gpu_hour'], 'now', 'given on the command line'))
        elif '=' not in text:
            there = ', '.join(offers) or 'none'
            raise PriceError(f'--price {text}: neither dollars, NAME=DOLLARS nor an offer for {gpu} in the list of prices (there: {there})')
    asked = asked or [prices[name] for name in changed if name.startswith(f'gpu_hour.{gpu}.')]
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


# Rules of recipes for commands that end with an error before anything is built.
RULES: tuple[Callable[[Any, int], list[str]], ...] = (*recipe_rules.RULES, gpu_has_a_price)
