"""No file that is read can run code, and no secret of the environment is written anywhere."""

import ast
import contextlib
import subprocess
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import composer
import pytest

from diffusion.common import object_storage, storage
from diffusion.common.text import carries_credentials, redacted
from diffusion.recipe import RecipeError, load_recipe
from diffusion.training.builder import build_trainer
from diffusion.training.sharding import parallelism_config
from tests.common.s3_server import BUCKET
from tests.conftest import REPOSITORY
from tests.faults.driver import YAML, train

# (file, call): why it may be there.
EXCEPTIONS = {
    ('diffusion/encoders/pretrained.py', 'kind.from_pretrained'): 'of a class that the caller names, after read_configs',
    ('diffusion/encoders/pretrained.py', 'kind.load_config'): 'the same',
    ('diffusion/encoders/random_encoders.py', 'kind.load_config'): 'the same',
    ('data_prep/recaptioning/captioner.py', 'transformers.AutoProcessor.from_pretrained'): 'the same',
    ('data_prep/recaptioning/captioner.py', 'transformers.GenerationConfig.from_pretrained'): 'the same',
    ('tests/encoders/test_t5.py', 'pickle.loads'): 'what it has pickled the moment before: tokenizers travel to worker processes',
    ('tests/data_prep/sources/test_sources.py', 'pickle.loads'): 'what it has pickled the moment before: readers travel to worker processes',
    ('tests/faults/test_checkpoints.py', 'torch.load'): 'stock Composer loads the payload that ours refuses, or checkpoints that the test wrote',
    ('tests/faults/test_non_finite.py', 'torch.load'): "what stock Composer's saver wrote in the same test",
}


def dangerous_calls(source: str, product: bool = True) -> Iterator[str]:
    """Full names of calls by which a file could run code or reach a parser that nobody meant."""
    tree = ast.parse(source)
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name: f'{node.module}.{alias.name}' for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            first, _, rest = ast.unparse(node.func).partition('.')
            name = names.get(first, first) + (f'.{rest}' if rest else '')
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            loader = given.get('Loader', ast.unparse(node.args[1]) if len(node.args) > 1 else '')
            if (
                given.get('trust_remote_code', 'False') != 'False'
                or (name == 'torch.load' and given.get('weights_only') != 'True')
                or name.removeprefix('_').startswith(
                    ('pickle.load', 'pickle.Unpickler', 'dill.', 'cloudpickle.', 'joblib.load', 'marshal.load', 'shelve.')
                )
                or name in ('yaml.unsafe_load', 'yaml.full_load', 'eval', 'exec', 'os.system', 'os.popen')
                or (name == 'yaml.load' and 'Safe' not in loader)
                or given.get('allow_pickle', 'False') != 'False'
                or given.get('shell', 'False') != 'False'
                or (product and name == 'PIL.Image.open' and 'formats' not in given)  # tests open what they have drawn
                or (product and rest.endswith(('from_pretrained', 'load_config')))  # reads what a model folder names
            ):
                yield name


@pytest.mark.parametrize(
    'source',
    [
        'import torch\ntorch.load(path)',
        'from torch import load as read\nread(path, weights_only=False)',
        'import pickle as p\np.loads(content)',
        'from pickle import Unpickler\nreader = Unpickler(file)',
        'import yaml\nyaml.load(text)',
        'import yaml\nyaml.load(text, Loader=yaml.Loader)',
        'import numpy as np\nnp.load(path, allow_pickle=True)',
        'eval(text)',
        'exec(text)',
        'from PIL import Image\nImage.open(path)',
        'AutoModel.from_pretrained(name, trust_remote_code=True)',
        'kind.from_pretrained(name)',
        'import subprocess\nsubprocess.run(text, shell=True)',
    ],
)
def test_the_scan_finds_what_it_looks_for(source):
    assert len(list(dangerous_calls(source))) == 1


def test_the_scan_lets_the_safe_ones_pass():
    safe = (
        'import torch, yaml, numpy as np\nfrom PIL import Image\ntorch.load(path, weights_only=True)\nyaml.load(text, Loader=yaml.SafeLoader)\n'
        'yaml.safe_load(text)\nnp.load(path)\nnp.load(path, allow_pickle=False)\nmodel.eval()\nImage.open(path, formats=("PNG",))\npickle.dumps(value)'
    )
    assert not list(dangerous_calls(safe))


def test_nothing_here_runs_code_from_a_file():
    tracked = subprocess.run(['git', 'ls-files', '-co', '--exclude-standard', '*.py'], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    found = set()
    for path in tracked.stdout.split():
        for call in dangerous_calls((REPOSITORY / path).read_text(), product=not path.startswith('tests/')):
            found.add((path, call))
    assert found == set(EXCEPTIONS)  # neither a new one, nor an exception that is not needed any more


# (file, call) in Composer 0.32.1: why no file of a run reaches it. Its PR 3937, unreleased, changes the first two.
COMPOSERS = {
    ('utils/checkpoint.py', 'torch.load'): 'diffusion/checkpoints/completeness.py replaces the function that calls it',
    ('checkpoint/load.py', 'pickle.load'): 'nothing imports composer.checkpoint',
    ('core/state.py', 'eval'): 'refuse_incomplete: of algorithms that a file names and the run lacks',
    ('models/huggingface.py', 'transformers.AutoTokenizer.from_pretrained'): 'HuggingFaceModel is not used',
    ('models/huggingface.py', 'transformers.AutoConfig.from_pretrained'): 'the same',
}


def test_composer_unpickles_only_where_we_know_it():
    package = Path(composer.__file__).parent
    sources = {str(path.relative_to(package)): path.read_text() for path in package.rglob('*.py')}
    assert {(file, call) for file, source in sources.items() for call in dangerous_calls(source)} == set(COMPOSERS)
    ours = {
        str(path): path.read_text() for folder in ('diffusion', 'data_prep', 'fleet', 'benchmarks') for path in (REPOSITORY / folder).rglob('*.py')
    }
    for file, source in {**sources, **ours}.items():
        assert file.startswith('checkpoint/') or 'composer.checkpoint' not in source, file
        assert file in sources or 'HuggingFaceModel' not in source, file


@pytest.mark.parametrize('sharding', ['ddp', 'zero2', 'hsdp'])
def test_composer_never_reads_a_sharded_checkpoint(sharding):
    """Its metadata would be unpickled by torch.distributed.checkpoint, past safe_loading; `full` is one file instead."""
    assert parallelism_config(sharding, 'bf16', 4, 2)['fsdp'].state_dict_type == 'full'


SECRET_URLS = [
    'https://user:canary@host/weights.pt',
    'https://canary@host/weights.pt',
    's3://key:canary@bucket/folder',
    'https://bucket.s3.amazonaws.com/a.pt?X-Amz-Credential=canary&X-Amz-Signature=canary',
    'https://storage.googleapis.com/b/a.pt?x-goog-signature=canary',
    'https://account.blob.core.windows.net/a.pt?sv=2024&sig=canary',
    'https://host/a.pt?token=canary',
]


@pytest.mark.parametrize('url', SECRET_URLS)
def test_a_recipe_with_a_secret_is_refused_without_repeating_it(url, overrides):
    with pytest.raises(RecipeError, match='load_path: holds a password, key or signature') as refused:
        load_recipe(REPOSITORY / YAML, [*overrides, f"load_path='{url}'", f"model.encoders.source='{url}'"])
    assert 'AWS_SECRET_ACCESS_KEY' in str(refused.value)
    assert 'canary' not in str(refused.value)
    assert 'canary' not in redacted(url)


def test_nor_may_a_recipe_fetch_one_from_the_environment(overrides, monkeypatch):
    monkeypatch.setenv('HF_TOKEN', 'canary')
    with pytest.raises(RecipeError, match='name: .* is not read'):
        load_recipe(REPOSITORY / YAML, [*overrides, 'name=${oc.env:HF_TOKEN}'])


@pytest.mark.parametrize(
    'url', ['oci://bucket@namespace/folder', 's3://bucket/a:b@c', 'https://host:8080/a.pt?version=2', 'runs/a@b', 'a: key=value']
)
def test_other_values_pass(url):
    assert not carries_credentials(url)
    assert redacted(url) == url


def test_errors_of_storage_do_not_show_keys(s3, monkeypatch):
    for name in ('AWS_ACCESS_KEY_ID', 'AWS_SECRET_ACCESS_KEY', 'AWS_SESSION_TOKEN'):
        monkeypatch.setenv(name, f'canary-{name}')
    object_storage.client_of.cache_clear()
    for url in ('s3://key:canary@bucket/folder', 's3://bucket/folder?X-Amz-Signature=canary'):
        with pytest.raises(storage.StorageRefusal, match='holds credentials') as failed:
            storage.open_folder(url)
        assert 'canary' not in str(failed.value)
    with pytest.raises(storage.StorageError) as failed:
        storage.open_folder('s3://no-such-bucket/folder').files()
    assert 'canary' not in ''.join(traceback.format_exception(failed.value))


CANARIES = {
    name: f'canary-{name.lower()}-5ecre7'
    for name in ('AWS_SECRET_ACCESS_KEY', 'AWS_SESSION_TOKEN', 'WANDB_API_KEY', 'HF_TOKEN', 'GCS_KEY', 'GCS_SECRET', 'OPENAI_API_KEY', 'MY_PASSWORD')
}


def files_with_canaries(folder: Path) -> dict[str, list[str]]:
    """The names of the secrets whose values are somewhere in a file, by file."""
    found = {}
    for path in folder.rglob('*'):
        if path.is_file():
            content = path.read_bytes()
            if leaked := [name for name, value in CANARIES.items() if value.encode() in content]:
                found[str(path.relative_to(folder))] = leaked
    return found


def command_lines() -> str:
    """Of all processes, as anyone on the machine can read them."""
    lines = []
    for path in Path('/proc').glob('[0-9]*/cmdline'):
        with contextlib.suppress(OSError):  # it has ended
            lines.append(path.read_bytes().replace(b'\0', b' ').decode(errors='replace'))
    return '\n'.join(lines)


def test_a_run_writes_no_secret_of_its_environment(overrides, tmp_path, monkeypatch, capfd):
    wandb = pytest.importorskip('wandb')
    for name, value in CANARIES.items():
        monkeypatch.setenv(name, value)
    trainer = build_trainer(load_recipe(REPOSITORY / YAML, [*overrides, 'log.to=[wandb]', 'log.project=project', 'train.duration=2ba']))
    assert wandb.run.settings.disable_git  # the URL of a remote may hold a token
    assert wandb.run.settings.disable_code
    trainer.fit()
    trainer.close()
    assert list((tmp_path / 'run/wandb').glob('offline-run-*/run-*.wandb'))
    assert files_with_canaries(tmp_path) == {}
    assert 'canary' not in ''.join(capfd.readouterr())


@pytest.mark.long
def test_secrets_of_the_environment_are_written_nowhere(latents, overrides, tmp_path, s3):
    """A run with all that writes: W&B, sample grids, evaluation, checkpoints on a disk and in object storage, workers."""
    wanted = [
        *overrides, 'log.to=[wandb]', 'log.project=project', 'log.samples.every=1ba', 'log.samples.steps=2', 'data.kind=latents', 'data.workers=1', 'eval.every=1ba',
        f'data.streams.train.local={latents}', f'eval.streams.val.local={latents}', 'eval.batches=1', 'checkpoint.every=1ba', 'train.duration=3ba',
    ]  # fmt: skip
    seen = ''
    with train([*wanted, f'checkpoint.folder=s3://{BUCKET}/run'], **CANARIES) as process:
        while process.code() is None:
            seen += command_lines()
            time.sleep(0.2)
        output = process.wait()
    client, remote = s3.client(), tmp_path / 'remote'
    keys = [item['Key'] for item in client.list_objects_v2(Bucket=BUCKET)['Contents']]
    assert any(key.endswith('.pt') for key in keys)
    for number, key in enumerate(keys):
        remote.mkdir(exist_ok=True)
        client.download_file(BUCKET, key, str(remote / str(number)))
    with train([*wanted, f'run_folder={tmp_path}/local'], **CANARIES) as process:
        output += process.wait()
    assert list((tmp_path / 'local/wandb').glob('offline-run-*/run-*.wandb'))
    for name in ('recipe.yaml', 'environment.json', 'log.jsonl', 'events.jsonl', 'checkpoints'):
        assert (tmp_path / 'local' / name).exists(), name
    assert files_with_canaries(tmp_path) == {}
    for text in (output, seen):
        assert 'train.py' in seen
        assert [name for name, value in CANARIES.items() if value in text] == []


def test_the_search_for_canaries_finds_them(tmp_path):
    (tmp_path / 'a').mkdir()
    (tmp_path / 'a/b.bin').write_bytes(b'\0' + CANARIES['HF_TOKEN'].encode() + b'\0')
    assert files_with_canaries(tmp_path) == {'a/b.bin': ['HF_TOKEN']}
