"""JSON files that a kill, a full disk or a stranger has damaged: a message with the file and the remedy, or as if the file were not there."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from diffusion.autoencoding import exporting
from diffusion.checkpoints import initial, model_card
from diffusion.contracts.errors import CheckpointError, DataError, EncoderError
from diffusion.evaluation.job import models, reconstructing
from diffusion.finetuning import prepare

DAMAGED = ['', '[1]', '{', '"a"', '[' * 100_000, '\xff', '9' * 5000]
RECIPE = SimpleNamespace(checkpoint=SimpleNamespace(folder='checkpoints'), run_folder='run')
TRAINER = SimpleNamespace(state=SimpleNamespace(timestamp=SimpleNamespace(batch=SimpleNamespace(value=1))))


def begun_with(folder: Path) -> None:
    prepare._refuse_if_begun(RECIPE, 'data.streams.photos', folder, {})


@pytest.mark.parametrize('content', DAMAGED, ids=range(len(DAMAGED)))
@pytest.mark.parametrize(
    ('name', 'read', 'error', 'remedy'),
    [
        ('ingredients.json', begun_with, DataError, 'to have it made again'),
        ('export.json', lambda folder: exporting.export(TRAINER, RECIPE, folder), CheckpointError, 'to have it written again'),
        ('scheduler_config.json', lambda folder: initial._json(folder / 'scheduler_config.json'), CheckpointError, 'download or export'),
        ('config.json', reconstructing._subfolder, EncoderError, 'download or export'),
        ('model.json', lambda folder: models._exported(Path('other'), folder), CheckpointError, 'name another OUT'),
    ],
)
def test_a_message_names_the_file_and_the_remedy(name, read, error, remedy, content, tmp_path, monkeypatch):
    (tmp_path / name).write_text(content, encoding='latin-1')
    monkeypatch.setattr(prepare, 'batches_of', lambda names: [1])  # a run that has begun
    with pytest.raises(error, match=f'{tmp_path}/{name}: .*{remedy}') as raised:
        read(tmp_path)
    assert len(str(raised.value).splitlines()) == 1


@pytest.mark.parametrize('content', [*DAMAGED, '{"price": 3}', '{"price": {"dollars": "3", "name": "x"}}', '{"device": ["a"]}', '{"num_gpus": null}'])
def test_a_model_card_leaves_out_what_the_environment_does_not_say(content, tmp_path):
    (tmp_path / 'environment.json').write_text(content, encoding='latin-1')
    assert model_card._environment(SimpleNamespace(run_folder=tmp_path), Path('nowhere/checkpoints/x.pt')) == {}
    (tmp_path / 'environment.json').write_text('{"price": {"dollars": 3, "name": "x"}, "device": "CPU", "num_gpus": 1, "more": 1}')
    assert model_card._environment(SimpleNamespace(run_folder=tmp_path), Path('x/y/z.pt'))['price'] == {'dollars': 3, 'name': 'x'}


@pytest.mark.parametrize('content', [*DAMAGED, '{}', '{"shards": 1}', '{"shards": [1]}', '{"shards": [{"raw_data": {"basename": 1, "bytes": 2}}]}'])
def test_photos_with_a_damaged_index_are_prepared_again(content, tmp_path):
    (tmp_path / 'index.json').write_text(content, encoding='latin-1')
    assert not prepare._has_all_shards(tmp_path)
