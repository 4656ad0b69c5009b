"""What things cost: prices with date and source, from diffusion/cost/prices.yaml, a file of one's own, or the command line."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from diffusion.common.text import counted, did_you_mean, one_line
from diffusion.contracts.errors import InputError
from diffusion.recipe import rules as recipe_rules
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
    """A price is not there, or not one."""


@dataclass(frozen=True)
class Price:
    """Dollars for one unit of something, and why they should be believed."""

    name: str  # dotted path in the file, such as gpu_hour.a100-40gb.on-demand
    dollars: float
    unit: str
    date: str
    source: str

    @property
    def amount(self) -> str:
        """`$2.00`, with as many digits as it was written with."""
        return f'${self.dollars:,.{max(2, min(6, _decimals(self.dollars)))}f}'

    def __str__(self) -> str:
        return f'{self.amount} per {self.unit} ({self.name}; {self.source}; {self.date})'


class Prices(Mapping[str, Price]):
    """All prices by dotted name; what is asked for may leave out the last part, and is then the first of its kind."""

    def __init__(self, prices: Mapping[str, Price]):
        self._prices = dict(prices)

    def __getitem__(self, name: str) -> Price:
        """
        Raises:
            PriceError: there is none of that name.
        """
        if name in self._prices:
            return self._prices[name]
        for known, price in self._prices.items():
            if known.startswith(f'{name}.'):
                return price
        section = [known for known in self._prices if known.startswith(name.partition('.')[0] + '.')] or list(self._prices)
        hint = did_you_mean(name, self._prices, cutoff=0.5)
        raise PriceError(f"no price '{name}'{hint} There are {', '.join(section)}; add one to the file of prices or give --price NAME=DOLLARS")

    def __contains__(self, name: object) -> bool:
        return name in self._prices

    def __iter__(self) -> Iterator[str]:
        return iter(self._prices)

    def __len__(self) -> int:
        return len(self._prices)

    def gpus(self) -> list[str]:
        """Those that a GPU-hour has a price for."""
        return list(dict.fromkeys(name.split('.')[1] for name in self._prices if name.startswith('gpu_hour.')))

    def plans(self, gpu: str) -> dict[str, Price]:
        """The prices of one GPU and hour by plan (on-demand, reserved-1y, spot ...)."""
        return {name.rpartition('.')[2]: price for name, price in self._prices.items() if name.startswith(f'gpu_hour.{gpu}.')}

    def preferring(self, price: Price) -> Prices:
        """The same list with this price as the first of its kind."""
        return Prices({price.name: price} | {name: other for name, other in self._prices.items() if name != price.name})


def load_prices(path: Path | None = None, overrides: Sequence[str] = ()) -> Prices:
    """Read a file of prices, the shipped one if none is named; `name=dollars` overrides win, and may name things that the file does not have.

    Raises:
        PriceError: the file or an override is not understood; all mistakes at once.
    """
    prices, errors = {}, list[str]()
    path = DEFAULT if path is None else path
    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise PriceError(f'{path}: cannot be read: {one_line(error)}') from error
    for name, entry in _entries(content, errors):
        try:
            prices[name] = _price(name, entry)
        except PriceError as error:
            errors.append(str(error))
    for override in overrides:
        name, _, text = override.partition('=')
        try:
            prices[name] = _price(name, {'dollars': _number(text), 'date': 'now', 'source': 'given on the command line'})
        except PriceError as error:
            errors.append(str(error))
    if errors:
        raise PriceError('\n'.join([f'{path}: {counted(len(errors), "error")}', *(f'  - {error}' for error in errors)]))
    return Prices(prices)


def _entries(content: Any, errors: list[str]) -> Iterator[tuple[str, Any]]:
    """(dotted name, what stands there): a section holds things, a thing its offers."""
    if not isinstance(content, Mapping):
        errors.append('holds no sections; a file of prices is section: {thing: {offer: {dollars: ..., date: ..., source: ...}}}')
        return
    for section, things in content.items():
        if section not in UNITS:
            errors.append(f"'{section}' is not a section; there are {', '.join(UNITS)}")
            continue
        for thing, offers in things.items() if isinstance(things, Mapping) else [('', things)]:
            name = '.'.join(filter(None, (section, str(thing))))
            if isinstance(things, Mapping) and isinstance(offers, Mapping):
                yield from ((f'{name}.{offer}', entry) for offer, entry in offers.items())
            else:
                errors.append(
                    f'{name}: {offers!r} holds no offers; write {section}: {{thing: {{offer: {{dollars: 2.00, date: 2026-01, source: ...}}}}}}'
                )


def price_of_run(cost: Cost, prices: Prices | None = None) -> Price | None:
    """The price of a GPU-hour that a recipe's `cost` section means: its own number, or the list's for its GPU; None if it names neither.

    Args:
        prices: the list; the shipped one is read if it is needed.

    Raises:
        PriceError: the list has none for that GPU.
    """
    if cost.price_per_gpu_hour is not None:
        return Price(
            'cost.price_per_gpu_hour', cost.price_per_gpu_hour, UNITS['gpu_hour'], 'as given', f'the recipe, for {cost.gpu or "the machine"}'
        )
    if cost.gpu is None:
        return None
    return price_of_gpu(cost.gpu, load_prices() if prices is None else prices, 'set cost.price_per_gpu_hour')


def price_of_gpu(gpu: str, prices: Prices, remedy: str) -> Price:
    """The first of a GPU in the list.

    Args:
        remedy: what else could be done if there is none.

    Raises:
        PriceError: there is none.
    """
    if gpu not in prices.gpus():
        hint = did_you_mean(gpu, prices.gpus(), cutoff=0.5, by_prefix=True)
        raise PriceError(f"no price for a '{gpu}'{hint} There are prices for {', '.join(prices.gpus())}; or {remedy}")
    return prices[f'gpu_hour.{gpu}']


def load_asked(path: Path | None, texts: Sequence[str]) -> Prices:
    """`load_prices` with those of --price that change the list, NAME=DOLLARS.

    Raises:
        PriceError: as there.
    """
    return load_prices(path, [text for text in texts if '=' in text])


def asked_price(texts: Sequence[str], gpu: str, prices: Prices) -> Price | None:
    """The price of a GPU-hour that --price asks for; None if it asks for none.

    Dollars and offers count first, and else an offer of this GPU that was changed.

    Args:
        texts: as given: dollars, an offer of the list such as `spot`, or NAME=DOLLARS.
        prices: the list as `load_asked` makes it.

    Raises:
        PriceError: there is no such offer, or two prices are asked for.
    """
    changed = [text.partition('=')[0] for text in texts if '=' in text]
    asked = [prices.plans(gpu).get(text) or _given(text, gpu, prices) for text in texts if '=' not in text]
    if not asked:
        asked = [prices[name] for name in changed if name.startswith(f'gpu_hour.{gpu}.')]
    if len(set(asked)) > 1:
        named = ', '.join(f'{price.amount} ({price.name})' for price in dict.fromkeys(asked))
        remedy = f'say which as well, such as --price {asked[0].name.rpartition(".")[2]}' if len(changed) == len(texts) else 'give one of them'
        raise PriceError(f'at which price? --price names {named}; {remedy}')
    return asked[0] if asked else None


def _given(text: str, gpu: str, prices: Prices) -> Price:
    try:
        amount = float(text)
    except ValueError:
        amount = math.nan
    if not 0 <= amount < 1e9:
        offers = ', '.join(prices.plans(gpu)) or 'none'
        raise PriceError(f'--price {text}: neither dollars, NAME=DOLLARS nor an offer for {gpu} in the list of prices (there: {offers})')
    return Price(f'gpu_hour.{gpu}.given', amount, UNITS['gpu_hour'], 'now', 'given on the command line')


def _price(name: str, entry: Any) -> Price:
    fields = {'dollars', 'date', 'source'}
    unit = UNITS.get(name.partition('.')[0])
    if unit is None or name.count('.') < 1:
        raise PriceError(f"'{name}' is not the name of a price, such as gpu_hour.h200.on-demand; the first part is one of {', '.join(UNITS)}")
    if not isinstance(entry, Mapping) or set(entry) != fields:
        raise PriceError(f'{name}: {entry} is not a price; write {{dollars: 2.00, date: 2026-01, source: ...}}')
    value = entry['dollars']
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < 1e9:
        raise PriceError(f'{name}: {value!r} is not a number of dollars from 0 to 1e9')
    return Price(name, float(value), unit, str(entry['date']), str(entry['source']))


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text  # _price says what is wrong with it


def _decimals(dollars: float) -> int:
    """Digits after the point that the number was written with."""
    return len(f'{dollars:.6f}'.rstrip('0').partition('.')[2])


def gpu_has_a_price(recipe: Recipe, _: int) -> list[str]:
    """A rule for recipes (recipe/rules.py): without a number of its own, `cost.gpu` must be in the list of prices."""
    try:
        price_of_run(recipe.cost)
    except PriceError as error:
        return [f'cost.gpu: {error}']
    return []


RULES = (*recipe_rules.RULES, gpu_has_a_price)  # for commands that end with an error before anything is built
