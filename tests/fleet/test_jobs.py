"""The contract of a job: what is refused, and what arrives in the recipe."""

import os

import pytest
import yaml

from diffusion.contracts.errors import InputError
from diffusion.recipe import load_recipe
from diffusion.recipe.keys import known_paths
from diffusion.recipe.schema import Recipe
from fleet.jobs.checking import ALLOWED, LARGEST_OVERRIDES, check_job, judgement_key, override_of, recipe_digests, recipe_path
from fleet.jobs.spec import JobError, JobSpec, load_spec, spec_of
from tests.conftest import REPOSITORY

INPUT = {'url': 's3://bucket/a.tar', 'sha256': 'a' * 64, 'bytes': 10}
JOB = {'recipe': 'yamls/dreambooth-sdxl-lora.yaml', 'inputs': {'subject': INPUT}}


def spec(**keys):
    return spec_of({**JOB, **keys}, 'line 3')


def refused(**keys):
    """The mistakes in a job."""
    with pytest.raises(JobError) as caught:
        check_job(spec(**keys), 'line 3')
    return caught.value.errors


def test_a_job_fits_its_recipe():
    checked = check_job(spec(overrides={'seed': 3, 'train.duration': '1000ba', 'optimizer.lr': 2e-4}), 'line 3')
    assert (checked.recipe.seed, checked.recipe.optimizer.lr, checked.num_steps) == (3, 2e-4, 1000)
    assert checked.recipe.data.streams['subject'].photos.folder == 'inputs/subject'
    assert check_job(spec(recipe='dreambooth-sd2-lora.yaml'), 'x').num_steps == 800


def test_a_duration_fits_into_the_database():
    assert check_job(spec(overrides={'train.duration': '1000000000ba'}), 'line 3').num_steps == 10**9
    assert 'at most 1,000,000,000 batches' in refused(overrides={'train.duration': '1000000001ba'})[0]
    assert 'at most 1,000,000,000 batches' in refused(overrides={'train.duration': '9' * 4000 + 'ba'})[0]


def test_a_base_model_takes_the_place_of_the_recipes():
    encoders = check_job(spec(inputs={'subject': INPUT, 'base': INPUT}), 'line 3').recipe.model.encoders
    assert (encoders.source, encoders.revision) == ('inputs/base', None)


def test_all_mistakes_come_at_once():
    with pytest.raises(JobError) as caught:
        spec(recipes='x', priority='high', inputs={'subject': {**INPUT, 'bytes': -1}})
    said = '\n'.join(caught.value.errors)
    assert "did you mean 'recipe'" in said
    assert 'priority' in said
    assert 'inputs.subject.bytes' in said


@pytest.mark.parametrize(
    ('keys', 'said'),
    [
        ({'name': '../timber'}, 'letters, digits'),
        ({'name': 'a b'}, 'letters, digits'),
        ({'inputs': {'../x': INPUT}}, 'letters, digits'),
        ({'inputs': {'a=b': INPUT}}, 'letters, digits'),
        ({'inputs': {'subject': {**INPUT, 'sha256': 'A' * 64}}}, '64 hex digits'),
        ({'inputs': {'subject': {**INPUT, 'sha256': 'a' * 63}}}, '64 hex digits'),
        ({'inputs': {'subject': {**INPUT, 'bytes': 6 << 30}}}, 'bytes'),
        ({'notify': {'webhook': 'ftp://host'}}, 'https://'),
        ({'validation': {'prompts': ['x'] * 65}}, '65 prompts, at most 64'),
        ({'validation': {'prompts': ['x' * 5000]}}, '4,096 characters'),
        ({'validation': {'prompts': ['\0']}}, 'NUL'),
        ({'overrides': {'data.streams.subject.photos.caption': '\ud800'}}, 'half of a character'),
        ({'overrides': {'seed': {'a': 1}}}, 'overrides.seed'),
        ({'limits': {'attempts': 0}}, 'limits.attempts'),
        ({'base': 'other.yaml'}, 'base'),
    ],
)
def test_what_a_job_says_by_itself_is_checked(keys, said):
    with pytest.raises(JobError, match=said):
        spec(**keys)


def test_a_file_may_not_be_based_on_another(tmp_path):
    (tmp_path / 'other.yaml').write_text(yaml.safe_dump(JOB))
    (tmp_path / 'job.yaml').write_text('base: other.yaml\nrecipe: x.yaml\n')
    with pytest.raises(JobError, match='base'):
        load_spec(tmp_path / 'job.yaml')


@pytest.mark.parametrize(
    'name', ['../setup.yaml', 'yamls/../../etc/x.yaml', '/etc/passwd', '.hidden.yaml', 'yamls/yamls/shapes.yaml', 'shapes.yaml\n', 'shapes']
)
def test_a_recipe_is_one_of_the_folder(name):
    with pytest.raises(InputError, match='there are'):
        recipe_path(name)
    assert refused(recipe=name)


def test_a_similar_recipe_is_named():
    assert "did you mean 'dreambooth-sdxl-lora.yaml'" in refused(recipe='dreambooth-sdxl-lor.yaml')[0]


@pytest.mark.parametrize(
    'key',
    [
        'run_folder', 'load_path', 'checkpoint.folder', 'checkpoint.keep', 'log.to', 'log.project', 'name', 'model.encoders.source', 'model.network', 'model',
        'data.streams.subject.photos.folder', 'data.streams.subject.photos', 'data.streams.subject.local', 'data.streams.subject.remote',
        'data.streams.class.drawn.cache', 'data.streams.a=b.proportion', 'data.streams.a b.proportion', 'data.streams.a.b.proportion',
        'data.streams..proportion', 'data.streams.a\n.proportion', 'seed=1 load_path', 'seed ', 'Seed', '', '.', 'train.compile', 'cost.gpu', 'data.workers',
        'data.encoders.ray.address', 'eval.samples.prompts',
    ],
)  # fmt: skip
def test_what_is_not_listed_may_not_be_set(key):
    assert any('owners may not set it' in error for error in refused(overrides={key: 1}))


def test_the_list_has_no_places():
    """Nothing that is a path, an address or an account in the schema, and nothing that the schema does not have."""
    known = {'.'.join(path) for path in known_paths(Recipe)}
    for allowed in ALLOWED:
        assert not any(word in allowed for word in ('folder', 'path', 'cache', 'remote', 'local', 'source', 'address', 'project'))
        if '*' not in allowed:
            assert allowed in known, allowed


def test_a_whole_stream_may_only_be_left_out():
    assert check_job(spec(overrides={'data.streams.class': None, 'data.streams.subject.proportion': None}), 'x').recipe.data.streams['class'] is None
    assert 'only be left out' in refused(overrides={'data.streams.class': 'x'})[0]


def test_wrong_values_are_the_recipe_loaders_errors():
    errors = refused(overrides={'optimizer.lr': 'fast', 'train.duration': '3 apples'})
    assert any(error.startswith('optimizer.lr') for error in errors)
    assert any(error.startswith('train.duration') for error in errors)


def test_inputs_have_their_places():
    assert 'inputs: subject is missing' in refused(inputs={})[0]
    assert 'inputs: base is missing: the model of shapes-lora.yaml is runs/shapes/export' in refused(recipe='shapes-lora.yaml')[0]
    assert 'inputs: photos is none of this recipe; it takes subject, base' in refused(inputs={'subject': INPUT, 'photos': INPUT})[0]


def test_data_in_storage_needs_keys_that_no_worker_has(tmp_path):
    stored = {'base': str(REPOSITORY / 'yamls/sd2-base-256.yaml'), 'data': {'streams': {'train': {'remote': 's3://bucket/latents'}}}}
    (tmp_path / 'stored.yaml').write_text(yaml.safe_dump(stored))
    with pytest.raises(JobError, match='stream train is read from storage, whose keys a worker does not have'):
        check_job(spec(recipe='stored.yaml', inputs={}), 'line 3', tmp_path)


def test_too_much_for_a_command_line_is_refused():
    assert 'fit into a command line' in refused(overrides={'data.streams.subject.photos.caption': 'x' * LARGEST_OVERRIDES})[0]


@pytest.mark.parametrize(
    'caption',
    [
        'plain', 'a "sks" dog', "it's", 'two\nlines\r\n\ttab', '$HOME and ${HOME_}'.replace('${HOME_}', '$HOME'), '~', '~root', 'back\\slash \\u0041 \\n', '', ' ',
        'null', 'true', '7', '1e-3', '- list', 'a: b', '#no comment', '{a: 1}', '[1]', '*alias', '&anchor', '!!python/object', '%', '@x', '`x`', 'a=b',
        'é中😀', '\x7f', '\x01', '\x85', '\u2028\u2029', '\ufeff', '\ufffe', '日本語 ' * 100,
    ],
)  # fmt: skip
def test_captions_arrive_unchanged(caption):
    word = override_of('data.streams.subject.photos.caption', caption)
    assert word.isascii()
    assert word.isprintable()
    assert os.path.expandvars(os.path.expanduser(word)) == word  # Composer's launcher does so with each argument
    recipe = load_recipe(REPOSITORY / 'yamls/dreambooth-sd2-lora.yaml', [word], rules=())
    assert recipe.data.streams['subject'].photos.caption == caption


def test_other_values_arrive_unchanged():
    for key, value in (('optimizer.lr', 1e-7), ('seed', 2**31), ('data.flip', True), ('ema.half_life', None), ('optimizer.betas', [0.9, 0.99])):
        recipe = load_recipe(REPOSITORY / 'yamls/dreambooth-sd2-lora.yaml', [override_of(key, value)], rules=())
        section, _, name = key.rpartition('.')
        there = getattr(getattr(recipe, section) if section else recipe, name)
        assert (list(there) if isinstance(value, list) else there) == value


def test_what_was_checked_is_what_is_stored():
    stored = spec(overrides={'seed': 3}).to_json()
    assert spec_of(yaml.safe_load(stored), 'database') == spec(overrides={'seed': 3})
    assert isinstance(spec(), JobSpec)


@pytest.mark.parametrize(
    ('overrides', 'said'),
    [
        ({'train.duration': '1ep'}, 'train.duration: 1ep; a job of a fleet says in batches'),
        ({'train.duration': '0ba'}, "train.duration: '0ba' is not a duration"),
        ({'data.streams.class.drawn.num_images': 10**9}, 'data.streams.class.drawn.num_images: 1,000,000,000; a machine draws 10,000 at most'),
    ],
)
def test_what_no_machine_would_end_is_refused(overrides, said):
    assert any(error.startswith(said) for error in refused(overrides=overrides)), refused(overrides=overrides)


@pytest.mark.parametrize(
    'content',
    [
        {**JOB, 'overrides': {'data.streams.class.drawn.prompts': ['dog'] * 16_000}},
        {**JOB, 'overrides': {'optimizer.betas': [[[[0] * 10] * 10] * 10] * 10}},
        {**JOB, 'validation': {'prompts': ['dog'] * 100_000}},
        {'x': 1, 'y': {str(i): {} for i in range(2000)}},
    ],
)
def test_limits_come_before_anything_walks_a_job(content, monkeypatch):
    """A job of 80 kB, 16,000 texts in an override, took 3.5 to 6 s of the service."""
    monkeypatch.setattr('fleet.jobs.spec.merge', None)
    with pytest.raises(JobError, match='line 3: more than 1,000 keys and values'):
        spec_of(content, 'line 3')


def test_overrides_that_are_too_long_are_not_read(monkeypatch):
    monkeypatch.setattr('fleet.jobs.checking.merged_recipe', None)
    with pytest.raises(JobError, match=f'overrides: 7.{{6}} characters; at most {LARGEST_OVERRIDES:,} fit into a command line'):
        check_job(spec(overrides={'data.streams.subject.photos.caption': 'x' * 700_000}), 'line 3')


def judged_as_one(key, *values):
    return len({judgement_key(spec(overrides={key: value})) for value in values}) == 1


def test_values_that_only_have_a_type_and_a_range_make_no_new_judgement():
    """Each job that differed from all others cost 0.2 to 0.36 s."""
    caption, prompts = 'data.streams.subject.photos.caption', 'data.streams.class.drawn.prompts'
    assert judged_as_one('seed', 0, 1, 2**31)
    assert judged_as_one(caption, 'a photo of sks dog', 'un chien très joli 犬', '#1: "quoted"')
    assert judged_as_one(prompts, ['a', 'b'], ['c', 'd'])
    for key, good, others in (
        ('seed', 0, (-1, 2**80, True, '1', 1.0, None)),
        (caption, 'a', ('', ' ', 'x' * 4097, 1, None, ['a'])),
        (prompts, ['a'], ([], ['a', ''], 'a', [1])),
        ('optimizer.lr', 1e-4, (2e-4,)),
    ):
        assert not any(judged_as_one(key, good, other) for other in others)


def test_a_recipes_digest_is_of_what_it_says_and_what_it_is_based_on(tmp_path):
    (tmp_path / 'base.yaml').write_text('seed: 1\nname: a\n')
    (tmp_path / 'own.yaml').write_text('base: base.yaml\nseed: 2\n')
    before = recipe_digests(tmp_path)
    assert sorted(before) == ['base.yaml', 'own.yaml']
    for number, (text, is_same) in enumerate([('name: a  # a comment\nseed: 1\n', True), ('seed: 1\nname: b\n', False), ('seed: [', False)]):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / 'base.yaml').write_text(text)
        (folder / 'own.yaml').write_text('base: base.yaml\nseed: 2\n')
        assert (recipe_digests(folder).get('own.yaml') == before['own.yaml']) == is_same
