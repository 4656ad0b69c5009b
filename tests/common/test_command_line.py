from pathlib import Path
from typing import Literal, Self

import pytest
from pydantic import PositiveInt, model_validator

from diffusion.common.command_line import LARGEST_SEED, MAX_SIDE_PX, Arguments, Guidance, Ids, Names, Prompts, Seed, SidePx, Size, option, positional


class Draw(Prompts):
    model: Path = positional('MODEL', 'exported model')
    seed: Seed = option(0, 'starting noise')
    steps: PositiveInt | None = option(None, "sampling steps (default: the recipe's)", 'N')
    size: Size | None = option(None, 'in pixels', 'WIDTHxHEIGHT', group='size')
    side: SidePx | None = option(None, 'in pixels', group='size')
    guidance: Guidance | None = option(None, 'guidance scale')
    metrics: Names | None = option(None, 'scores of 100 %', 'NAME,...')
    ids: Ids | None = option(None, 'prompts')
    weights: Literal['ema', 'training'] = option('ema', 'which weights')
    compare: list[Path] = option([], 'folders', several=True)
    keep: bool = option(False, 'keep all')
    overrides: list[str] = positional('key=value', default=[])

    @model_validator(mode='after')
    def _refuse_what_does_not_fit(self) -> Self:
        if self.size is not None and self.side is not None:
            raise ValueError('--size and --side: give one')
        return self


def parse(*words: str) -> Draw:
    return Draw.parse('diffusion.draw', 'Draw.', words=list(words))


def mistakes(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    with pytest.raises(SystemExit) as ended:
        parse(*words)
    assert ended.value.code == 2
    usage, *lines = capsys.readouterr().err.splitlines()
    assert usage == 'usage: python -m diffusion.draw [options] MODEL [key=value ...]'
    assert all(line.startswith('python -m diffusion.draw: error: ') for line in lines)
    return [line.removeprefix('python -m diffusion.draw: error: ') for line in lines]


def test_what_is_not_given_has_its_default():
    assert parse('m') == Draw(model=Path('m'))


def test_every_kind_of_argument():
    words = ['m', '--prompt', 'a, b', '--size', f'{MAX_SIDE_PX}x16', 'x.y=1', '--prompt=-x', '--seed', str(LARGEST_SEED), '--keep', 'z=', '--metrics']
    request = parse(*words, 'fid, kid', '--ids', '3,17', '--compare', 'a', 'b', '--guidance', '1', '--weights', 'training')
    assert request.prompts() == ['a, b', '-x']  # a comma and a dash are text
    assert (request.size, request.seed, request.keep, request.overrides) == ((MAX_SIDE_PX, 16), LARGEST_SEED, True, ['x.y=1', 'z='])
    assert (request.metrics, request.ids, request.compare) == (('fid', 'kid'), (3, 17), [Path('a'), Path('b')])
    assert (request.guidance, request.weights) == (1.0, 'training')


def test_prompts_of_a_file_follow_those_of_the_command_line(tmp_path):
    (tmp_path / 'prompts').write_text('b\n\n c\n')
    assert parse('m', '--prompts-file', str(tmp_path / 'prompts'), '--prompt', 'a').prompts() == ['a', 'b', ' c']


@pytest.mark.parametrize(
    ('option', 'value', 'wanted'),
    [
        ('--seed', '9' * 20, 'is above 4,294,967,295'),
        ('--seed', str(LARGEST_SEED + 1), 'is above 4,294,967,295'),
        ('--seed', '-1', 'is below 0'),
        ('--steps', '0', 'is not above 0'),
        ('--steps', '2.5', 'is not a whole number'),
        ('--size', '100000x100000', 'is above 4,096'),
        ('--size', '64x0', 'is not a size of multiples of 16, such as 512x768'),
        ('--side', '1000000000', 'is above 4,096'),
        ('--guidance', '0.5', 'is below 1, which is no guidance'),
        ('--guidance', 'nan', 'is not a number'),
        ('--guidance', '-1', 'is not above 0'),
        ('--metrics', 'fid,fid', 'is not a list of different names'),
        ('--ids', '3,x', 'is not a list of ids, such as 3,17'),
        ('--weights', 'emma', "is not one of 'ema', 'training'"),
    ],
)
def test_a_value_out_of_range_is_named_with_its_limit(option, value, wanted, capsys):
    (line,) = mistakes(capsys, 'm', option, value)
    assert line.startswith(f'{option} ')
    assert value[:5] in line
    assert wanted in line


def test_all_mistakes_are_named_at_once(capsys):
    lines = mistakes(capsys, '--steps', '0', '--seed', 'x', '--weights', 'no')
    assert [line.split()[0] for line in lines] == ['MODEL:', '--seed', '--steps', '--weights']
    assert mistakes(capsys, 'm', '--size', '16x16', '--side', '16') == ['--size and --side: give one']


def test_an_unknown_option_is_named_with_the_nearest_one_and_without_blame_for_its_value(capsys):
    assert mistakes(capsys, '--stepps', '5') == ["--stepps: unknown option; did you mean '--steps'?"]
    assert mistakes(capsys, 'm', '--stepps=5', '--see', '3') == [
        "--stepps=5: unknown option; did you mean '--steps'?",
        "--see: unknown option; did you mean '--seed'?",  # no abbreviation
    ]


def test_a_word_too_many_is_refused(capsys):
    class One(Arguments):
        model: str = positional('MODEL')

    with pytest.raises(SystemExit):
        One.parse('diffusion.one', None, words=['a', 'b'])
    assert 'error: b: unexpected argument' in capsys.readouterr().err


def test_help_lists_defaults_choices_and_groups(capsys):
    with pytest.raises(SystemExit) as ended:
        parse('--help')
    assert ended.value.code == 0
    text = ' '.join(capsys.readouterr().out.split())
    for part in ('starting noise (default 0)', "(default: the recipe's)", '--weights {ema,training} which weights (default ema)', 'scores of 100 %'):
        assert part in text
    assert text.count('(default') == 3
    assert 'size: --size WIDTHxHEIGHT in pixels' in text
