import hashlib
import io
import json
import os
import re
import shutil
import sys

import numpy as np
import pyarrow.parquet as pq
import pytest
from moto.server import ThreadedMotoServer
from PIL import Image
from streaming import LocalDataset, MDSWriter

from data_prep import audit
from data_prep.auditing.dataset import audit_dataset, plan, spread, summary
from data_prep.auditing.page import bars, write_report
from data_prep.auditing.samples import SCALES, false_colours, max_tokens
from data_prep.converting.buckets import MinSideBuckets
from data_prep.converting.conversion import COLUMNS, Options, convert
from data_prep.mds import oddities
from data_prep.mds.oddities import BLANK, IDENTICAL, LONG, REPEATED, least_tokens
from diffusion.contracts.manifest import Manifest
from diffusion.datasets.shards import Shard
from tests.conftest import run_python
from tests.data_prep.test_convert import jpeg, write_webdataset
from tests.monitoring.report.pages import assert_stands_alone

SIZES = [(40, 30), (64, 64), (30, 40), (100, 50)]
ROWS = [(f'{i:09d}', f'caption {i}', jpeg(*SIZES[i % 4], seed=i), 'success') for i in range(12)]
ROWS += [('000000012', 'gone', None, 'failed_to_download'), ('000000013', 'thin', jpeg(300, 3), 'success')]
OPTIONS = Options(min_side_px=16)
SHARD = '{}/00001/shard.00000.mds'


@pytest.fixture(scope='module')
def source(tmp_path_factory):
    return write_webdataset(tmp_path_factory.mktemp('source') / 's', ROWS)


@pytest.fixture(scope='module')
def made(source, tmp_path_factory):
    folder = tmp_path_factory.mktemp('made') / 'images'
    convert(source, folder, OPTIONS)
    return folder


@pytest.fixture
def folder(made, tmp_path):
    """A sound dataset of three shards: 5, 5 and 2 samples; two rows were dropped."""
    return shutil.copytree(made, tmp_path / 'images')


def kinds(found):
    return {what: [problem.where for problem in problems] for what, problems in found.problems}


def main(monkeypatch, *arguments):
    monkeypatch.setattr(sys, 'argv', ['audit', *map(str, arguments), '--processes', '1'])
    return audit.main()


def write_mds(folder, rows, manifest, stream=''):
    """A dataset whose hashes are true, whatever it holds."""
    columns = {name: column['encoding'] for name, column in manifest.columns.items()}
    with MDSWriter(out=str(folder / stream), columns=columns, hashes=['sha256']) as writer:
        for row in rows:
            writer.write(row)
    (folder / stream / 'manifest.json').write_text(manifest.to_json())
    return folder


def described(columns, num_samples, **more):
    about = {'kind': 'images', 'source': {}, 'hashes': ['sha256'], 'code_version': '0', 'dropped': {}}
    columns = {name: {'encoding': encoding, 'meaning': ''} for name, encoding in columns.items()}
    return Manifest(**{**about, 'columns': columns, 'num_samples': num_samples, 'attempted': num_samples, **more})


def row_of(number, image=None, **changes):
    image = image or jpeg(seed=number)
    row = {'key': f'k{number}', 'url': '', 'caption': f'caption {number}', 'image': image, 'reencoded': '', 'width': 40, 'height': 30}
    row |= {'original_width': 40, 'original_height': 30}
    return {**row, 'sha256': hashlib.sha256(image).hexdigest(), **changes}


IMAGE_COLUMNS = {name: encoding for name, (encoding, _) in COLUMNS.items()}


def test_a_sound_dataset(folder):
    before = {path: path.read_bytes() for path in folder.rglob('*') if path.is_file()}
    found = audit_dataset(folder)
    assert found.problems == []
    assert found.remedies == []
    assert (found.num_samples, found.findings.checked, found.findings.sound, found.num_read) == (12, 12, 12, 3)
    assert found.num_bytes == sum(path.stat().st_size for path in folder.rglob('*.mds'))
    histograms = found.findings.histograms
    assert {name: counts.sum() for name, counts in histograms.items()} == dict.fromkeys(('width', 'height', 'aspect', 'caption'), 12)
    assert {px: n for px, n in enumerate(histograms['width']) if n} == {30: 3, 40: 3, 64: 3, 100: 3}
    assert {px: n for px, n in enumerate(histograms['height']) if n} == {30: 3, 40: 3, 50: 3, 64: 3}
    assert histograms['aspect'][SCALES['aspect'].bin_of(0)] == 3
    assert {chars: n for chars, n in enumerate(histograms['caption']) if n} == {9: 10, 10: 2}
    assert [thumbnail.caption for thumbnail in found.findings.thumbnails] == [f'caption {i}' for i in range(12)]
    shown = found.findings.thumbnails[1]
    assert Image.open(io.BytesIO(shown.content)).size == (64, 64)
    assert {path: path.read_bytes() for path in folder.rglob('*') if path.is_file()} == before  # looking changes nothing


def test_a_flipped_byte_is_found_and_the_remedy_mends_it(folder, source):
    shard = folder / '00001/shard.00000.mds'
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-900] + bytes([whole[-900] ^ 1]) + whole[-899:])
    found = audit_dataset(folder)
    assert kinds(found) == {'damaged shard': ['00001/shard.00000.mds']}
    assert (found.findings.checked, found.findings.sound, found.findings.unsound['damaged shard']) == (12, 7, 5)
    assert hashlib.sha256(whole).hexdigest() in found.problems[0][1][0].detail
    markers = re.findall(rf'{re.escape(str(folder))}/parts/\S+', found.remedies[0])
    assert markers == [f'{folder}/parts/00001.json']
    assert 'data_prep.convert' in found.remedies[1]
    convert(source, folder, OPTIONS)
    assert audit_dataset(folder).problems  # as the remedy says, convert alone does not notice
    os.remove(markers[0])
    assert convert(source, folder, OPTIONS).attempted_now == 5
    assert audit_dataset(folder).problems == []
    assert shard.read_bytes() == whole


def test_lost_shards_are_all_named_and_the_remedy_mends_them(folder, source):
    shard = folder / '00000/shard.00000.mds'
    shard.write_bytes(shard.read_bytes()[:-7])
    (folder / '00001/shard.00000.mds').unlink()
    found = audit_dataset(folder)
    assert kinds(found) == {'lost shard': ['00000/shard.00000.mds', '00001/shard.00000.mds']}
    assert found.findings.sound == 2  # the third shard was looked at nevertheless
    assert [('no such file' in problem.detail) for problem in found.problems[0][1]] == [False, True]
    assert len(found.remedies) == 1
    convert(source, folder, OPTIONS)
    assert audit_dataset(folder).problems == []


def test_metadata_that_does_not_agree(folder, source):
    manifest = json.loads((folder / 'manifest.json').read_text())
    manifest['num_samples'] = 13
    manifest['dropped']['short side below 16 px'] = 3
    (folder / 'manifest.json').write_text(json.dumps(manifest))
    found = audit_dataset(folder)
    details = ' '.join(problem.detail for problem in found.findings.problems)
    assert 'num_samples is 13, the shards in index.json hold 12' in details
    assert 'attempted is 14, num_samples and dropped add up to 17' in details
    assert "has 1 row with reason 'short side below 16 px', the manifest counts 3" in details
    assert found.findings.sound == 12
    convert(source, folder, OPTIONS)  # the remedy
    assert audit_dataset(folder).problems == []
    failures = pq.read_table(folder / 'failures.parquet')
    pq.write_table(failures.slice(1), folder / 'failures.parquet')
    assert len(audit_dataset(folder).findings.problems) == 1
    (folder / 'failures.parquet').unlink()
    assert kinds(audit_dataset(folder)) == {'the books do not agree': ['failures.parquet']}
    (folder / 'index.json').write_text('{"shards": [{}]}')
    assert 'index.json' in kinds(audit_dataset(folder))['the books do not agree']


def test_a_shard_without_a_hash_is_not_called_sound(folder):
    index = json.loads((folder / 'index.json').read_text())
    index['shards'][1]['raw_data']['hashes'] = {}
    (folder / 'index.json').write_text(json.dumps(index))
    assert kinds(audit_dataset(folder)) == {'the books do not agree': ['00001/shard.00000.mds']}


def test_an_index_that_is_not_of_these_shards(folder):
    whole = (folder / 'index.json').read_text()

    def found_with(change):
        index = json.loads(whole)
        change(index['shards'])
        (folder / 'index.json').write_text(json.dumps(index))
        return audit_dataset(folder)

    lost = found_with(lambda shards: shards.pop())
    assert 'hold 10: 00002/shard.00000.mds is not listed' in lost.findings.problems[0].detail
    twice = found_with(lambda shards: shards.append(shards[0]))
    assert '00000/shard.00000.mds' in kinds(twice)['the books do not agree']
    (remedy,) = twice.remedies
    assert 'run the same data_prep.convert with the same DEST again' in remedy
    fewer = found_with(lambda shards: shards[1].update(samples=3))
    assert kinds(fewer) == {'the books do not agree': ['manifest.json'], 'damaged shard': ['00001/shard.00000.mds']}
    assert 'holds 5 samples, index.json says 3' in fewer.findings.problems[0].detail


def cmyk():
    buffer = io.BytesIO()
    Image.new('CMYK', (40, 30)).save(buffer, 'JPEG')
    return buffer.getvalue()


UNSOUND = {
    'image cannot be decoded': row_of(9, jpeg(seed=9)[:-300]),
    'empty caption': row_of(9, caption=' \n'),
    'width or height is not that of the image': row_of(9, width=30, height=40),
    'sha256 is not that of the image': row_of(9, sha256='0' * 64),
    'image is not plain upright RGB or grey': row_of(9, cmyk()),
    "image is smaller than the manifest's min_side_px": row_of(9, jpeg(40, 29), height=29),
    'image is not of its bucket': row_of(9, jpeg(200, 100), width=200, height=100),
}


@pytest.mark.parametrize('what', UNSOUND)
def test_an_unsound_sample_in_a_shard_with_a_true_hash(what, tmp_path):
    rows = [row_of(i) for i in range(4)] + [UNSOUND[what]] + [row_of(i) for i in range(4, 6)]
    rows.append(row_of(6, reencoded='alpha', sha256='of the image as it came'))  # and this is as it should be
    manifest = described(IMAGE_COLUMNS, 8, min_side_px=30, bucket={'min_side_px': 16, 'below_px': 64})
    found = audit_dataset(write_mds(tmp_path / 'images', rows, manifest))
    assert found.findings.unsound == {what: 1}
    assert (found.findings.checked, found.findings.sound) == (8, 7)
    assert {counts.sum() for counts in found.findings.histograms.values()} == {7}
    assert found.problems[0][1][0].detail.startswith("sample 4, key 'k9'")
    assert re.search('just as they were written.* data_prep.convert on it with a new DEST', found.remedies[0])


def flat(seed, noise=1, spot=0):
    """A JPEG of one colour with a little noise, and a square of `spot` px of another."""
    pixels = np.full((128, 160, 3), (200, 60 + seed, 20), np.int16) + np.random.default_rng(seed).integers(-noise, noise + 1, (128, 160, 3))
    pixels[:spot, :spot] = 255
    buffer = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(buffer, 'JPEG', quality=95)
    return buffer.getvalue()


def odd_rows():
    """20 samples: 2 of one colour, 1 image and 2 captions that an earlier sample has, 1 caption of 90 words."""
    images = [jpeg(seed=i) for i in range(20)]
    images[3], images[4], images[5], images[6] = flat(3), flat(4, noise=4), flat(5, spot=20), images[1]
    captions = [f'caption {i}' for i in range(20)]
    captions[8] = captions[9] = captions[2]
    captions[10] = ' '.join(['tree'] * 90)
    return list(zip(images, captions, strict=True))


@pytest.mark.parametrize('kind', ['images', 'latents'])
def test_blank_and_repeated_samples_are_counted_and_named(kind, tmp_path, monkeypatch, capsys):
    if kind == 'images':
        source = tmp_path / 's'
        write_webdataset(source, [(f'{i:09d}', caption, image, 'success') for i, (image, caption) in enumerate(odd_rows())], per_shard=7)
        folder = tmp_path / 'images'
        tally = convert(source, folder)
        expected = {BLANK: 2, IDENTICAL: 1, REPEATED: 2, LONG: 1}
        assert tally.notes == Manifest.read(folder).notes == expected
        assert sum('warning: ' in remark for remark in tally.remarks) == 3  # 5 % of captions that are too long are not above the limit
        named = {BLANK: '000000003, 000000004', IDENTICAL: '000000001 and 000000006', REPEATED: '000000002 and 000000008', LONG: '000000010'}
    else:
        moments = [np.random.default_rng(i).normal(0, 1, (8, 4, 4)).astype(np.float16) for i in range(20)]
        moments[6] = moments[1]
        rows = [{**latents_row(i, moments[i]), 'caption': caption} for i, (_, caption) in enumerate(odd_rows())]
        columns = {'key': 'str', 'caption': 'str', 'moments': 'ndarray:float16:8,4,4'}
        manifest = described(columns, 20, kind='latents', resolution=32, encoder={'downsampling': 8})
        folder, expected = write_mds(tmp_path / 'latents', rows, manifest), {IDENTICAL: 1, REPEATED: 2, LONG: 1}
        named = {IDENTICAL: 'k1 and k6', REPEATED: 'k2 and k8', LONG: 'k10'}
    found = audit_dataset(folder)
    assert {oddity: count for oddity, count in found.findings.odd.items() if count} == expected
    assert {oddity: found.examples(oddity) for oddity in expected} == named
    assert found.problems == []
    main(monkeypatch, folder)
    printed = capsys.readouterr().out
    page = (folder / 'report.html').read_text()
    for oddity, count in expected.items():
        assert re.search(rf'^    {re.escape(oddity)} +{count}  {count * 5}.0 %$', printed, re.MULTILINE)
        assert named[oddity] in page
        assert (named[oddity] in printed) == (oddity != LONG)


def test_blank_images_can_be_left_out(tmp_path):
    source = write_webdataset(tmp_path / 's', [(f'{i:09d}', caption, image, 'success') for i, (image, caption) in enumerate(odd_rows())])
    tally = convert(source, tmp_path / 'images', Options(drop_blank=True))
    assert (tally.kept, tally.dropped) == (18, {BLANK: 2})
    assert BLANK not in tally.notes
    assert sorted(pq.read_table(tmp_path / 'images/failures.parquet')['key'].to_pylist()) == ['000000003', '000000004']


def test_captions_are_compared_with_what_stored_embeddings_hold(tmp_path):
    assert max_tokens(described({'text_embeddings': 'ndarray:float16:16,8'}, 0)) == 16
    assert max_tokens(described({}, 0)) == 77


@pytest.mark.parametrize(('caption', 'tokens'), [('', 2), ("a dog's bed, 35mm!", 11), ('犬', 3), ('snow_man', 5)])
def test_tokens_are_estimated_without_a_vocabulary(caption, tokens):
    assert least_tokens(caption) == tokens


def test_many_repeats_are_estimated_in_bounded_memory(monkeypatch):
    monkeypatch.setattr(oddities, 'MAX_HASHES', 5000)
    hashes = np.random.default_rng(0).integers(0, 1 << 63, 40_000).astype(np.uint64)
    hashes[20_000:] = hashes[:20_000]
    seen = oddities.Repeats()
    for part in np.split(hashes, 8):
        seen.add(part, np.zeros_like(part))
    assert seen.size <= 5000
    assert seen.count()[0] == pytest.approx(20_000, rel=0.1)


@pytest.mark.parametrize(
    ('captions', 'what'),
    [
        ([['a', 0.5], ['b', 0.25]], 'weights of the captions do not add up to 1'),
        ([['a', float('nan')]], 'weights of the captions do not add up to 1'),
        ([['a', 0.5], ['', 0.5]], 'empty caption'),
        ([], 'empty caption'),
        (['a'], 'captions are not [[caption, weight], ...]'),
        ([['a', 0.3], ['b', 0.7]], None),
    ],
)
def test_several_captions(captions, what, tmp_path):
    manifest = described({**IMAGE_COLUMNS, 'captions': 'json'}, 1)
    found = audit_dataset(write_mds(tmp_path / 'images', [row_of(0, captions=captions)], manifest))
    assert found.findings.unsound == ({what: 1} if what else {})


@pytest.mark.parametrize(
    ('bucket', 'fits'),
    [
        ({'min_side_px': 30, 'below_px': 31}, True),
        ({'min_side_px': 31, 'below_px': None}, False),
        ({'min_side_px': 16, 'below_px': 30}, False),
        ({'width_px': 40, 'height_px': 30}, True),
        ({'width_px': 41, 'height_px': 30}, False),
        ({'width_px': 40, 'height_px': 31}, False),
    ],
)
def test_an_image_belongs_to_its_bucket(bucket, fits, tmp_path):
    found = audit_dataset(write_mds(tmp_path / 'images', [row_of(0)], described(IMAGE_COLUMNS, 1, bucket=bucket)))  # of 40 x 30
    assert found.findings.unsound == ({} if fits else {'image is not of its bucket': 1})


def test_repeated_keys_are_named(tmp_path):
    rows = [row_of(0), row_of(1), row_of(2), row_of(1, jpeg(seed=8)), row_of(1, jpeg(seed=7))]
    found = audit_dataset(write_mds(tmp_path / 'images', rows, described(IMAGE_COLUMNS, 5)))
    assert kinds(found) == {'repeated key': ['shard.00000.mds']}
    problem = found.findings.problems[0]
    assert (problem.num_samples, "key 'k1'" in problem.detail) == (2, True)
    assert found.findings.sound == 5


def test_buckets_are_audited_together(source, tmp_path):
    folder = tmp_path / 'images'
    convert(source, folder, Options(buckets=MinSideBuckets((16, 50))))
    found = audit_dataset(folder)
    assert found.problems == []
    assert {name: manifest.num_samples for name, manifest in found.streams.items()} == {'side-16': 6, 'side-50': 6}
    assert found.findings.sound == 12
    write_report(found, folder / 'report.html')
    assert 'short side of 16 px or more, below 50 px' in (folder / 'report.html').read_text()
    assert audit_dataset(folder / 'side-16').findings.sound == 6  # a stream is a dataset, too
    shutil.copytree(folder / 'side-16', folder / 'side-50', dirs_exist_ok=True)  # the same samples twice, and not where they belong
    problems = kinds(audit_dataset(folder))
    assert problems['repeated key']
    (folder / 'side-50/manifest.json').unlink()
    assert kinds(audit_dataset(folder))['the books do not agree'] == ['manifest.json', 'side-50/index.json']


def test_sound_latents(latents):
    found = audit_dataset(latents)
    assert found.problems == []
    rows = list(LocalDataset(local=str(latents)))
    scaling = found.manifest.encoder['scaling_factor']
    for name, reduce in (('mean', np.mean), ('std', np.std)):
        expected = [scaling * reduce(row['moments'][: len(row['moments']) // 2].astype(np.float64)) for row in rows]
        counts, scale = found.findings.histograms[name], SCALES[name]
        measured = np.repeat(scale.start + scale.step * (np.arange(len(counts)) + 0.5), counts)
        np.testing.assert_allclose(measured, sorted(expected), atol=0.51 * scale.step)
    assert len(found.findings.thumbnails) == 24


def latents_row(number, moments=None):
    normal = np.random.default_rng(number).normal(size=(8, 4, 4)).astype(np.float16)
    return {'key': f'k{number}', 'caption': 'a caption', 'moments': normal if moments is None else moments}


@pytest.mark.parametrize(
    ('written', 'warned'),
    [('unscaled', False), ('as of photographs', False), ('scaled', True), ("by SDXL's factor", True), ('of another scale', True)],
)
def test_latents_far_from_unit_variance_are_warned_of(written, warned, tmp_path):
    """Moments are stored unscaled: with Stable Diffusion's factor their standard deviation is 5.49; scaled ones, scaled again, have 0.183."""
    factor = 0.18215
    columns = {'key': 'str', 'caption': 'str', 'moments': 'ndarray:float16:8,4,4'}
    encoder = {'downsampling': 8, 'scaling_factor': factor}
    others = {'as of photographs': 0.91 / factor, "by SDXL's factor": 0.13025 / factor**2, 'of another scale': 1.4 / factor}
    std = {'unscaled': 1 / factor, 'scaled': 1.0, **others}[written]
    rng = np.random.default_rng(0)
    mean = rng.normal(0, std, (20, 4, 4, 4)).astype(np.float16)
    rows = [latents_row(i, np.concatenate([mean[i], np.full((4, 4, 4), -20, np.float16)])) for i in range(20)]
    folder = write_mds(tmp_path / 'latents', rows, described(columns, 20, kind='latents', resolution=32, encoder=encoder))
    found = audit_dataset(folder)
    assert not found.problems
    write_report(found, tmp_path / 'report.html')
    shown = assert_stands_alone((tmp_path / 'report.html').read_text()).text
    assert ('standard deviation' in ' '.join(found.warnings)) == warned == ('Warning. the scaled latents' in shown)
    assert ('warning: the scaled latents' in summary(found, 1.0)) == warned
    if warned:
        assert float(re.search(r'standard deviation ([\d.]+)', shown)[1]) == pytest.approx((mean.astype(np.float32) * factor).std(), rel=0.02)


def test_unsound_latents(tmp_path):
    columns = {'key': 'str', 'caption': 'str', 'moments': 'ndarray:float16'}  # of any shape, as other tools might write it
    about = {'kind': 'latents', 'resolution': 32, 'encoder': {'downsampling': 8, 'scaling_factor': 0.2}}
    holes = latents_row(1)['moments'].copy()
    holes[7, 3, 3], holes[0, 0, 0] = np.nan, np.inf
    folder = write_mds(tmp_path / 'latents', [latents_row(0), latents_row(1, holes), latents_row(2, holes[:, :2])], described(columns, 3, **about))
    exact = described({**columns, 'moments': 'ndarray:float16:8,4,4'}, 3, **about)
    (folder / 'manifest.json').write_text(exact.to_json())
    assert audit_dataset(folder).findings.unsound == {'columns are not those of the manifest': 3}
    (folder / 'manifest.json').write_text(described(columns, 3, **about).to_json())
    found = audit_dataset(folder)
    assert 'resolution 32 x 32 makes them 4 x 4' in found.findings.problems[0].detail
    assert found.findings.unsound == {'moments are not of the shape in the manifest': 3}
    fixed = [latents_row(0), latents_row(1, holes), latents_row(2)]
    found = audit_dataset(write_mds(tmp_path / 'fixed', fixed, exact))
    assert (found.findings.unsound, found.findings.sound) == ({'moments are not finite': 1}, 2)
    assert '2 of 128 values' in found.findings.problems[0].detail
    assert 'data_prep.encode on it with a new DEST' in found.remedies[0]


def test_the_same_keys_in_each_resolution_are_as_they_should_be(tmp_path):
    columns = {'key': 'str', 'caption': 'str', 'moments': 'ndarray:float16:8,4,4'}
    about = {'kind': 'latents', 'resolution': 32, 'encoder': {'downsampling': 8}}
    rows = [latents_row(i) for i in range(3)]
    for stream in ('a', 'b'):
        write_mds(tmp_path / 'latents', rows, described(columns, 3, **about), stream)
    whole = described({}, 6, **about, streams=['a', 'b'])
    (tmp_path / 'latents/manifest.json').write_text(whole.to_json())
    assert audit_dataset(tmp_path / 'latents').problems == []
    shutil.rmtree(tmp_path / 'latents/b')
    write_mds(tmp_path / 'latents', [*rows[:2], rows[0]], described(columns, 3, **about), 'b')
    assert kinds(audit_dataset(tmp_path / 'latents')) == {'repeated key': ['b/shard.00000.mds']}


def test_text_embeddings_need_that_of_the_empty_caption(tmp_path):
    columns = {'key': 'str', 'caption': 'str', 'moments': 'ndarray:float16:8,4,4', 'text_embeddings': 'ndarray:float16:5,2'}
    about = {'kind': 'latents', 'resolution': 32, 'encoder': {'downsampling': 8}}
    text = np.ones((5, 2), np.float16)
    rows = [{**latents_row(0), 'text_embeddings': text}, {**latents_row(1), 'text_embeddings': text * np.nan}]
    folder = write_mds(tmp_path / 'latents', rows, described(columns, 2, **about))
    assert kinds(audit_dataset(folder)) == {
        'the books do not agree': ['empty_caption.npy'],
        'text_embeddings are not finite': ['shard.00000.mds'],
    }
    for empty, right in ((text, True), (text * np.nan, False), (text[:3], False)):
        np.save(folder / 'empty_caption.npy', empty)
        assert ('the books do not agree' not in kinds(audit_dataset(folder))) == right


def test_false_colours_show_the_first_three_channels():
    latent = np.zeros((4, 8, 8), np.float32)
    latent[0, :, :4], latent[1, :4], latent[3] = 5, -5, 99
    pixels = np.asarray(false_colours(latent))
    assert [pixels[y, x].tolist() for y, x in ((0, 0), (0, 7), (7, 0), (7, 7))] == [[255, 0, 0], [0, 0, 0], [255, 255, 0], [0, 255, 0]]


class Trap:
    """Makes a folder when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_column_that_could_run_code_is_not_read(tmp_path):
    manifest = described({**IMAGE_COLUMNS, 'more': 'pkl'}, 1)
    folder = write_mds(tmp_path / 'images', [row_of(0, more=Trap(tmp_path / 'sprung'))], manifest)
    found = audit_dataset(folder)
    assert found.findings.unsound == {'reading it could run code': 1}
    assert 'do not use data from this source' in found.findings.problems[0].detail
    assert not (tmp_path / 'sprung').exists()


def test_a_sample_of_the_dataset(folder):
    found = audit_dataset(folder, sample=2)
    assert (found.findings.checked, found.findings.sound, found.num_read) == (2, 2, 2)
    assert [found.findings.histograms[name].sum() for name in ('width', 'caption')] == [2, 2]
    assert [thumbnail.caption for thumbnail in audit_dataset(folder, sample=2).findings.thumbnails] == [
        thumbnail.caption for thumbnail in found.findings.thumbnails
    ]
    unread = ({'00000', '00001', '00002'} - {task.shard.basename.split('/')[0] for task in plan(found.shards, 2)}).pop()
    (folder / unread / 'shard.00000.mds').unlink()
    assert kinds(audit_dataset(folder, sample=2)) == {'lost shard': [f'{unread}/shard.00000.mds']}  # noticed without reading any shard
    assert audit_dataset(folder, sample=999).findings.checked == 12


def test_samples_are_spread_evenly():
    for total, number in ((10_000_000_000, 24), (100, 7), (24, 24), (5, 24), (0, 3)):
        chosen = spread(range(total), number)
        assert len(chosen) == min(total, number)
        assert all(i * total // number <= item < (i + 1) * total // number for i, item in enumerate(chosen)) or total < number
    shards = [Shard('', {'samples': n}) for n in (3, 0, 5, 1, 91)]
    tasks = list(plan(shards, 10))
    assert sum(len(task.samples) for task in tasks) == 10
    assert {task.position + i for task in tasks for i in task.samples} == set(spread(range(100), 10))
    assert all(i < task.shard.num_samples for task in tasks for i in task.samples)
    assert [len(task.samples) for task in plan(shards, None)] == [3, 0, 5, 1, 91]


def test_bars_lose_nothing():
    rng = np.random.default_rng(0)
    for values in (rng.integers(0, 8000, 500), [72] * 9, [*rng.integers(50, 60, 1000), 8191], [0, 8192]):
        counts = np.bincount(values, minlength=8193)
        first, joined, heights = bars(counts, 40)
        assert heights.sum() == len(values)
        assert len(heights) <= 40
        assert first == min(values)
        assert heights[0] == sum(first <= value < first + joined for value in values) or len(heights) == 1


def test_what_comes_from_the_web_is_escaped(tmp_path):
    evil = '<script>alert(1)</script>'
    rows = [row_of(0, caption=f'{evil} & "more"' + 'x' * 200, key=evil), row_of(1, caption=' ', key=f'{evil}2')]
    manifest = described(IMAGE_COLUMNS, 2, source={'path': evil}, attempted=5, dropped={evil: 3}, notes={f're-encoded: {evil}': 1}, code_version=evil)
    folder = write_mds(tmp_path / '<b>images', rows, manifest)
    found = audit_dataset(folder)
    write_report(found, tmp_path / 'report.html')
    page = (tmp_path / 'report.html').read_text()
    assert '<script' not in page
    assert '<b>images' not in page
    assert page.count('&lt;script&gt;') >= 6
    assert f'{evil} & "more"' in assert_stands_alone(page).text
    assert 'x' * 130 not in page  # long captions are shortened


def test_exit_codes_and_reports(folder, tmp_path, monkeypatch, capsys):
    assert main(monkeypatch, folder) == 0
    assert 'images: is sound' in capsys.readouterr().out
    page = (folder / 'report.html').read_text()
    assert page.count('data:image/jpeg') == 12
    assert page.count('<svg') == 4  # the histograms
    assert_stands_alone(page)
    assert 'dropped: short side below 16 px' in page
    (folder / '00002/shard.00000.mds').write_bytes(b'')
    assert main(monkeypatch, folder, '--sample', '1', '--report', tmp_path / 'mine.html') == 2
    told = capsys.readouterr()
    assert '00002/shard.00000.mds: has 0 bytes' in told.err
    assert 'Not sound.' in (tmp_path / 'mine.html').read_text()
    assert (folder / 'report.html').read_text() == page
    assert main(monkeypatch, folder, '--report', tmp_path / 'nowhere/report.html') == 2
    assert 'name another place for the report' in capsys.readouterr().err
    assert main(monkeypatch, tmp_path / 'nothing') == 2
    assert main(monkeypatch, tmp_path) == 2
    assert 'no such file; a dataset is made by' in capsys.readouterr().err
    assert main(monkeypatch, 'ftp://there/images', '--report', tmp_path / 'x.html') == 2


def test_an_empty_data_set_is_sound(tmp_path):
    convert(write_webdataset(tmp_path / 's', ROWS[12:]), tmp_path / 'images', OPTIONS)
    found = audit_dataset(tmp_path / 'images')
    assert (found.problems, found.findings.checked) == ([], 0)
    write_report(found, tmp_path / 'report.html')


@pytest.fixture
def bucket(monkeypatch):
    import boto3

    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    settings = {'S3_ENDPOINT_URL': f'http://{host}:{port}', 'AWS_ACCESS_KEY_ID': 'a', 'AWS_SECRET_ACCESS_KEY': 'b', 'AWS_DEFAULT_REGION': 'us-east-1'}
    for name, value in {**settings, 'AWS_EC2_METADATA_DISABLED': 'true'}.items():
        monkeypatch.setenv(name, value)
    s3 = boto3.client('s3', endpoint_url=settings['S3_ENDPOINT_URL'])
    s3.create_bucket(Bucket='audited')
    yield s3
    server.stop()


@pytest.mark.long
def test_the_command_on_object_storage_with_several_processes(folder, bucket, tmp_path, monkeypatch, capsys):
    for path in folder.rglob('*'):
        if path.is_file() and not path.name.startswith('.'):
            bucket.upload_file(str(path), 'audited', f'sets/images/{path.relative_to(folder)}')
    result = run_python('-m', 'data_prep.audit', 's3://audited/sets/images', '--processes', 2, '--report', tmp_path / 'remote.html')
    assert 'sound 12 100.0 %' in ' '.join(result.stdout.split())
    assert 'Traceback' not in result.stderr
    write_report(audit_dataset(folder), tmp_path / 'local.html')
    figures = [re.findall(r'<figure>.*?</figure>', (tmp_path / name).read_text(), re.DOTALL) for name in ('remote.html', 'local.html')]
    assert figures[0] == figures[1]  # in the same order, however the work was shared
    assert len(figures[0]) == 12 + 4
    bucket.delete_object(Bucket='audited', Key='sets/images/00001/shard.00000.mds')
    monkeypatch.chdir(tmp_path)
    assert main(monkeypatch, 's3://audited/sets/images') == 2
    assert 's3://audited/sets/images/00001/shard.00000.mds: no such file' in capsys.readouterr().err
    assert (tmp_path / 'audit-images.html').exists()
    assert len(bucket.list_objects_v2(Bucket='audited')['Contents']) == len([p for p in folder.rglob('[!.]*') if p.is_file()]) - 1
