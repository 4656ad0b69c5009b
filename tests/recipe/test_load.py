import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from diffusion.cost.prices import RULES
from diffusion.recipe import Recipe, RecipeError, load, load_recipe, recipe_from_yaml, to_yaml
from diffusion.recipe.keys import declared, is_section, known_paths, meaning
from diffusion.recipe.reading import read_yaml
from tests.conftest import REPOSITORY, run_here, run_python

BASE = REPOSITORY / 'yamls/sd2-base-256.yaml'
SYNTHETIC = ['data.kind=synthetic']


def errors_of(*overrides: str, path: Path = BASE, num_gpus: int = 1) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, [*SYNTHETIC, *overrides], num_gpus, RULES)
    return caught.value.errors


def test_numbers_of_the_published_recipe():
    recipe = load_recipe(BASE, SYNTHETIC)
    assert recipe.batch.global_size * recipe.train.duration.value == 1_126_400_000
    assert (recipe.optimizer.lr, recipe.optimizer.weight_decay, recipe.optimizer.warmup) == (1e-4, 0.01, '10000ba')
    second = load_recipe(REPOSITORY / 'yamls/sd2-base-512.yaml', [*SYNTHETIC, 'load_path=x.pt'])
    assert second.batch.global_size * second.train.duration.value == 1_740_800_000
    assert second.optimizer == recipe.optimizer  # inherited through base
    assert second.name == 'sd2-base-512'
    assert second.checkpoint.folder == 'runs/sd2-base-512/checkpoints'  # interpolation follows the new name


def test_numbers_of_the_budget_recipe():
    """Those in its comments. FLOP an image as counted: 539.31 and 2,408.74 GFLOP."""
    first = load_recipe(REPOSITORY / 'yamls/sd2-budget-256.yaml', SYNTHETIC)
    second = load_recipe(REPOSITORY / 'yamls/sd2-budget-512.yaml', [*SYNTHETIC, 'load_path=x.pt'])
    samples = [recipe.batch.global_size * recipe.train.duration.value for recipe in (first, second)]
    assert samples == [1_126_400_000, 300_032_000]
    flop = samples[0] * 539.31e9 + samples[1] * 2408.74e9
    assert flop == pytest.approx(1.33e21, rel=1e-3)
    assert 1 - flop / 4.80e21 == pytest.approx(0.72, abs=5e-3)
    assert second.model == first.model  # what the U-Net was trained on stays
    assert second.ema == first.ema
    assert (second.data.resolution, second.checkpoint.folder) == (512, 'runs/sd2-budget-512/checkpoints')


@pytest.mark.parametrize(
    ('override', 'expected'),
    [
        ('optimizer.lrr=1', "optimizer.lrr: unknown key (command line); did you mean 'optimizer.lr'?"),
        ('lr=1', "lr: unknown key (command line); did you mean 'optimizer.lr'?"),
        ('learning_rate=1', "learning_rate: unknown key (command line); did you mean 'optimizer.lr'?"),
        ('epochs=1', "epochs: unknown key (command line); did you mean 'train.duration'?"),
        ('.'.join('a' * 5000) + '=1', 'a key of 5,000 names; no key has more than 30'),
        ('data.streams.train.remot=s3://x', 'data.streams.train.remot: unknown key'),
        ('data.kind=latent', "data.kind: 'latent' is not one of latents, images, synthetic (command line); did you mean 'latents'?"),
        ('batch.micro_size=many', 'batch.micro_size: '),
        ('batch.micro_size=1.5', 'batch.micro_size: '),
        ('optimizer=null', 'optimizer: '),
        ('--optimizer.lr=1', 'is not an override'),
        ('optimizer.lr', 'is not an override'),
        ('run_folder=${nowhere}', 'nowhere'),
    ],
)
def test_a_mistake_names_its_path(override, expected):
    assert any(expected in error for error in errors_of(override))


def test_all_mistakes_are_reported_at_once_before_torch_is_imported(tmp_path):
    spy = f"""
import sys
from diffusion.recipe import load_or_exit
from diffusion.recipe.reading import read_yaml
try:
    load_or_exit(['{BASE}', 'optimizer.lrr=1', 'batch.micro_size=many', 'seed=1.5', 'model.network=sd9', 'data.streams.train.remote=null'], '', 24)
finally:
    assert 'torch' not in sys.modules
"""
    result = subprocess.run([sys.executable, '-c', spy], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert result.returncode == 2, result.stderr
    for expected in ('optimizer.lrr', 'batch.micro_size', 'seed', "no configuration 'sd9'; known:", 'data.streams.train: has no data', '24 GPUs'):
        assert expected in result.stderr
    assert 'Traceback' not in result.stderr


def test_other_ranks_let_the_first_of_their_node_speak_and_end_before_them(monkeypatch, capsys):
    """A launcher that ends them all at once could end it while it starts Python, and would return -15 instead of the code."""
    waited_sec = []
    monkeypatch.setattr(load.time, 'sleep', waited_sec.append)
    for rank, expected in (('1', [load.BEHIND_FIRST_RANK_SEC]), ('0', [])):
        waited_sec.clear()
        monkeypatch.setenv('LOCAL_RANK', rank)
        with pytest.raises(SystemExit, match='64'):
            load.load_or_exit([str(BASE), 'seed=1.5'], '', code=64)
        assert waited_sec == expected
        assert ('seed' in capsys.readouterr().err) == (rank == '0')


def test_a_missing_value_is_an_error(tmp_path):
    path = tmp_path / 'r.yaml'
    path.write_text('name: r\n')
    errors = errors_of(path=path)
    for key in ('model.network', 'model.encoders.source', 'batch.global_size', 'train.duration', 'data.resolution'):
        assert any(error.startswith(f'{key}: missing') for error in errors), key


def test_phase_two_needs_the_checkpoint_of_phase_one():
    phase_2 = REPOSITORY / 'yamls/sd2-base-512.yaml'
    assert any(error.startswith('load_path: missing') and 'checkpoint' in error for error in errors_of(path=phase_2))
    assert load_recipe(phase_2, [*SYNTHETIC, 'load_path=null']).load_path is None  # said on purpose


def test_base_is_merged_under_the_file_and_overrides_on_top(tmp_path):
    (tmp_path / 'middle.yaml').write_text(f'base: {BASE}\noptimizer: {{lr: 2.0e-4, clip_norm: 3.0}}\n')
    (tmp_path / 'top.yaml').write_text('base: middle.yaml\noptimizer: {lr: 3.0e-4}\n')
    recipe = load_recipe(tmp_path / 'top.yaml', [*SYNTHETIC, 'optimizer.clip_norm=null', 'data.streams.train=null', 'data.streams.mine.local=/data'])
    assert (recipe.optimizer.lr, recipe.optimizer.clip_norm, recipe.optimizer.weight_decay) == (3e-4, None, 0.01)
    assert recipe.data.streams['train'] is None
    assert recipe.data.streams['mine'].local == '/data'


def test_dictionaries_of_names_replace_those_of_the_base_and_overrides_change_one_entry(tmp_path):
    (tmp_path / 'base.yaml').write_text(
        f'base: {BASE}\ndata: {{streams: {{a: {{local: /a}}, b: {{local: /b}}}}}}\neval: {{streams: {{val: {{local: /v}}}}}}\n'
    )
    (tmp_path / 'middle.yaml').write_text('base: base.yaml\ndata: {streams: {b: {remote: "s3://b/b"}}}\nlog: {samples: {prompts: {cat: a cat}}}\n')
    (tmp_path / 'top.yaml').write_text('base: middle.yaml\neval: {streams: {}}\noptimizer: {lr: 2.0e-4}\n')

    def named(*overrides):
        recipe = load_recipe(tmp_path / 'top.yaml', [*SYNTHETIC, *overrides])
        streams = {name: stream and (stream.remote, stream.local) for name, stream in recipe.data.streams.items()}
        return streams, dict(recipe.log.samples.prompts), set(recipe.eval.streams), recipe.optimizer.clip_norm

    streams, prompts = {'b': ('s3://b/b', None)}, {'cat': 'a cat'}
    assert named() == (streams, prompts, set(), 1.0)  # other sections are merged as before
    assert named('log.samples.prompts.dog=a dog') == (streams, {**prompts, 'dog': 'a dog'}, set(), 1.0)
    assert named('log.samples.prompts={dog: a dog}', 'log.samples.prompts.fox=a fox')[1] == {'dog': 'a dog', 'fox': 'a fox'}
    assert named('data.streams.b.local=/cache', 'data.streams.c.local=/c')[0] == {'b': ('s3://b/b', '/cache'), 'c': (None, '/c')}
    assert named('data.streams={c: {local: /c}}')[0] == {'c': (None, '/c')}
    assert named('data={streams: {c: {local: /c}}}')[0] == {'c': (None, '/c')}
    assert named('eval.streams=${data.streams}')[2] == {'b'}


def test_bases_that_are_missing_or_go_in_circles(tmp_path):
    (tmp_path / 'a.yaml').write_text('base: b.yaml\n')
    (tmp_path / 'b.yaml').write_text('base: a.yaml\n')
    assert any('based on itself' in error for error in errors_of(path=tmp_path / 'a.yaml'))
    (tmp_path / 'c.yaml').write_text('base: none.yaml\n')
    assert any(f'none.yaml: no such file, on which {tmp_path / "c.yaml"} is based' in error for error in errors_of(path=tmp_path / 'c.yaml'))
    (tmp_path / 'd.yaml').write_text('name: d\nname: e\n')
    assert any('cannot be read as YAML' in error for error in errors_of(path=tmp_path / 'd.yaml'))


@pytest.mark.parametrize(
    ('base', 'said'),
    [
        ('/dev/zero', '/dev/zero: cannot be read: not a regular file'),
        ('fifo', 'fifo: cannot be read: not a regular file'),
        ('large.yaml', 'large.yaml: cannot be read: larger than 1,048,576 bytes'),
        ('"a\\0b"', 'embedded null'),
        ('loop', 'loop: cannot be read: Too many levels of symbolic links'),
        ('x' * 5000, 'cannot be read: File name too long'),
        ('chain/0.yaml', 'recipe.yaml is based on more than 20 files'),
    ],
)
def test_a_base_that_would_fill_the_memory_or_never_end_is_refused(base, said, tmp_path):
    os.mkfifo(tmp_path / 'fifo')
    (tmp_path / 'large.yaml').write_bytes(b'#' * (2**20 + 1))
    (tmp_path / 'loop').symlink_to('loop')
    (tmp_path / 'chain').mkdir()
    for i in range(1200):
        (tmp_path / f'chain/{i}.yaml').write_text(f'base: {i + 1}.yaml\n')
    (tmp_path / 'recipe.yaml').write_text(f'base: {base}\n')
    (error,) = errors_of(path=tmp_path / 'recipe.yaml')
    assert said in error
    assert len(error) < 2000


def test_many_mistakes_are_told_up_to_a_limit(tmp_path):
    path = tmp_path / 'recipe.yaml'
    path.write_text(f'base: {BASE}\n' + ''.join(f'key{i}: 1\n' for i in range(500)))
    errors = errors_of(path=path)
    assert f'{path}: more than 100 mistakes; the others are not listed' in errors
    assert len(errors) < 110
    path.write_text(''.join(f'key{i}: 1\n' for i in range(10_000)))
    assert 'more than 20,000 keys and values' in errors_of(path=path)[0]


def test_an_error_of_yaml_names_the_file_and_shows_the_line(tmp_path):
    (tmp_path / 'base.yaml').write_text('name: x\noptimizer: {lr: 1.0e-3\ndata:\n  kind: latents\n')
    (tmp_path / 'top.yaml').write_text('base: base.yaml\n')
    (error,) = errors_of(path=tmp_path / 'top.yaml')
    place = (
        f"{tmp_path}/base.yaml: cannot be read as YAML: line 3, column 5: expected ',' or '}}', but got ':', while parsing a flow mapping from line 2"
    )
    assert error == f'{place}\n      data:\n          ^'


def test_of_a_file_that_cannot_be_read_nothing_else_is_said(tmp_path):
    for content in (None, 'a: [', '- list'):
        path = tmp_path / 'recipe.yaml'
        if content is not None:
            path.write_text(content)
        with pytest.raises(RecipeError) as error:
            load_recipe(path)
        assert len(error.value.errors) == 1


def test_the_resolved_recipe_is_a_recipe(tmp_path):
    recipe = load_recipe(BASE, [*SYNTHETIC, 'optimizer.betas=[0.8,0.9]'])
    (tmp_path / 'resolved.yaml').write_text(to_yaml(recipe))
    assert load_recipe(tmp_path / 'resolved.yaml') == recipe


def test_every_field_is_documented():
    undocumented = [path for path in known_paths(Recipe) if not meaning(Recipe, path)]
    assert all(is_section(declared(Recipe, path)[0]) for path in undocumented), undocumented


def test_check_prints_the_resolved_recipe_with_its_meaning():
    path, overrides = REPOSITORY / 'yamls/sd2-base-512.yaml', ['load_path=null', 'batch.micro_size=32', *SYNTHETIC]
    out = run_here('diffusion.check', path, '--all', '--gpus', '16', *overrides).stdout
    assert recipe_from_yaml(out, 'check') == load_recipe(path, overrides, num_gpus=16)
    assert '# [sd2-base-256.yaml] Peak learning rate' in out
    assert '# [command line] Samples in one forward and backward pass' in out
    assert '16 GPUs x 4 micro-batches x 32 = 2,048' in out


def test_check_folds_what_was_not_changed_and_says_where_it_comes_from():
    path, overrides = REPOSITORY / 'yamls/sd2-base-512.yaml', ['load_path=null', 'log.samples.prompts.cat=a cat', *SYNTHETIC]
    lines = run_here('diffusion.check', path, '--gpus', '8', *overrides).stdout.splitlines()
    stated = yaml.safe_load('\n'.join(lines))
    assert (stated['data']['resolution'], stated['data']['kind'], set(stated['log']['samples'])) == (512, 'synthetic', {'prompts'})
    assert (stated['optimizer'], 'seed' in stated, 'cost' in stated) == (None, False, True)
    assert lines[lines.index('optimizer:') + 1].startswith('  # sd2-base-256.yaml: lr: 0.0001, weight_decay: 0.01, betas: [0.9, 0.999]')
    assert '  # default: price_per_encoder_hour: null' in lines
    assert any('cat: a cat}' in line and '# [sd2-base-256.yaml, command line] The prompts' in line for line in lines)
    assert lines[-1] == f'# verdict: {path} is sound for 8 GPUs'


def test_check_says_how_to_get_data_and_exits_with_2():
    result = run_python('-m', 'diffusion.check', 'yamls/sd2-base-256.yaml', code=2)
    assert 'data.streams.train: has no data' in result.stderr
    assert 'python -m data_prep.convert' in result.stderr
    assert 'data.kind=synthetic' in result.stderr
    run_python('-m', 'diffusion.check', 'yamls/sd2-base-256.yaml', '--gpus', 'many', code=2)
    assert 'is not a number of processes' in run_python('-m', 'diffusion.check', 'yamls/sd2-base-256.yaml', *SYNTHETIC, code=2, WORLD_SIZE='x').stderr
    run_here('diffusion.check', '--gpus=8', BASE, *SYNTHETIC)


@pytest.mark.parametrize(
    ('text', 'said'),
    [
        ('model: ' + '[' * 3_000 + ']' * 3_000, 'nested more than 30 deep'),
        ('model: ' + '{a: ' * 3_000 + '1' + '}' * 3_000, 'nested more than 30 deep'),
        ('seed: ' + '1' * 5_000, 'more digits than Python reads'),
        ('3', 'expected a mapping of keys to values, this file holds a int'),
    ],
    ids=['lists', 'mappings', 'digits', 'number'],
)
def test_hostile_yaml_is_an_error_of_the_recipe(tmp_path, text, said):
    path = tmp_path / 'recipe.yaml'
    path.write_text(text)
    with pytest.raises(RecipeError, match=said):
        load_recipe(path)
    with pytest.raises(RecipeError, match=f'^checkpoint: 1 error\n.*{said}'):
        recipe_from_yaml(text, 'checkpoint')
    if ':' in text:
        with pytest.raises(RecipeError, match=said):
            load_recipe(REPOSITORY / 'yamls/sd2-base-256.yaml', [text.replace(': ', '=', 1)])


def test_a_text_that_begins_like_a_number_is_a_text():
    """A digest may begin so, and was once taken for a number of more digits than Python reads."""
    assert read_yaml('a: 2790e9a69c5d\nb: 1e4\nc: -.5e-3\nd: 1e4 images') == {'a': '2790e9a69c5d', 'b': 1e4, 'c': -0.5e-3, 'd': '1e4 images'}
