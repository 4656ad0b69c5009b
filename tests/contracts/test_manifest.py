"""A manifest of any origin is read with types: what does not fit is named, and no other error is raised."""

import json

import pytest

from diffusion.contracts.errors import ManifestError
from diffusion.contracts.manifest import Manifest

WHOLE = {
    'kind': 'latents',
    'columns': {'key': {'encoding': 'str', 'meaning': 'its key'}},
    'num_samples': 2,
    'attempted': 3,
    'dropped': {'empty caption': 1},
    'source': {'path': 'x', 'parts': 1},
    'hashes': ['sha256'],
    'code_version': '0.1.0',
    'notes': {},
    'streams': [],
    'bucket': {'width_px': 64, 'height_px': 32},
    'min_side_px': None,
    'resolution': None,
    'transform': None,
    'encoder': {'source': 'x', 'revision': None, 'vae_sha256': 'a', 'scaling_factor': 1, 'shift_factor': 0.5, 'downsampling': 8, 'dtype': 'float16'},
    'text_encoder': {},
    'captioner': {},
    'version': 1,
}
VALUES = (None, 1, 1.5, -1, 0, True, 'x', [], [1], {}, {'x': None}, float('nan'))
FITS = [  # of VALUES, beside those of the same type
    ('bucket', {}), ('encoder', {}), ('dropped', {}), ('columns', {}), ('source', {'x': None}), ('text_encoder', {'x': None}), ('captioner', {'x': None}),
    ('source', {}), ('hashes', []), ('code_version', 'x'), ('num_samples', 1), ('num_samples', 0), ('attempted', 1), ('attempted', 0), ('version', 1),
    ('min_side_px', 1), ('resolution', 1), ('transform', 'x'), ('encoder', {'x': None}), ('bucket', {'x': None}),
]  # fmt: skip


def read(folder, content):
    (folder / 'manifest.json').write_text(json.dumps(content))
    return Manifest.read(folder)


def test_a_manifest_is_read_as_it_was_written(tmp_path):
    manifest = read(tmp_path, WHOLE)
    assert json.loads(manifest.to_json()) == {**WHOLE, 'encoder': {**WHOLE['encoder'], 'scaling_factor': 1.0}}
    assert manifest.encoded_px == (64, 32)


@pytest.mark.parametrize('field', WHOLE)
def test_values_of_another_type_are_refused_by_name(field, tmp_path):
    for value in VALUES:
        if value == WHOLE[field] or any((field, value) == fit and type(value) is type(fit[1]) for fit in FITS):
            continue
        with pytest.raises(ManifestError, match=f'manifest.json.*({field}|version)'):
            read(tmp_path, {**WHOLE, field: value})


@pytest.mark.parametrize(
    ('section', 'name', 'value'),
    [
        ('encoder', 'downsampling', 0), ('encoder', 'downsampling', '8'), ('encoder', 'scaling_factor', None), ('encoder', 'shift_factor', []),
        ('encoder', 'vae_sha256', 1), ('bucket', 'width_px', None), ('bucket', 'height_px', -1), ('columns', 'key', {}), ('dropped', 'x', -1),
    ],
)  # fmt: skip
def test_values_inside_a_section_are_checked_too(section, name, value, tmp_path):
    with pytest.raises(ManifestError, match='manifest.json'):
        read(tmp_path, {**WHOLE, section: {**WHOLE[section], name: value}})


@pytest.mark.parametrize('content', ['', '{', '[]', 'null', '1', '[' * 100_000, '{"version": 1}', '{"version": 2}'])
def test_other_files_are_no_manifests(content, tmp_path):
    (tmp_path / 'manifest.json').write_text(content)
    with pytest.raises(ManifestError, match='manifest.json'):
        Manifest.read(tmp_path)


def test_an_unknown_field_is_an_error(tmp_path):
    with pytest.raises(ManifestError, match="the field 'crop'"):
        read(tmp_path, {**WHOLE, 'crop': 1})
