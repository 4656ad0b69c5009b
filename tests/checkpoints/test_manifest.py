import json

import pytest

from diffusion.checkpoints.manifest import CheckpointManifest, batches_of, file_of, find_damage
from tests.checkpoints.files import content_of, manifest, write_checkpoint


def test_it_says_everything_and_survives_the_trip():
    said = manifest(400, b'abc', data={'train': 'x'}, commit='abc')
    assert CheckpointManifest.parse(said.to_json(), 400) == said
    assert json.loads(said.to_json())['files']['ba00000400.pt']['bytes'] == 3
    later = {**json.loads(said.to_json()), 'field_of_a_later_version': 1}
    assert CheckpointManifest.parse(json.dumps(later), 400) == said


@pytest.mark.parametrize('keep', [0, 0.25, 0.5, 0.99])
def test_a_torn_one_is_refused(keep):
    text = manifest(4, b'abc').to_json()
    with pytest.raises(ValueError, match='damaged'):
        CheckpointManifest.parse(text[: int(keep * len(text))], 4)


def test_one_of_something_else_is_refused():
    with pytest.raises(ValueError, match='that of batch 4'):
        CheckpointManifest.parse(manifest(4).to_json(), 8)
    with pytest.raises(ValueError, match='damaged: files: Field required'):
        CheckpointManifest.parse('{}', 4)
    outside = json.loads(manifest(4).to_json())
    outside['files'] = {'../../etc/passwd': {'sha256': '', 'bytes': 0}}
    with pytest.raises(ValueError, match='passwd'):
        CheckpointManifest.parse(json.dumps(outside), 4)
    for nonsense in ('[]', '3', 'null', '\udcff'.encode(errors='surrogateescape')):
        with pytest.raises(ValueError, match='damaged'):
            CheckpointManifest.parse(nonsense, 4)


@pytest.mark.parametrize('text', ['[' * 100_000, '{"files":' * 100_000, '1' * 5_000], ids=['brackets', 'objects', 'digits'])
def test_a_hostile_one_is_damaged_too(text):
    with pytest.raises(ValueError, match='damaged'):
        CheckpointManifest.parse(text, 4)


@pytest.mark.parametrize(
    ('field', 'value'),
    [('files', []), ('data', 'x'), ('encoders', None), ('packages', 3), ('files', {'ba00000004.pt': {'sha256': '', 'bytes': float('inf')}})],
)
def test_a_field_of_another_kind_is_damage(field, value):
    with pytest.raises(ValueError, match='damaged'):
        CheckpointManifest.parse(json.dumps({**json.loads(manifest(4).to_json()), field: value}), 4)


def test_batches_are_read_off_names_of_ours_only():
    listing = [
        'ba00000020.json',
        'ba00000003.json',
        'ba00000003.pt',
        'ba123456789.json',
        'ba3-rank0.pt',
        'x/ba00000004.json',
        'latest.json',
        'ba7.json',
    ]
    assert batches_of(listing) == [3, 20, 123456789]
    assert batches_of(listing, 'pt') == [3]
    assert file_of(123456789) == 'ba123456789.pt'


def test_a_flaw_names_what_was_expected(tmp_path):
    path, expected = write_checkpoint(tmp_path, 4), manifest(4, content_of(4)).content
    assert find_damage(path, expected) is None
    assert 'No such file' in find_damage(tmp_path / 'none', expected)
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    assert expected.sha256 in find_damage(path, expected)
    path.write_bytes(data[:-1])
    assert find_damage(path, expected) == f'{len(data) - 1:,} bytes, expected {len(data):,}'
