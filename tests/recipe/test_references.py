"""A recipe is data: it refers to its own keys and to nothing else, and holds no secrets."""

import pytest
import yaml

from benchmarks.sweeping.loading import load_sweep
from diffusion.common.text import carries_credentials, redacted
from diffusion.contracts.errors import InputError
from diffusion.cost.assumptions import load_assumptions
from diffusion.recipe import RecipeError, load_recipe, recipe_from_yaml, to_dict, to_yaml
from tests.conftest import REPOSITORY

BASE = REPOSITORY / 'yamls/sd2-base-256.yaml'
SYNTHETIC = ['data.kind=synthetic']
SECRET = 'canary-5ecre7'

# Ways to reach the environment, or any other resolver, that OmegaConf, with which recipes were once read, has or had.
WAYS = [
    '${oc.env:PLANTED}',
    '${oc.env:"PLANTED"}',
    "${oc.env:'PLANTED'}",
    '${ oc.env : PLANTED }',
    '${oc.env:PLANTED,none}',
    '${oc.env:MISSING_ONE,${oc.env:PLANTED}}',
    '${oc.env:${log.samples.prompts.fox}}',
    '${oc.env:PLA${empty}NTED}',
    '${oc.decode:${oc.env:PLANTED}}',
    '${oc.select:nothing,${oc.env:PLANTED}}',
    '${oc.create:{a:${oc.env:PLANTED}}}',
    '${oc.dict.values:log.samples.prompts}',
    '${oc.deprecated:seed}',
    '${planted:}',
    '${planted:x}',
    '${${log.samples.prompts.fox}}',
    '${oc.${log.samples.prompts.fox}:PLANTED}',
    'a ${name} and ${oc.env:PLANTED}',
    '\\${oc.env:PLANTED}',
    '\\\\${oc.env:PLANTED}',
    '$${oc.env:PLANTED}',
    '${.run_folder}',
    '${..name}',
    '${data[kind]}',
    '${}',
    '${name',
]


@pytest.fixture(autouse=True)
def planted(monkeypatch):
    monkeypatch.setenv('PLANTED', SECRET)


def test_nothing_reaches_the_environment():
    prompts = {f'way{number:02}': way for number, way in enumerate(WAYS)} | {'fox': 'PLANTED', 'sound': 'a ${log.samples.prompts.fox}'}
    with pytest.raises(RecipeError) as refused:
        recipe_from_yaml(yaml.safe_dump({'log': {'samples': {'prompts': prompts}}}), 'checkpoint')  # which may be a stranger's
    assert SECRET not in str(refused.value)
    told = [error for error in refused.value.errors if 'nothing is taken from the environment' in error]
    assert [error.partition(': ')[0].rpartition('way')[2] for error in told] == [f'{number:02}' for number in range(len(WAYS))]
    assert all(way in error for way, error in zip(WAYS, told, strict=True))  # shows what it does not read
    assert not any('prompts.sound' in error for error in refused.value.errors)


def test_by_whatever_way_a_recipe_is_read(tmp_path):
    (tmp_path / 'below.yaml').write_text(f'base: {BASE}\nname: {WAYS[1]}\n')
    (tmp_path / 'above.yaml').write_text('base: below.yaml\nname: harmless\n')
    for path, overrides in ((tmp_path / 'above.yaml', []), (BASE, [f'name={WAYS[1]}']), (BASE, [f"name=['{WAYS[1]}']"])):
        with pytest.raises(RecipeError, match='name: .*nothing is taken from the environment') as refused:
            load_recipe(path, [*SYNTHETIC, *overrides])
        assert SECRET not in str(refused.value)


def test_nor_do_references_that_are_put_together_of_harmless_parts(tmp_path):
    prompts = {'a': '$', 'b': '{oc.env:PLANTED}', 'c': '${log.samples.prompts.a}${log.samples.prompts.b}'}
    overrides = [f"log.samples.prompts.{name}='{text}'" for name, text in prompts.items()]
    with pytest.raises(RecipeError, match='which is another reference') as refused:
        load_recipe(BASE, [*SYNTHETIC, *overrides])
    assert SECRET not in str(refused.value)


def test_in_the_place_of_anything_it_is_refused():
    for content in ({'base': WAYS[1]}, {'seed': WAYS[1]}, {'data': WAYS[1]}, {'optimizer': {'betas': [WAYS[1]]}}, {WAYS[1]: 1}):
        with pytest.raises(RecipeError) as refused:
            recipe_from_yaml(yaml.safe_dump(content), 'checkpoint')
        assert SECRET not in str(refused.value)


def test_sweeps_and_assumptions_neither(tmp_path):
    for section in ({'name': WAYS[1]}, {'set': {'name': WAYS[1]}}, {'points': [{'name': WAYS[1]}]}, {'grid': {'name': [WAYS[1]]}}):
        (tmp_path / 'sweep.yaml').write_text(yaml.safe_dump({'recipe': str(REPOSITORY / 'yamls/shapes.yaml'), **section}))
        with pytest.raises(RecipeError, match='is not read') as refused:
            load_sweep(tmp_path / 'sweep.yaml')
        assert SECRET not in str(refused.value)
    with pytest.raises(InputError, match='is not read') as wrong:
        load_assumptions(overrides=[f'work.person={WAYS[1]}'])
    assert SECRET not in str(wrong.value)


def test_keys_of_the_recipe_are_replaced_with_their_types(tmp_path):
    overrides = [
        'batch.micro_size=${batch.global_size}',
        "name='${data.kind}-${seed}'",
        'eval.every=5ba',
        'eval.streams=${data.streams}',
        'data.streams.train.local=x',
    ]
    recipe = load_recipe(BASE, [*SYNTHETIC, *overrides])
    assert (recipe.batch.micro_size, recipe.name) == (2048, 'synthetic-17')
    assert recipe.checkpoint.folder == 'runs/synthetic-17/checkpoints'  # by way of run_folder, with the name as it is in the end
    assert recipe.eval.streams['train'].local == 'x'
    assert '${' not in to_yaml(recipe)
    assert recipe_from_yaml(to_yaml(recipe), 'again') == recipe
    assert to_dict(recipe)['run_folder'] == 'runs/synthetic-17'


@pytest.mark.parametrize(
    ('overrides', 'expected'),
    [
        (['run_folder=${nowhere.at.all}'], "run_folder: ${nowhere.at.all} leads nowhere: there is no key 'nowhere.at.all'"),
        (['name=${run_folder}'], 'name: ${run_folder} leads back to itself by way of run_folder, name'),
        (['checkpoint.folder=${load_path}/x'], 'checkpoint.folder: ${load_path} is null, which cannot be a part of a text'),
        (['name=x-${batch}'], 'name: ${batch} is a section, which cannot be a part of a text'),
    ],
)
def test_a_reference_that_leads_nowhere_says_so(overrides, expected):
    with pytest.raises(RecipeError) as refused:
        load_recipe(BASE, [*SYNTHETIC, *overrides])
    assert any(error.startswith(expected) for error in refused.value.errors), refused.value


def test_a_few_lines_do_not_fill_the_memory(tmp_path):
    doubling = {f'p{number}': f'${{log.samples.prompts.p{number + 1}}}' * 2 for number in range(60)}
    with pytest.raises(RecipeError, match='more than 1,000 references'):
        recipe_from_yaml(yaml.safe_dump({'log': {'samples': {'prompts': {**doubling, 'p60': 'x'}}}}), 'x')
    aliases = 'name: [&a0 x, ' + ', '.join(f'&a{number + 1} [*a{number}, *a{number}]' for number in range(60)) + ']'
    for text, reason in ((aliases, 'aliases'), ('name: ' + '[' * 3000, 'nested more than'), ('seed: ' + '9' * 5000, 'more digits'), ('name: {', '')):
        with pytest.raises(RecipeError, match=f'cannot be read as YAML: .*{reason}'):
            recipe_from_yaml(text, 'x')


TOKENS = [
    'hf_' + 'aB3' * 11,
    'AKIA' + 'ABCDEFGH12345678',
    'ASIA' + 'ABCDEFGH12345678',
    'ghp_' + 'aB3' * 12,
    'github_pat_' + 'aB3' * 12,
    'glpat-' + 'aB3' * 7,
    'sk-' + 'aB3' * 10,
    'sk-proj-' + 'aB3' * 10,
    'xoxb-' + '1234567890-abcdef',
    'AIza' + 'aB3' * 12,
    'fleet-owner-' + 'aB3' * 14,
    'eyJhbGciOiJIUzI1NiJ9.' + 'eyJzdWIiOiIxMjM0NTY3ODkwIn0.abc',
    'https://user:pass' + 'word@host/x',
    'https://host/x?X-Amz-Signature=' + 'abc',
    '0123456789abcdef' * 2 + '01234567',  # W&B's keys of 40 hex digits
    '-----BEGIN RSA PRIVATE KEY-----' + '\nMIIE\n-----END RSA PRIVATE KEY-----',
]


@pytest.mark.parametrize('token', TOKENS)
def test_what_looks_like_a_credential_is_refused_and_not_repeated(token):
    content: dict = {'seed': token, 'data': {'streams': {'train': {'remote': token}}}, 'log': {'samples': {'prompts': {}}}}
    with pytest.raises(RecipeError) as refused:
        recipe_from_yaml(yaml.safe_dump(content), 'checkpoint')
    said = {error.partition(' (')[0] for error in refused.value.errors if ': missing' not in error}
    assert said == {f'{key}: holds a password, key or signature' for key in ('seed', 'data.streams.train.remote')}
    assert token not in str(refused.value)
    content['data']['streams']['train']['remote'] = content['seed'] = None
    content['log']['samples']['prompts'][token] = 'a fox'
    with pytest.raises(RecipeError) as refused:
        recipe_from_yaml(yaml.safe_dump(content), 'checkpoint')
    assert token not in str(refused.value)


@pytest.mark.parametrize('hiding', ['\x1b[31m{}', '\x1b]8;;x\x1b\\{}', 'x \x9b1m{}', '\x1bM{}', 'within'])
@pytest.mark.parametrize('token', [token for token in TOKENS if token[0] not in 'h0-'] + ['hf_' + 'aB3' * 11])
def test_escape_sequences_hide_no_credential(token, hiding):
    text = f'{token[:6]}\x1b[0m{token[6:]}' if hiding == 'within' else hiding.format(token)
    assert carries_credentials(text)
    assert redacted(f'said {text}').endswith('***')
    with pytest.raises(RecipeError, match='log.project: holds a password'):
        recipe_from_yaml(yaml.safe_dump({'log': {'project': text}}), 'checkpoint')
    assert redacted('\x1b[31mred\x1b[0m') == '\x1b[31mred\x1b[0m'  # files keep their colours


def test_what_is_no_credential_passes():
    for text in ('s3://bucket/AKIA/x', 'risk-averse-and-careful', 'a photograph of hf_internal', 'runs/sk-8', 'task-force-of-twenty-people', 'eyJ'):
        assert load_recipe(BASE, [*SYNTHETIC, f"log.samples.prompts.text='{text}'"]).log.samples.prompts['text'] == text
        assert redacted(text) == text
    assert len(load_recipe(BASE, SYNTHETIC).model.encoders.revision) == 40
