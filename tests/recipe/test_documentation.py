"""The reference of recipes says of each key what the schema enforces."""

import re
import runpy

import pytest

from diffusion.recipe import load_recipe, to_dict
from diffusion.recipe.reading import leaves
from tests.conftest import REPOSITORY

recipe_reference = runpy.run_path(str(REPOSITORY / 'docs/recipe_reference.py'))['recipe_reference']


@pytest.fixture(scope='module')
def rows():
    """The last three cells by section and key; of autoencoders after `autoencoders`."""
    found, section, part = {}, '', ''
    for line in recipe_reference().splitlines():
        if heading := re.match(r'#+ (.*)', line):
            section = heading[1]
            part = 'autoencoders ' if 'autoencoders' in section else part
        elif cells := re.match(r'\| `(\w+)`( ↻)? \| (.*) \| (.*) \| (.*) \|$', line):
            place = (part + section.removeprefix('Top level'), cells[1])
            assert place not in found, place
            found[place] = cells.groups()[1:]
    return found


def test_all_keys_of_recipes_are_explained(rows):
    """Of resolved recipes, which have every key; names of streams and prompts are their own, and other sections of the same kind are described once."""
    for name in ('sdxl-base-256', 'dreambooth-sdxl-lora', 'prx-budget-256'):
        recipe = to_dict(load_recipe(REPOSITORY / f'yamls/{name}.yaml', ['data.streams.NAME.local=.'], rules=[]))
        for path, _ in leaves(recipe):
            if path[1:2] == ('streams',) and len(path) > 2:
                path = ('data', 'streams', 'NAME', *path[3:])
            if path[:3] == ('log', 'samples', 'prompts') or path[-1] == 'NAME':
                continue
            assert rows['.'.join(path[:-1]), path[-1]][3], path


@pytest.mark.parametrize(
    ('section', 'key', 'changes', 'value', 'default'),
    [
        ('optimizer', 'lr', False, 'a number from 0 to 1', '`0.0001`'),
        ('optimizer', 'betas', False, 'a list of 2, each a number from 0 to 0.999999999', '`[0.9, 0.999]`'),
        ('optimizer', 'warmup', False, 'a duration in ba', '`10000ba`'),
        ('', 'name', True, 'a text', 'required'),
        ('batch', 'micro_size', True, 'a whole number from 1 to 1000000000 or `auto`', 'required'),
        ('checkpoint', 'every', True, 'a duration in ba or sec of at least 1', '`1800sec`'),
        ('train', 'compile', True, 'one of network, blocks or null', '`null`'),
        ('data', 'streams', False, 'by name: section [data.streams.NAME](#datastreamsname) or null', '`{}`'),
        ('eval', 'streams', True, 'by name: section [data.streams.NAME](#datastreamsname) or null', '`{}`'),
        ('data.encoders.ray', 'gpus', True, 'a number from 0 to 1', '`1.0`'),
        ('autoencoders data', 'crop', False, 'one of center, random', '`random`'),
        ('autoencoders log.samples', 'count', True, 'a whole number from 1 to 256', '`8`'),
    ],
)
def test_a_row_has_type_unit_range_and_default(section, key, changes, value, default, rows):
    mark, *rest, meaning = rows[section, key]
    assert ([bool(mark), *rest], len(meaning) > 5) == ([changes, value, default], True)


def test_autoencoders_repeat_nothing(rows):
    assert ('autoencoders data', 'resolution') in rows
    assert ('autoencoders data', 'shuffle') not in rows
    assert ('autoencoders optimizer', 'lr') not in rows
