import pytest

from diffusion.checkpoints.manifest import batches_of, prune, superfluous, sweep
from diffusion.common.storage import LocalFolder, open_folder, write
from tests.checkpoints.files import names, write_checkpoint


@pytest.mark.parametrize(
    ('batches', 'keep', 'every', 'gone'),
    [
        ([4, 8, 12], -1, None, []),
        ([4, 8, 12], 1, None, [4, 8]),
        ([12, 4, 8], 2, None, [4]),
        ([], 3, None, []),
        ([4, 8, 12, 16, 20, 24], 1, 10, [4, 8, 16]),  # 12 is the first at or after 10
        ([12, 20, 24, 28], 1, 10, [24]),  # the same after a restart that no longer sees 4 to 16
        ([4, 8, 31, 35], 1, 10, [4, 8]),  # one may stand for several multiples
        ([10, 20, 30], 1, 10, []),
    ],
)
def test_what_is_superfluous(batches, keep, every, gone):
    assert superfluous(batches, keep, every) == gone


@pytest.mark.parametrize('place', ['local', 's3'])
def test_only_ours_goes_and_nothing_newer_than_what_is_safe(place, tmp_path, request):
    if place == 's3':
        request.getfixturevalue('s3')
    local = tmp_path / 'source'
    for batch in (4, 8, 12, 16, 20):
        write_checkpoint(local, batch)
    folder = open_folder('s3://bucket/run/checkpoints' if place == 's3' else tmp_path / 'folder')
    for path in local.iterdir():
        write(folder, path.name, path.read_bytes())
    foreign = ['notes.txt', 'ba4-rank0.pt', 'latest-rank0.pt', 'best.pt', 'old/ba00000001.pt', 'ba1.pt']
    for name in [*foreign, 'ba00000002.pt']:
        write(folder, name, b'mine')
    prune(folder, keep=2, keep_every=None, newest=16)
    assert batches_of(folder.files()) == [12, 16, 20]  # 20 is not counted: it may be damaged, or wait for its upload
    assert batches_of(folder.files(), 'pt') == [12, 16, 20]  # a file without manifest went too
    assert set(foreign) <= set(folder.files())
    write(folder, 'ba00000024.pt', b'being uploaded by the next process, or torn by one that was killed')
    prune(folder, keep=2, keep_every=None, newest=20)
    assert batches_of(folder.files(), 'pt') == ([16, 20, 24] if place == 's3' else [16, 20])


def test_killed_between_manifest_and_file_no_manifest_is_left_alone(tmp_path, failpoints):
    for batch in (4, 8):
        write_checkpoint(tmp_path, batch)
    failpoints('retention.between:crash')
    with pytest.raises(RuntimeError):
        prune(LocalFolder(str(tmp_path)), 1, None, 8)
    assert names(tmp_path) == ['ba00000004.pt', 'ba00000008.json', 'ba00000008.pt']
    sweep(LocalFolder(str(tmp_path)), 8)
    assert names(tmp_path) == ['ba00000008.json', 'ba00000008.pt']


def test_leftovers_are_swept(tmp_path):
    write_checkpoint(tmp_path, 40)
    for batch in (4, 8, 12):
        for suffix in ('pt', 'json'):
            (tmp_path / f'ba{batch:08d}.{suffix}.corrupt').touch()
    kept = ['.tmp-71-mine', '.tmp-mine.pt', 'x.corrupt']
    for name in ('.tmp-71-ba00000044.pt', '.tmp-8-ba00000044.json', '.tmp-71-latest.json', *kept):
        (tmp_path / name).touch()
    sweep(LocalFolder(str(tmp_path)), 40)
    assert [name for name in names(tmp_path) if 'corrupt' in name] == [
        'ba00000008.json.corrupt', 'ba00000008.pt.corrupt', 'ba00000012.json.corrupt', 'ba00000012.pt.corrupt', 'x.corrupt',
    ]  # fmt: skip
    assert [name for name in names(tmp_path) if name.startswith('.')] == ['.tmp-71-mine', '.tmp-mine.pt']
