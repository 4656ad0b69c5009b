"""Clients of object storage: what diffusion/common/storage.py asks of one bucket, in the API of each kind.

Here are also the variables of the environment that each reads. Retries with growing pauses are the clients' own. obstore 0.12.1 was tried in their
place: a process that is forked after its parent's first request waits forever, as a loader's would, and a server's sign-in page is an empty folder.
"""

import importlib
import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ATTEMPTS = 10  # about a minute and a half of a server that answers 503
NO_ETAG = '"00000000000000000000000000000000"'  # of no object
JITTER = random.SystemRandom()  # for pauses between attempts
# Modules of the clients that draw from Python's global generator, for pauses and for names of temporary files.
DRAWING = {
    's3': ('botocore.retryhandler', 's3transfer.utils'),
    'gs': ('google.api_core.retry.retry_base', 'google.auth._exponential_backoff'),
    'oci': ('oci.retry.retry_sleep_utils',),
}


@cache
def keep_random_state(scheme: str) -> None:
    """Give the clients of a kind of storage a generator of their own: checkpoints hold the state of Python's, which must not depend on retries."""
    for name in DRAWING.get(scheme, ()):
        with suppress(ImportError):
            importlib.import_module(name).random = JITTER  # type: ignore[attr-defined]
    if scheme == 's3':
        from botocore.retries.standard import ExponentialBackoff

        before = ExponentialBackoff.__init__.__defaults__ or ()
        ExponentialBackoff.__init__.__defaults__ = tuple(JITTER.random if default == random.random else default for default in before)


@dataclass(frozen=True)
class Stat:
    """Size of a file in bytes, and what changes when its content does: the ETag in object storage, the time of its last change on a disk."""

    num_bytes: int
    version: str
    refused: str = ''
    """Why it is not opened although it is there, such as `not a regular file`."""


def status_of(error: BaseException) -> tuple[int, str]:
    """Return the HTTP status that a client's error carries (0: none), and the storage's own word for it."""
    answer = getattr(error, 'response', None)
    if isinstance(answer, dict):  # botocore
        return answer.get('ResponseMetadata', {}).get('HTTPStatusCode', 0), answer.get('Error', {}).get('Code', '')
    code = getattr(error, 'code', None)  # a word of Oracle's, the status of Google's
    status = code if isinstance(code, int) else getattr(error, 'status', None)
    return status if isinstance(status, int) else 0, code if isinstance(code, str) else ''


def is_missing(error: BaseException) -> bool:
    """Return whether a client says that there is no such object; a bucket that is missing is another matter, which Google does not tell apart."""
    status, word = status_of(error)
    return status == 404 and word in ('', '404', 'NoSuchKey', 'ObjectNotFound')


def put_if(put: Callable[[], object], version: str | None) -> bool:
    """Make a conditional write; return whether it was done: another may have written or deleted the object, or be just doing so."""
    try:
        put()
    except Exception as error:  # each client has exceptions of its own
        if status_of(error)[0] in (409, 412) or (version is not None and is_missing(error)):
            return False
        raise
    return True


class S3Client:
    """One bucket of Amazon S3 or of what speaks its language. All classes have the same methods, and raise the errors of their libraries."""

    def __init__(self, bucket: str, **options: Any):
        import boto3
        from botocore.config import Config

        keep_random_state('s3')
        endpoint = os.environ.get('S3_ENDPOINT_URL')
        options = {'endpoint_url': endpoint, **options} if endpoint else options
        settings: dict[str, Any] = {'retries': {'mode': 'standard', 'total_max_attempts': ATTEMPTS}, 'max_pool_connections': 32}
        if 'endpoint_url' in options:  # checksums in trailers, boto3's default, are Amazon's own
            settings |= {'request_checksum_calculation': 'when_required', 'response_checksum_validation': 'when_required'}
        self.bucket = bucket
        acl = os.environ.get('S3_CANNED_ACL')  # as Streaming's own uploads honour it
        self.acl = {'ACL': acl} if acl else {}
        self.has_conditions: bool | None = None  # not known yet
        self.s3 = boto3.session.Session().client('s3', config=Config(**settings), **options)
        self.s3.meta.events.register_first('before-parse.*.*', _refuse_pages)  # before botocore's own, which tries for minutes

    def list(self, prefix: str) -> Iterator[tuple[str, Stat]]:
        """(key, size and version) of all objects that begin with `prefix`."""
        for page in self.s3.get_paginator('list_objects_v2').paginate(Bucket=self.bucket, Prefix=prefix):
            for item in page.get('Contents', []):
                yield item['Key'], Stat(item['Size'], item['ETag'].strip('"'))

    def download(self, key: str, path: Path) -> None:
        self.s3.download_file(self.bucket, key, str(path))

    def upload(self, path: Path, key: str) -> None:
        self.s3.upload_file(str(path), self.bucket, key, ExtraArgs=self.acl)

    def delete(self, key: str) -> None:
        self.s3.delete_object(Bucket=self.bucket, Key=key)

    def read(self, key: str) -> tuple[bytes, str]:
        """Return the content of a small object and its version, which `put_if` takes."""
        answer = self.s3.get_object(Bucket=self.bucket, Key=key)
        return answer['Body'].read(), answer['ETag']

    def put_if(self, key: str, content: bytes, version: str | None) -> bool:
        """Put a small object if the one there has this version (None: if there is none); False if it does not, or may not (ask again)."""

        def done(version: str | None) -> bool:
            condition = {'IfNoneMatch': '*'} if version is None else {'IfMatch': version}
            return put_if(lambda: self.s3.put_object(Bucket=self.bucket, Key=key, Body=content, **condition, **self.acl), version)

        if self.has_conditions is not False:
            try:
                is_done = done(version)
                if is_done and self.has_conditions is None:  # a store that passes over the headers takes what it must refuse
                    self.has_conditions = not done(None) and not done(NO_ETAG)
            except Exception as error:
                if status_of(error)[0] != 501:  # not implemented
                    raise
                self.has_conditions = False
            if self.has_conditions is not False:
                return is_done
            print(f's3://{self.bucket}: no conditional writes here: of two writers at the same instant the later wins', file=sys.stderr)
        self.s3.put_object(Bucket=self.bucket, Key=key, Body=content, **self.acl)
        return True


def _refuse_pages(operation_model: Any, response_dict: dict[str, Any], **_: Any) -> None:
    """Raises ValueError for a success that is not S3's, such as a sign-in page, which the client would take for an empty list or a file."""
    name, body = operation_model.name, response_dict['body']
    if response_dict['status_code'] >= 300 or name not in ('ListObjectsV2', 'GetObject', 'PutObject', 'UploadPart'):
        return
    if b'<ListBucketResult' not in body[:1000] if name == 'ListObjectsV2' else 'etag' not in {header.lower() for header in response_dict['headers']}:
        shown = bytes(body.read(80) if name == 'GetObject' else body[:80]).decode(errors='replace')
        raise ValueError(f'the server answers as no S3 does: {shown!r}; S3_ENDPOINT_URL has to name the storage, no console and no page before it')


class GoogleClient:
    """Google Cloud Storage with default credentials."""

    def __init__(self, bucket: str):
        from google.cloud.storage import Client
        from google.cloud.storage.retry import DEFAULT_RETRY

        keep_random_state('gs')
        self.bucket = Client().bucket(bucket)
        self.retry = DEFAULT_RETRY  # two minutes; unconditional, since the same object is written again

    def list(self, prefix: str) -> Iterator[tuple[str, Stat]]:
        for blob in self.bucket.list_blobs(prefix=prefix, retry=self.retry):
            yield blob.name, Stat(blob.size, blob.etag)

    def download(self, key: str, path: Path) -> None:
        self.bucket.blob(key).download_to_filename(str(path), retry=self.retry)

    def upload(self, path: Path, key: str) -> None:
        self.bucket.blob(key).upload_from_filename(str(path), retry=self.retry)

    def delete(self, key: str) -> None:
        self.bucket.blob(key).delete(retry=self.retry)

    def read(self, key: str) -> tuple[bytes, str]:
        blob = self.bucket.blob(key)
        blob.reload(retry=self.retry)
        return blob.download_as_bytes(if_generation_match=blob.generation, retry=self.retry), str(blob.generation)

    def put_if(self, key: str, content: bytes, version: str | None) -> bool:
        blob, generation = self.bucket.blob(key), int(version or 0)  # 0: there is none
        return put_if(lambda: blob.upload_from_string(content, if_generation_match=generation, retry=self.retry), version)


class OracleClient:
    """Oracle Cloud Infrastructure, `oci://bucket@namespace`."""

    def __init__(self, netloc: str):
        import oci

        keep_random_state('oci')
        self.manager = oci.object_storage.UploadManager
        self.client = oci.object_storage.ObjectStorageClient(oci.config.from_file(), retry_strategy=oci.retry.DEFAULT_RETRY_STRATEGY)
        bucket, _, namespace = netloc.partition('@')
        self.where = {'namespace_name': namespace or self.client.get_namespace().data, 'bucket_name': bucket}

    def list(self, prefix: str) -> Iterator[tuple[str, Stat]]:
        start = None
        while True:
            page = self.client.list_objects(**self.where, prefix=prefix, start=start, fields='name,size,etag').data
            for item in page.objects:
                yield item.name, Stat(item.size, item.etag)
            start = page.next_start_with
            if not start:
                return

    def download(self, key: str, path: Path) -> None:
        answer = self.client.get_object(**self.where, object_name=key)
        with path.open('wb') as file:
            for chunk in answer.data.raw.stream(1 << 20, decode_content=False):
                file.write(chunk)
        if path.stat().st_size != int(answer.headers['content-length']):
            raise OSError('the connection was cut')

    def upload(self, path: Path, key: str) -> None:
        self.manager(self.client).upload_file(**self.where, object_name=key, file_path=str(path))

    def delete(self, key: str) -> None:
        self.client.delete_object(**self.where, object_name=key)

    def read(self, key: str) -> tuple[bytes, str]:
        answer = self.client.get_object(**self.where, object_name=key)
        return answer.data.content, answer.headers['etag']

    def put_if(self, key: str, content: bytes, version: str | None) -> bool:
        condition = {'if_none_match': '*'} if version is None else {'if_match': version}
        return put_if(lambda: self.client.put_object(**self.where, object_name=key, put_object_body=content, **condition), version)


Client = S3Client | GoogleClient | OracleClient


def _google(bucket: str) -> S3Client | GoogleClient:
    if 'GCS_KEY' in os.environ and 'GCS_SECRET' in os.environ:
        keys = {'aws_access_key_id': os.environ['GCS_KEY'], 'aws_secret_access_key': os.environ['GCS_SECRET']}
        return S3Client(bucket, endpoint_url='https://storage.googleapis.com', region_name='auto', **keys)
    return GoogleClient(bucket)


CLIENTS: dict[str, Callable[[str], Client]] = {'s3': S3Client, 'gs': _google, 'oci': OracleClient}


@cache
def client_of(scheme: str, netloc: str) -> Client:
    """This process's client of the bucket at `scheme://netloc/`; made once, when it is first asked for."""
    return CLIENTS[scheme](netloc)


os.register_at_fork(after_in_child=client_of.cache_clear)  # connections must not be shared with a parent
