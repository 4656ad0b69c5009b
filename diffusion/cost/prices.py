"""What things cost: prices with date and source, from benchmarks/prices.yaml, a file of one's own, or the command line."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:  # recipe/rules.py asks here what GPUs there are
    from diffusion.recipe.schema import Cost

DEFAULT = Path(__file__).parents[2] / 'benchmarks' / 'prices.yaml'

# What is counted, by section of the file.
UNITS = {
    'gpu_hour': 'GPU-hour',
    'machine_hour': 'machine-hour',
    'storage_tb_month': 'TB-month',
    'requests_1000': '1,000 requests',
    'egress_gb': 'GB',
    'person_month': 'person-month',
}


class PriceError(ValueError):
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
        close = difflib.get_close_matches(name, self._prices, n=1, cutoff=0.5)
        hint = f"; did you mean '{close[0]}'?" if close else ''
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
        raise PriceError(f'{path}: cannot be read: {" ".join(str(error).split())}') from error
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
        raise PriceError('\n'.join([f'{path}: {len(errors)} errors', *(f'  - {error}' for error in errors)]))
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
    prices = load_prices() if prices is None else prices
    if cost.gpu not in prices.gpus():
        starting = [gpu for gpu in prices.gpus() if gpu.startswith(cost.gpu)]
        close = starting or difflib.get_close_matches(cost.gpu, prices.gpus(), n=1, cutoff=0.5)
        hint = f'; did you mean {" or ".join(close)}?' if close else '.'
        raise PriceError(f"no price for a '{cost.gpu}'{hint} There are prices for {', '.join(prices.gpus())}; or set cost.price_per_gpu_hour")
    return prices[f'gpu_hour.{cost.gpu}']


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
