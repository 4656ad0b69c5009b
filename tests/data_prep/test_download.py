import datetime
import fcntl
import hashlib
import io
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import boto3
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from moto.server import ThreadedMotoServer

from data_prep.crawling import crawl
from data_prep.crawling.addresses import network
from data_prep.crawling.crawl import UrlList, download
from data_prep.crawling.crawled_shard import ADDED, ShardError, check, may_pass
from data_prep.crawling.fetch import Fetching
from data_prep.mds.job import Share
from diffusion.contracts.errors import DataError
from tests.conftest import REPOSITORY, read_json, run_python
from tests.data_prep.crawling.image_server import ImageServer, image_bytes, running

FAST = ('--allow-network', '127.0.0.0/8', '--processes', '2', '--threads', '8', '--timeout', '3', '--max-mb', '1')


@pytest.fixture(scope='module')
def server():
    with running(ImageServer()) as server:
        yield server


def write_list(path, urls, **columns):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({'URL': pa.array(urls, pa.string()), 'TEXT': [f'caption {i}' for i in range(len(urls))], **columns}), path)
    return path


def read_shards(folder):
    """{key: row of the parquet files}, {key: {suffix: content}} of the tars; no key twice."""
    rows, samples = {}, {}
    for path in sorted(folder.glob('0*.parquet')):
        found = {row['key']: row for row in pq.read_table(path).to_pylist()}
        assert len(found) == pq.read_metadata(path).num_rows
        assert not found.keys() & rows.keys()
        rows |= found
        with tarfile.open(path.with_suffix('.tar')) as tar:
            names = tar.getnames()
            assert len(set(names)) == len(names)
            for name in names:
                key, _, suffix = name.partition('.')
                assert key in found
                samples.setdefault(key, {})[suffix] = tar.extractfile(name).read()
    return rows, samples


def failures(folder):
    rows = pq.read_table(folder / 'failures.parquet')
    assert rows.schema.types == [pa.string()] * 3
    return {row['key']: (row['url'], row['reason']) for row in rows.to_pylist()}


# path or URL -> reason, None for an image
FATES = {
    '/0.jpg': None,
    '/1.png': None,
    '/2.webp': None,
    '/nothing.jpg': 'failed to download: HTTP 404',
    '/page': 'not a JPEG, PNG or WebP',
    '/empty': 'not a JPEG, PNG or WebP',
    '/half': None,  # a JPEG as far as it goes; convert decodes it
    '/cut': 'failed to download: cut short',
    '/noai': 'failed to download: opted out by X-Robots-Tag',
    '/megabytes/1': 'failed to download: over 1 MB',
    '/slow': 'failed to download: took over 3 s',
    '/hops/3': None,
    '/to//to/x': 'failed to download: too many redirects',  # to itself
    '/hops/4': 'failed to download: too many redirects',
    '/to/http://10.0.0.1/x.jpg': 'failed to download: private address',
    '/to/file:///etc/passwd': 'failed to download: not http or https',
    'file:///etc/passwd': 'failed to download: not http or https',
    'http://10.0.0.1/x.jpg': 'failed to download: private address',
    'http://nobody.invalid/x.jpg': 'failed to download: host not found',
    'http://127.0.0.1:1/x.jpg': 'failed to download: connection failed',
    'image.jpg': 'failed to download: bad URL',
    None: 'failed to download: bad URL',
    '/broken/7.jpg': 'failed to download: HTTP 503',
    '/0.jpg?again': None,
}
ROWS_PER_SHARD = 10
KEYS = [f'{i // ROWS_PER_SHARD * 10 + i % ROWS_PER_SHARD:06d}' for i in range(len(FATES))]
BROKEN = KEYS[list(FATES).index('/broken/7.jpg')]


def full_urls(server):
    return [f'{server.url}{url}' if url and url.startswith('/') else url for url in FATES]


@pytest.fixture(scope='module')
def urls(server, tmp_path_factory):
    """One row of each fate, with columns that LAION has and with names that img2dataset wants for itself."""
    n = len(FATES)
    columns = {
        'WIDTH': [20] * n,
        'punsafe': [i / n for i in range(n)],
        'tags': [['a', 'b']] * n,
        'key': [f'laion-{i}' for i in range(n)],
        'status': ['ok'] * n,
        'width': [20] * n,
        'date': [datetime.date(2024, 8, 30)] * n,
        'thumbnail': [b'\xff'] * n,
    }
    return write_list(tmp_path_factory.mktemp('lists') / 'list.parquet', full_urls(server), **columns)


@pytest.fixture(scope='module')
def crawl_run(server, urls, tmp_path_factory):
    dest = tmp_path_factory.mktemp('crawls') / 'crawl'
    return dest, run_python('-m', 'data_prep.download', urls, dest, '--rows-per-shard', ROWS_PER_SHARD, *FAST)


@pytest.fixture
def crawled(crawl_run, tmp_path):
    """A copy that a test may spoil."""
    return Path(shutil.copytree(crawl_run[0], tmp_path / 'crawl'))


def test_every_row_is_accounted_for(server, crawl_run):
    dest, result = crawl_run
    rows, samples = read_shards(dest)
    assert sorted(rows) == KEYS
    expected = {key: (url or '', reason) for key, url, reason in zip(KEYS, full_urls(server), FATES.values(), strict=True) if reason}
    assert failures(dest) == expected
    assert sorted(samples) == [key for key in KEYS if key not in expected]
    stats = [read_json(path) for path in sorted(dest.glob('*_stats.json'))]
    assert [shard['count'] for shard in stats] == [10, 10, 4]
    assert sum(shard['successes'] for shard in stats) == len(samples)
    for line in (f'attempted {len(FATES)}', f'kept {len(samples)} 25.0 %', 'dropped: failed to download: private address 2 8.3 %'):
        assert line in ' '.join(result.stdout.split())
    assert not [path for path in dest.iterdir() if path.is_dir()]  # no scratch is left


def test_images_are_stored_as_they_came_with_all_columns(crawl_run, server):
    rows, samples = read_shards(crawl_run[0])
    for key, content in zip(KEYS, (image_bytes(0), image_bytes(1, 'PNG'), image_bytes(2, 'WEBP')), strict=False):
        i = int(key)
        assert samples[key]['jpg'] == content
        assert samples[key]['txt'].decode() == f'caption {i}'
        about = json.loads(samples[key]['json'])
        assert about['sha256'] == rows[key]['sha256'] == hashlib.sha256(content).hexdigest()
        assert (about['key'], about['source_key'], about['WIDTH'], about['tags']) == (key, f'laion-{i}', 20, ['a', 'b'])
        kept = {'url', 'caption', 'WIDTH', 'punsafe', 'tags', 'source_key', 'source_status', 'source_width', 'date'}
        assert set(rows[key]) == kept | set(ADDED)
        assert (rows[key]['source_status'], rows[key]['date'], rows[key]['caption']) == ('ok', '2024-08-30', f'caption {i}')
    said = crawl_run[1].stdout
    assert 'column key is kept as source_key' in said
    assert 'column thumbnail is left out: JSON cannot hold binary' in said


def test_a_second_run_asks_nobody(server, urls, crawl_run):
    before = server.asked.total()
    again = run_python('-m', 'data_prep.download', urls, crawl_run[0], '--rows-per-shard', ROWS_PER_SHARD, *FAST)
    assert f'0 rows now, {len(FATES)} before' in again.stdout
    assert again.stdout.split('MB written')[0] == crawl_run[1].stdout.split('MB written')[0]
    assert server.asked.total() == before


def in_process(urls, dest, **options):
    """`download` without workers: all is there, or it is refused before."""
    return download(str(urls), str(dest), Fetching(), **{'share': Share(), 'rows_per_shard': ROWS_PER_SHARD, **options})


def test_what_cannot_be_is_refused(server, urls, crawled, tmp_path):
    changed = write_list(tmp_path / 'list.parquet', [f'{server.url}/0.jpg'] * len(FATES))
    with pytest.raises(DataError, match='was begun with list sha256='):
        in_process(changed, crawled)
    with pytest.raises(DataError, match='was begun with rows per shard=10, now it is 11'):
        in_process(urls, crawled, rows_per_shard=11)
    with pytest.raises(DataError, match="was begun with columns=.*'URL': 'url'.*now it is"):
        in_process(urls, crawled, caption_column='key')
    with pytest.raises(DataError, match='holds something else already'):
        in_process(urls, write_list(tmp_path / 'other/list.parquet', ['x']).parent)
    with pytest.raises(DataError, match='--world-size 2 hosts cannot share; split it'):
        in_process(urls, tmp_path / 'new', share=Share(0, 2))
    with pytest.raises(DataError, match='no such file'):
        in_process(tmp_path / 'nothing.parquet', tmp_path / 'new')
    (tmp_path / 'empty').mkdir()
    with pytest.raises(DataError, match='has no parquet file'):
        in_process(tmp_path / 'empty', tmp_path / 'new')
    with pytest.raises(DataError, match='is a file'):
        in_process(urls, urls)
    (tmp_path / 'torn.parquet').write_bytes(urls.read_bytes()[:-20])
    assert 'torn.parquet: cannot be read' in run_python('-m', 'data_prep.download', tmp_path / 'torn.parquet', tmp_path / 'new', code=2).stderr


def test_two_at_once_are_refused(urls, crawled):
    with (crawled / '.lock').open('w') as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(DataError, match='another process is downloading here'):
            in_process(urls, crawled)


def test_help_needs_neither_aiohttp_nor_torch():
    code = "import sys; sys.modules.update(aiohttp=None, torch=None); sys.argv = ['x', '--help']; from data_prep.download import main; main()"
    assert 'Re-LAION' in run_python('-c', code).stdout


def test_failed_rows_are_tried_again_under_their_keys(server, urls, crawled):
    old_rows, old_samples = read_shards(crawled)
    asked = server.asked.copy()
    server.repaired = True
    before_retry = Path(shutil.copytree(crawled, crawled.with_name('before')))
    result = run_python('-m', 'data_prep.download', urls, crawled, '--rows-per-shard', ROWS_PER_SHARD, '--retry-failed', *FAST)
    rows, samples = read_shards(crawled)
    assert sorted(rows) == KEYS
    assert samples.keys() - old_samples.keys() == {BROKEN}
    assert {key: samples[key] for key in old_samples} == old_samples
    assert samples[BROKEN]['jpg'] == image_bytes(7)
    assert json.loads(samples[BROKEN]['json'])['key'] == BROKEN
    assert samples[BROKEN]['txt'].decode() == rows[BROKEN]['caption'] == f'caption {int(BROKEN)}'
    changed = {'status': 'success', 'error_message': None, 'sha256': hashlib.sha256(image_bytes(7)).hexdigest()}
    assert rows[BROKEN] == {**old_rows[BROKEN], **changed}
    assert BROKEN not in failures(crawled)
    assert len(failures(crawled)) == len(KEYS) - len(samples)
    newly = server.asked - asked
    assert newly['/cut'] == newly['/broken/7.jpg'] == 1
    assert not {
        path for path in newly if path in ('/noai', '/page', '/0.jpg', '/nothing.jpg', '/to//to/x', '/megabytes/1') or path.startswith('/to/http')
    }  # opted out, refused, there
    assert f'attempted {len(KEYS)}' in ' '.join(result.stdout.split())

    # Now as if it had been killed between putting the tar and the parquet file of one shard, and the parquet file and the stats of another.
    for name in ('00002.parquet', '00002_stats.json', '00001_stats.json'):
        shutil.copy(before_retry / name, crawled / name)
    cut = crawled / '00000.tar'
    os.truncate(cut, cut.stat().st_size // 2)  # and as if a disk had lost something: this one cannot be mended
    asked = server.asked.copy()
    run_python('-m', 'data_prep.download', urls, crawled, '--rows-per-shard', ROWS_PER_SHARD, *FAST)
    rows, samples = read_shards(crawled)
    assert sorted(rows) == KEYS
    assert samples == old_samples  # what its parquet file does not know is taken from the tar again
    assert (server.asked - asked)['/nothing.jpg'] == 1  # of the shard that had to be downloaded again
    assert not {'/to/x', '/broken/7.jpg'} & (server.asked - asked).keys()


@pytest.fixture
def here(monkeypatch):
    """`download` without workers: what a worker does, without the seconds of its start."""
    monkeypatch.setattr(crawl, 'in_processes', lambda work, tasks, *_, **__: (work(task) for task in tasks))
    return download


def test_what_wider_limits_allow_is_asked_for_again_and_what_failed_for_good_is_not(here, tmp_path):
    paths = ['/0.jpg', '/to//0.jpg', '/nothing.jpg', '/megabytes/1', '/broken/7.jpg', '/gone']
    dest = tmp_path / 'crawl'

    def run(*networks, max_mb=1, retry_failed=False):
        fetching = Fetching(4, 3, max_bytes=max_mb << 20, networks=tuple(map(network, networks)))
        before = server.asked.copy()
        tally = here(str(urls), str(dest), fetching, Share(), rows_per_shard=4, retry_failed=retry_failed)
        return dict(tally.dropped), dict(server.asked - before), ' '.join(tally.remarks)

    with running(ImageServer()) as server:
        urls = write_list(tmp_path / 'list.parquet', [f'{server.url}{path}' for path in paths])
        dropped, asked, said = run()
        assert (dropped, asked) == ({'failed to download: private address': 6}, {})
        assert '6 rows refused' in said
        assert '--allow-network NETWORK, such as 10.0.0.0/8' in said
        assert run('10.0.0.0/8')[:2] == (dropped, {})  # asked for again, and refused again
        failed = {'HTTP 404': 2, 'over 1 MB': 1, 'HTTP 503': 1}
        dropped, asked, said = run('10.0.0.0/8', '127.0.0.0/8')
        assert dropped == {f'failed to download: {reason}': count for reason, count in failed.items()}
        assert '--allow-network' not in said
        assert '1 row may succeed another time' in said
        assert '2 rows failed for good (HTTP 404' in said
        assert '1 row refused for the size' in said
        assert run('127.0.0.0/8')[1] == {}  # a narrower switch
        assert run('127.0.0.0/8', retry_failed=True)[1] == {'/broken/7.jpg': 1}
        server.repaired = True
        dropped, asked, said = run('127.0.0.0/8', retry_failed=True)
        assert (dropped, asked) == ({'failed to download: HTTP 404': 2, 'failed to download: over 1 MB': 1}, {'/broken/7.jpg': 1})
        assert 'another time' not in said
        dropped, asked, said = run('127.0.0.0/8', max_mb=2)
        assert (dropped, asked) == ({'failed to download: HTTP 404': 2}, {'/megabytes/1': 1})
        assert run('127.0.0.0/8', '10.0.0.0/8', max_mb=2, retry_failed=True)[1] == {}  # nothing is left that another run could change
        assert len(read_shards(dest)[1]) == 4


@pytest.mark.parametrize(
    ('reason', 'passes'),
    [
        *((f'HTTP {status}', False) for status in (301, 400, 401, 403, 404, 405, 410, 451)),
        *((f'HTTP {status}', True) for status in (408, 425, 429, 500, 502, 503, 504, 520)),
        *((reason, True) for reason in ('timed out', 'took over 20 s', 'cut short', 'connection failed', 'TLS error', 'host not found', 'other')),
        *(
            (reason, False)
            for reason in ('bad URL', 'not http or https', 'opted out by X-Robots-Tag', 'too many redirects', 'private address', 'over 1 MB')
        ),
    ],
)
def test_what_may_pass_is_told_from_what_is_for_good(reason, passes):
    assert may_pass(f'failed to download: {reason}') == passes


@pytest.mark.parametrize('reason', ['success', 'not a JPEG, PNG or WebP'])
def test_what_was_downloaded_is_not_asked_for_again(reason):
    assert not may_pass(reason)


def start(*arguments):
    return subprocess.Popen(
        [sys.executable, '-m', 'data_prep.download', *map(str, arguments)],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def worker_of(job):
    """The process id of a worker of the job: a child of the server that the job has forked it from."""
    (server,) = (child for child in children_of(job.pid) if b'forkserver' in Path(f'/proc/{child}/cmdline').read_bytes())
    return children_of(server)[0]


def children_of(process_id):
    return [int(status.parent.name) for status in Path('/proc').glob('[0-9]*/status') if f'PPid:\t{process_id}\n' in status.read_text()]


def test_killed_jobs_and_workers_lose_and_double_nothing(tmp_path):
    with running(ImageServer()) as server:
        paths = ['/0.jpg', '/1.jpg', '/nothing.jpg', '/3.jpg', '/hold/4.jpg', '/5.jpg', '/hold/6.jpg']
        urls, dest = write_list(tmp_path / 'list.parquet', [f'{server.url}{path}' for path in paths]), tmp_path / 'crawl'
        command = [urls, dest, '--rows-per-shard', '2', '--allow-network', '127.0.0.0/8', '--processes', '1', '--timeout', '50']
        with start(*command) as job:
            assert server.held.wait(60)  # at the third shard
            worker = os.pidfd_open(worker_of(job))
            job.kill()
        assert job.returncode == -signal.SIGKILL
        waiting = select.poll()  # select.select knows no number above 1,023
        waiting.register(worker, select.POLLIN)
        assert waiting.poll(10_000), 'the worker still runs'
        os.close(worker)
        assert sorted(path.name for path in dest.glob('*_stats.json')) == ['00000_stats.json', '00001_stats.json']

        server.held.clear()
        with start(*command) as job:
            assert server.held.wait(60)
            os.kill(worker_of(job), signal.SIGKILL)
            server.released.set()
            output = job.communicate(timeout=120)[0]
        assert job.returncode == 0, output
        assert '3 rows now, 4 before' in output
        rows, samples = read_shards(dest)
        assert [rows[key]['url'] for key in sorted(rows)] == [f'{server.url}{path}' for path in paths]
        assert [samples[key]['jpg'] for key in sorted(samples)] == [image_bytes(i) for i in (0, 1, 3, 4, 5, 6)]
        assert [server.asked[path] for path in paths[:4]] == [1] * 4  # whole shards are not downloaded again
        assert not [path for path in dest.iterdir() if path.is_dir()]  # what the killed job left is gone


@pytest.mark.long
def test_hosts_share_a_folder_of_lists_in_object_storage(server, tmp_path, monkeypatch, request):
    temporary = Path(tempfile.mkdtemp())  # short, for names of sockets
    request.addfinalizer(lambda: shutil.rmtree(temporary))
    moto = ThreadedMotoServer('127.0.0.1', 0)
    moto.start()
    host, port = moto.get_host_and_port()
    environment = {
        'S3_ENDPOINT_URL': f'http://{host}:{port}',
        'AWS_ACCESS_KEY_ID': 'x',
        'AWS_SECRET_ACCESS_KEY': 'x',
        'AWS_EC2_METADATA_DISABLED': 'true',
    }
    environment |= {'AWS_DEFAULT_REGION': 'us-east-1', 'TMPDIR': str(temporary)}
    try:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        s3 = boto3.client('s3', endpoint_url=environment['S3_ENDPOINT_URL'])
        s3.create_bucket(Bucket='lists')
        s3.create_bucket(Bucket='crawls')
        server.repaired = False
        for name, paths in {'a': ['/0.jpg'], 'b': ['/1.jpg', '/broken/7.jpg', '/2.jpg']}.items():
            s3.upload_file(str(write_list(tmp_path / f'{name}.parquet', [f'{server.url}{path}' for path in paths])), 'lists', f'laion/{name}.parquet')

        def objects():
            return {item['Key']: item['ETag'] for item in s3.list_objects_v2(Bucket='crawls').get('Contents', [])}

        command = [
            '-m',
            'data_prep.download',
            's3://lists/laion',
            's3://crawls/laion',
            '--rows-per-shard',
            '2',
            '--rank',
            '1',
            '--world-size',
            '2',
            *FAST,
        ]
        assert 'attempted 3 kept 2' in ' '.join(run_python(*command, '--work-folder', tmp_path / 'work').stdout.split())
        shards = [f'laion/b/0000{i}{suffix}' for i in range(2) for suffix in ('.parquet', '.tar', '_stats.json')]
        assert sorted(objects()) == [*shards, 'laion/b/download.json', 'laion/b/failures.parquet', 'laion/lists.json']
        first = objects()

        server.repaired = True
        asked = server.asked.copy()
        assert '1 row now, 2 before' in run_python(*command, '--retry-failed').stdout  # on a new machine
        assert server.asked - asked == {'/broken/7.jpg': 1}
        assert {name for name, etag in objects().items() if first[name] != etag} == {*shards[:3], 'laion/b/failures.parquet'}
        for name in shards:
            (tmp_path / 'b').mkdir(exist_ok=True)
            s3.download_file('crawls', name, str(tmp_path / 'b' / Path(name).name))
        _, samples = read_shards(tmp_path / 'b')
        assert [samples[key]['jpg'] for key in sorted(samples)] == [image_bytes(1), image_bytes(7), image_bytes(2)]
        assert not [
            path for folder in (temporary, tmp_path / 'work') for path in folder.iterdir() if path.is_dir() and path.name.startswith('.scratch')
        ]
    finally:
        moto.stop()


def write_shard(folder, statuses, images):
    rows = [{'key': f'{i}', 'url': 'x', 'status': status, 'error_message': None} for i, status in enumerate(statuses)]
    pq.write_table(pa.Table.from_pylist(rows), folder / '00000.parquet')
    with tarfile.open(folder / '00000.tar', 'w') as tar:
        for i in images:
            entry = tarfile.TarInfo(f'{i}.jpg')
            entry.size = 3
            tar.addfile(entry, io.BytesIO(b'abc'))


def test_a_shard_that_lost_something_gets_no_stats(tmp_path):
    statuses = ['success', 'failed_to_download', 'success']
    write_shard(tmp_path, statuses, [0, 2])
    assert check(0, 3, tmp_path, [])['successes'] == 2
    (tmp_path / '00000_stats.json').unlink()
    for num_rows, recorded, images in [(4, statuses, [0, 2]), (3, statuses, [0]), (3, statuses, [0, 1, 2]), (3, statuses, [0, 2, 2])]:
        write_shard(tmp_path, recorded, images)
        with pytest.raises(ShardError):
            check(0, num_rows, tmp_path, [])
    assert not (tmp_path / '00000_stats.json').exists()


def test_columns_are_found_in_any_case_and_never_guessed(tmp_path):
    def columns(*names, **options):
        pq.write_table(pa.table({name: ['x'] for name in names}), tmp_path / 'list.parquet')
        return UrlList.open(tmp_path / 'list.parquet', 'list.parquet', **options).names

    assert columns('URL', 'TEXT', 'hash') == {'URL': 'url', 'TEXT': 'caption', 'hash': 'hash'}
    assert columns('url', 'caption') == {'url': 'url', 'caption': 'caption'}
    assert columns('url', 'caption', 'TEXT', caption_column='TEXT') == {'url': 'url', 'TEXT': 'caption', 'caption': 'source_caption'}
    assert columns('key', 'source_key', 'url', 'text') == {'url': 'url', 'text': 'caption', 'key': 'source_key', 'source_key': 'source_source_key'}
    with pytest.raises(DataError, match='several columns that could be meant, caption, TEXT; .* --caption-column'):
        columns('url', 'caption', 'TEXT')
    with pytest.raises(DataError, match='has no column url; it has link, text; name one with --url-column'):
        columns('link', 'text')
    with pytest.raises(DataError, match='has no column alt; it has url, text'):
        columns('url', 'text', caption_column='alt')
    pq.write_table(pa.table([['x'], ['y'], ['z']], names=['url', 'text', 'text']), tmp_path / 'twice.parquet')
    with pytest.raises(DataError, match='twice.parquet: cannot be read: the column text is there 2 times'):
        UrlList.open(tmp_path / 'twice.parquet', 'twice.parquet')


def test_lists_are_cut_the_same_however_they_are_stored(tmp_path):
    n = 25
    for row_group_size in (3, 25):
        table = pa.table(
            {'url': [f'{i}' for i in range(n)], 'text': pa.array([b'a\xff' if i == 7 else b'a' for i in range(n)], pa.binary()).view(pa.string())}
        )
        pq.write_table(table, tmp_path / 'list.parquet', row_group_size=row_group_size)
        listed = UrlList.open(tmp_path / 'list.parquet', 'list.parquet')
        shards = dict(listed.shards(10, {0, 2}))
        assert {number: rows['url'].to_pylist() for number, rows in shards.items()} == {
            0: [f'{i}' for i in range(10)],
            2: [f'{i}' for i in range(20, 25)],
        }
        assert shards[0]['caption'].to_pylist()[7] == 'a\ufffd'
