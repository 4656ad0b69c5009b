import os

import pytest

from benchmarks.report import with_asked
from diffusion.cost.prices import PriceError, asked_price, load_prices, price_of_run
from diffusion.recipe.schema import Cost


def test_the_list_that_is_shipped():
    prices = load_prices()
    assert prices['gpu_hour.a100-40gb'].dollars == 2.00
    assert prices['gpu_hour.a100-80gb.on-demand'].dollars == 5.12 == 40.96 / 8
    assert list(prices.plans('a100-80gb')) == ['on-demand', 'reserved-1y', 'flat', 'spot']
    assert {gpu: prices[f'gpu_hour.{gpu}.reserved-1y'].dollars for gpu in ('h100', 'h200', 'b200')} == {
        'h100': pytest.approx(133_414.80 / 8 / 8760, rel=2e-4), 'h200': 210_240 / 8 / 8760, 'b200': 297_840 / 8 / 8760
    }  # fmt: skip
    assert all(price.date and price.source and price.name in str(price) for price in prices.values())


def test_a_price_from_the_command_line_wins_and_says_so():
    prices = load_prices(asked=['gpu_hour.a100-40gb.flat=1.5', 'gpu_hour.b300.mine=3e-1'])
    assert str(prices['gpu_hour.a100-40gb']) == '$1.50 per GPU-hour (gpu_hour.a100-40gb.flat; given on the command line; now)'
    assert prices['gpu_hour.b300'].dollars == 0.3


@pytest.mark.parametrize(
    ('text', 'message'),
    [
        ('gpu_houres: {}', "gpu_houres: unknown key .*; did you mean 'gpu_hour'"),
        ('gpu_hour: {h100: {flat: 2.0}}', r'gpu_hour\.h100\.flat: 2.0 is not a section of keys'),
        (
            'gpu_hour: {h100: {flat: {dollars: -2, date: 2026, source: me}}}',
            r'gpu_hour\.h100\.flat\.dollars: -2 is not a number from 0 to 1000000000',
        ),
        ('gpu_hour: {h100: {flat: {dollars: 2, date: 2026}}}', r'a price is section: {thing: .*\n.*gpu_hour\.h100\.flat\.source: missing'),
        ('gpu_hour: 2.0', 'gpu_hour: 2.0 is not a section of keys'),
        ('gpu_hour:', 'gpu_hour: null is not a section of keys'),
        ('gpu_hour: {h100: 2.0}', r'gpu_hour\.h100: 2.0 is not a section of keys'),
        ('- gpu_hour', 'expected a mapping of keys to values, this file holds a list'),
        ('\udcff', 'is not text'),
    ],
)
def test_a_file_that_is_wrong(tmp_path, text, message):
    (tmp_path / 'prices.yaml').write_bytes(text.encode('utf-8', 'surrogateescape'))
    with pytest.raises(PriceError, match=message):
        load_prices(tmp_path / 'prices.yaml')
    os.mkfifo(tmp_path / 'fifo')
    with pytest.raises(PriceError, match='cannot be read: not a regular file'):
        load_prices(tmp_path / 'fifo')


def test_what_is_not_there_has_no_price():
    with pytest.raises(PriceError, match=r"did you mean 'gpu_hour\.h100"):
        load_prices()['gpu_hour.h1000.on-demand']


def test_the_price_of_a_run():
    prices = load_prices()
    assert price_of_run(Cost(gpu='h200', price_per_gpu_hour=3.5), prices).dollars == 3.5
    assert price_of_run(Cost(gpu='h200', price_per_gpu_hour=None), prices) == prices['gpu_hour.h200.on-demand']
    assert price_of_run(Cost(gpu=None, price_per_gpu_hour=None), prices) is None


@pytest.mark.parametrize(
    ('texts', 'name', 'dollars'),
    [
        ([], None, None),
        (['gpu_hour.h100.spot=9', 'person_month.engineer.mine=1'], None, None),
        (['gpu_hour.h200.mine=1.5'], 'gpu_hour.h200.mine', 1.5),
        (['1e0'], 'gpu_hour.h200.given', 1.0),
        (['spot'], 'gpu_hour.h200.spot', 1.65),
        (['gpu_hour.h200.spot=1.5', '2.49'], 'gpu_hour.h200.given', 2.49),
        (['2.49', 'gpu_hour.h200.spot=1.5'], 'gpu_hour.h200.given', 2.49),
        (['gpu_hour.h200.spot=1.5', 'spot', 'spot'], 'gpu_hour.h200.spot', 1.5),
    ],
)
def test_the_price_that_is_asked_for(texts, name, dollars):
    prices = load_prices(asked=texts)
    price = asked_price(texts, 'h200', prices)
    assert (price and price.name, price and price.dollars) == (name, dollars)
    if price is not None:
        preferring = with_asked(prices, texts, ['h200'])
        assert preferring['gpu_hour.h200'] == price
        assert next(iter(preferring.plans('h200').values())) == price
        assert set(preferring) == {*prices, name}


@pytest.mark.parametrize(
    ('texts', 'message'),
    [
        (
            ['cheap'],
            r'--price cheap: neither dollars, NAME=DOLLARS nor an offer for h200 in the list of prices \(there: on-demand, capacity-block, reserved-1y, spot\)',
        ),
        (['-1'], '--price -1: neither dollars'),
        (['nan'], '--price nan: neither dollars'),
        (['2', '3'], r'at which price\? --price names \$2.00 .*, \$3.00 .*; give one of them'),
        (['spot', '3'], 'give one of them'),
        (['gpu_hour.h200.spot=1', 'gpu_hour.h200.on-demand=2'], 'name it as well, such as --price spot'),
    ],
)
def test_prices_that_cannot_be_asked_for(texts, message):
    prices = load_prices(asked=texts)
    with pytest.raises(PriceError, match=message):
        asked_price(texts, 'h200', prices)


def test_a_gpu_that_the_list_does_not_have():
    with pytest.raises(
        PriceError,
        match=r"no price for a 'a100'; did you mean 'a100-40gb' or 'a100-80gb'\? There are prices for a100-40gb, .*or set cost.price_per_gpu_hour",
    ):
        price_of_run(Cost(gpu='a100', price_per_gpu_hour=None))
    assert price_of_run(Cost(gpu='my-own', price_per_gpu_hour=1.0)).source == 'the recipe, for my-own'


def test_amounts_keep_their_digits():
    prices = load_prices(asked=['gpu_hour.mine=1500000'])
    assert [prices[name].amount for name in ('requests_1000.s3-get', 'gpu_hour.a100-80gb.reserved-1y', 'gpu_hour.mine', 'egress_gb.same-region')] == [
        '$0.0004', '$3.0012', '$1,500,000.00', '$0.00',
    ]  # fmt: skip
