"""The clients of object storage: what diffusion/common/storage.py asks of one bucket, in the API of each kind.

Here are also the variables of the environment that each reads. Retries with growing pauses are the clients' own.
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
from typing import Any, Protocol

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


class Client(Protocol):
    """One bucket of a kind of object storage."""

    def list(self, prefix: str) -> Iterator[tuple[str, Stat]]:
        """(key, size and version) of all objects that begin with `prefix`."""

    def download(self, key: str, path: Path) -> None:
        """Raises FileNotFoundError where there is no such object."""

    def upload(self, path: Path, key: str) -> None: ...

    def delete(self, key: str) -> None: ...

    def read(self, key: str) -> tuple[bytes, str] | None:
        """Content of a small object and its version, which `put_if` takes; None if there is no such object."""

    def put_if(self, key: str, content: bytes, version: str | None) -> bool:
        """Put a small object if the one there has this version (None: if there is none); False if it does not, or may not (ask again)."""


class S3Client:
    """Amazon S3 and what speaks its language."""

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
        self.has_conditions: bool | None = None  # not known yet
        self.s3 = boto3.session.Session().client('s3', config=Config(**settings), **options)
        self.s3.meta.events.register_first('before-parse.*.*', _refuse_pages)  # before botocore's own, which tries for minutes

    def list(self, prefix: str) -> Iterator[tuple[str, Stat]]:
        for page in self.s3.get_paginator('list_objects_v2').paginate(Bucket=self.bucket, Prefix=prefix):
            for item in page.get('Contents', []):
                yield item['Key'], Stat(item['Size'], item['ETag'].strip('"'))

    def download(self, key: str, path: Path) -> None:
        from botocore.exceptions import ClientError

        try:
            self.s3.download_file(self.bucket, key, str(path))
        except ClientError as error:
            if error.response['Error']['Code'] in ('404', 'NoSuchKey'):
                raise FileNotFoundError(key) from error
            raise

    def upload(self, path: Path, key: str) -> None:
        self.s3.upload_file(str(path), self.bucket, key, ExtraArgs=_acl())

    def delete(self, key: str) -> None:
        self.s3.delete_object(Bucket=self.bucket, Key=key)

    def read(self, key: str) -> tuple[bytes, str] | None:
        try:
            answer = self.s3.get_object(Bucket=self.bucket, Key=key)
        except self.s3.exceptions.NoSuchKey:
            return None
        return answer['Body'].read(), answer['ETag']

    def put_if(self, key: str, content: bytes, version: str | None) -> bool:
        if self.has_conditions is None:
            done = self._put(key, content, version)
            if done is False:
                return False
            # A store that passes over the headers takes what it must refuse.
            self.has_conditions = bool(done) and self._put(key, content, None) is False and self._put(key, content, NO_ETAG) is False
            if not self.has_conditions:
                print(f's3://{self.bucket}: no conditional writes here: of two writers at the same instant the later wins', file=sys.stderr)
            if done:
                return True
        if self.has_conditions:
            return bool(self._put(key, content, version))
        self.s3.put_object(Bucket=self.bucket, Key=key, Body=content, **_acl())
        return True

    def _put(self, key: str, content: bytes, version: str | None) -> bool | None:
        """Whether the store did so; None if it does not implement conditions."""
        from botocore.exceptions import ClientError

        condition = {'IfNoneMatch': '*'} if version is None else {'IfMatch': version}
        try:
            self.s3.put_object(Bucket=self.bucket, Key=key, Body=content, **condition, **_acl())
        except ClientError as error:
            code, status = error.response['Error']['Code'], error.response['ResponseMetadata']['HTTPStatusCode']
            if status == 501:
                return None
            if status in (409, 412) or code == 'NoSuchKey':  # another is just writing it; another has; another has deleted it
                return False
            raise
        return True


def _refuse_pages(operation_model: Any, response_dict: dict[str, Any], **_: Any) -> None:
    """Raises ValueError for a success that is not S3's, such as a sign-in page, which the client would take for an empty list or a file."""
    name, body = operation_model.name, response_dict['body']
    if response_dict['status_code'] >= 300 or name not in ('ListObjectsV2', 'GetObject', 'PutObject', 'UploadPart'):
        return
    if b'<ListBucketResult' not in body[:1000] if name == 'ListObjectsV2' else 'etag' not in {header.lower() for header in response_dict['headers']}:
        shown = bytes(body.read(80) if name == 'GetObject' else body[:80]).decode(errors='replace')
        raise ValueError(f'the server answers as no S3 does: {shown!r}; S3_ENDPOINT_URL has to name the storage, no console and no page before it')


def _acl() -> dict[str, str]:
    acl = os.environ.get('S3_CANNED_ACL')  # as Streaming's own uploads honour it
    return {'ACL': acl} if acl else {}


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
        from google.api_core.exceptions import NotFound

        try:
            self.bucket.blob(key).download_to_filename(str(path), retry=self.retry)
        except NotFound as error:
            raise FileNotFoundError(key) from error

    def upload(self, path: Path, key: str) -> None:
        self.bucket.blob(key).upload_from_filename(str(path), retry=self.retry)

    def delete(self, key: str) -> None:
        from google.api_core.exceptions import NotFound

        with suppress(NotFound):
            self.bucket.blob(key).delete(retry=self.retry)

    def read(self, key: str) -> tuple[bytes, str] | None:
        from google.api_core.exceptions import NotFound, PreconditionFailed

        while (blob := self.bucket.get_blob(key, retry=self.retry)) is not None:
            with suppress(NotFound, PreconditionFailed):  # replaced since
                return blob.download_as_bytes(if_generation_match=blob.generation, retry=self.retry), str(blob.generation)
        return None

    def put_if(self, key: str, content: bytes, version: str | None) -> bool:
        from google.api_core.exceptions import NotFound, PreconditionFailed

        try:
            self.bucket.blob(key).upload_from_string(content, if_generation_match=int(version or 0), retry=self.retry)  # 0: there is none
        except PreconditionFailed:
            return False
        except NotFound:
            if version is None:  # the bucket
                raise
            return False
        return True


class OracleClient:
    """Oracle Cloud Infrastructure, `oci://bucket@namespace`."""

    def __init__(self, netloc: str):
        import oci

        keep_random_state('oci')
        self.oci = oci
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
        try:
            answer = self.client.get_object(**self.where, object_name=key)
        except self.oci.exceptions.ServiceError as error:
            if error.status == 404 and error.code == 'ObjectNotFound':
                raise FileNotFoundError(key) from error
            raise
        with path.open('wb') as file:
            for chunk in answer.data.raw.stream(1 << 20, decode_content=False):
                file.write(chunk)
        if path.stat().st_size != int(answer.headers['content-length']):
            raise OSError('the connection was cut')

    def upload(self, path: Path, key: str) -> None:
        self.oci.object_storage.UploadManager(self.client).upload_file(**self.where, object_name=key, file_path=str(path))

    def delete(self, key: str) -> None:
        try:
            self.client.delete_object(**self.where, object_name=key)
        except self.oci.exceptions.ServiceError as error:
            if error.status != 404:
                raise

    def read(self, key: str) -> tuple[bytes, str] | None:
        try:
            answer = self.client.get_object(**self.where, object_name=key)
        except self.oci.exceptions.ServiceError as error:
            if error.status == 404 and error.code == 'ObjectNotFound':
                return None
            raise
        return answer.data.content, answer.headers['etag']

    def put_if(self, key: str, content: bytes, version: str | None) -> bool:
        condition = {'if_none_match': '*'} if version is None else {'if_match': version}
        try:
            self.client.put_object(**self.where, object_name=key, put_object_body=content, **condition)
        except self.oci.exceptions.ServiceError as error:
            if error.status in (409, 412) or error.code == 'ObjectNotFound':
                return False
            raise
        return True


def _google(bucket: str) -> Client:
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
