"""A key is declared in one place: type, limits, units, remedy and whether a resume may change it."""

from dataclasses import dataclass

import pytest

from diffusion.recipe import Duration
from diffusion.recipe.keys import MISSING, declared, first_unknown, key, known_paths, meaning
from diffusion.recipe.merging import merge


@dataclass
class Inner:
    share: float | None = key(None, 'A share.', low=0, high=1)
    every: Duration = key('10ba', units=('ba', 'sec'), low=1, may_change=True)
    """An interval,
    whose text is below it."""


@dataclass
class Outer:
    name: str = key(MISSING, 'A name.', remedy='write a name')
    pair: tuple[float, float] = key((0.1, 0.2), 'Two numbers.', low=0)
    inner: Inner = key(Inner, may_change=True)
    other: Inner | None = key(None, 'A section that may be absent.')
    named: dict[str, Inner | None] = key(dict, 'Sections by name.')


def merged(content):
    errors = []
    return merge(Outer, [('file', content)], errors), errors


def test_durations_are_parsed_wherever_they_stand():
    outer, errors = merged({'name': 'x', 'inner': {'every': '5sec'}, 'other': {'share': 0.5}, 'named': {'a': {'every': '7ba'}}})
    assert not errors
    found = [section.every for section in (outer.inner, outer.other, outer.named['a'])]
    assert [(duration.value, duration.unit) for duration in found] == [(5, 'sec'), (10, 'ba'), (7, 'ba')]


@pytest.mark.parametrize(
    ('content', 'expected'),
    [
        ({}, 'name: missing; write a name'),
        ({'name': None}, 'name: null is not a text (file); write a name'),
        ({'pair': [1, -2]}, 'pair[1]: -2 is not a number of at least 0 (file)'),
        ({'inner': {'share': 1.5}}, 'inner.share: 1.5 is not a number from 0 to 1 or null (file)'),
        ({'inner': {'share': '7'}}, "inner.share: '7' is not a number from 0 to 1 or null (file)"),
        ({'inner': {'share': float('nan')}}, 'inner.share: nan is not a number from 0 to 1 or null (file)'),
        ({'other': {'share': -1}}, 'other.share: -1 is not a number from 0 to 1 or null (file)'),
        ({'named': {'a': {'share': 2}}}, 'named.a.share: 2 is not a number from 0 to 1 or null (file)'),
        (
            {'inner': {'every': '0ba'}},
            "inner.every: '0ba' is not a duration in ba or sec of at least 1 (file); write batches or seconds, such as 10000ba",
        ),
        (
            {'inner': {'every': '1ep'}},
            "inner.every: '1ep' is not a duration in ba or sec of at least 1 (file); write batches or seconds, such as 10000ba",
        ),
        (
            {'inner': {'every': 'soon'}},
            "inner.every: 'soon' is not a duration in ba or sec of at least 1 (file); write batches or seconds, such as 10000ba",
        ),
        ({'inner': {'every': 10}}, 'inner.every: 10 is not a duration in ba or sec of at least 1 (file); write batches or seconds, such as 10000ba'),
        (
            {'inner': {'every': None}},
            'inner.every: null is not a duration in ba or sec of at least 1 (file); write batches or seconds, such as 10000ba',
        ),
        (
            {'inner': {'every': ['1ba']}},
            "inner.every: ['1ba'] is not a duration in ba or sec of at least 1 (file); write batches or seconds, such as 10000ba",
        ),
    ],
)
def test_a_value_outside_the_limits_of_its_key_is_left_out_with_a_reason(content, expected):
    config, errors = merged({'name': 'nan', **content} if content else {})
    assert expected in errors
    assert config.inner.share is None
    assert config.inner.every == '10ba'


def test_a_schema_knows_its_paths():
    assert ('named', 'NAME', 'share') in known_paths(Outer)
    assert declared(Outer, ('other', 'every'))[1].may_change
    assert meaning(Outer, ('named', 'a', 'share')) == 'A share.'
    assert meaning(Outer, ('other', 'every')) == 'An interval, whose text is below it.'
    assert meaning(Outer, ('named', 'a')) == ''
    assert first_unknown(Outer, ('named', 'a', 'shape', 'x')) == ('named', 'a', 'shape')
    assert first_unknown(Outer, ('name', 'x')) == ()  # of another type, and known
