"""Object storage as the service sees it: it signs URLs for others, looks at what arrived, and holds the only key.

A signed PUT fixes one key, the length and the SHA-256 of the body, and that nothing is there yet (`If-None-Match: *`); all three are in the
signature, so that S3 refuses anything else. A signed GET opens one object. Both live for a quarter of an hour.
"""

import base64
import hashlib
import os
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from diffusion.common.text import redacted
from diffusion.contracts.errors import InputError
from fleet.jobs.protocol import SignedPut

URL_SEC = 900
CODES_OF_NOTHING = ('404', 'NoSuchKey', 'NotFound')


class StorageAway(Exception):
    """The storage does not answer, or refuses the service itself."""


@dataclass(frozen=True)
class StoredObject:
    num_bytes: int
    sha256: str | None  # hex digits; None where the storage keeps none


class Bucket:
    """One folder of an S3-compatible bucket.

    Args:
        url: `s3://BUCKET/FOLDER`; credentials and S3_ENDPOINT_URL come from the environment of the service.

    Raises:
        InputError: it is no such URL.
    """

    def __init__(self, url: str):
        parts = urlsplit(url)
        if parts.scheme != 's3' or not parts.netloc:
            raise InputError(f'{url[:200]}: a fleet needs an S3-compatible bucket with conditional writes; write s3://BUCKET/FOLDER')
        self.bucket, self.folder = parts.netloc, parts.path.strip('/')
        self.url = url.rstrip('/')
        self.checks_digests = False  # whether it is known to refuse bytes of another digest than was signed; `check` finds out
        self._making = threading.Lock()
        self._s3: Any = None

    @property
    def s3(self) -> Any:
        """The client; one for all threads, which boto3 allows."""
        with self._making:
            if self._s3 is None:
                self._s3 = _client(max_pool_connections=32, retries={'mode': 'standard', 'total_max_attempts': 4})
        return self._s3

    def check(self) -> None:
        """Read a key that nothing has, and write to another with a wrong digest, which a storage that compares them refuses.

        Raises:
            InputError: there is no such bucket, or it refuses the service.
            StorageAway: nothing answers within seconds.
        """
        from botocore.exceptions import BotoCoreError, ClientError, ConnectionError, HTTPClientError

        s3 = _client(connect_timeout=5, read_timeout=10, retries={'mode': 'standard', 'total_max_attempts': 2})
        try:
            with suppress(s3.exceptions.NoSuchKey):
                s3.get_object(Bucket=self.bucket, Key=self.key('owners/none'))
            wrong = base64.b64encode(bytes(32)).decode()
            s3.put_object(Bucket=self.bucket, Key=self.key('owners/wrong-digest'), Body=b'x', ChecksumSHA256=wrong, IfNoneMatch='*')
        except ClientError as error:
            code, status = error.response['Error']['Code'], error.response['ResponseMetadata']['HTTPStatusCode']
            self.checks_digests = code in ('BadDigest', 'InvalidDigest', 'XAmzContentChecksumMismatch')
            if self.checks_digests or code in ('NotFound', 'InvalidRequest') or status == 412:  # 412: it took the wrong digest at an earlier start
                return
            if code == 'NoSuchBucket':
                raise InputError(f'--bucket {self.url}: there is no bucket {self.bucket}; create it, or name another') from None
            if status != 501 and (status >= 500 or status == 429):  # 501: it knows no conditional writes
                raise StorageAway(code) from error
            raise InputError(
                f'--bucket {self.url}: the storage refuses this service: {code}; it needs the rights to list the bucket, and to get and put below '
                "the folder, by credentials that boto3 finds (AWS_ACCESS_KEY_ID ...) and, where it is not AWS's, S3_ENDPOINT_URL"
            ) from None
        except (ConnectionError, HTTPClientError) as error:
            raise StorageAway(type(error).__name__) from error
        except (BotoCoreError, ValueError) as error:  # no credentials, no name of a bucket, no endpoint
            raise InputError(f'--bucket {self.url}: {redacted(str(error))}') from None

    def key(self, name: str) -> str:
        return f'{self.folder}/{name}' if self.folder else name

    def get_url(self, name: str) -> str:
        return self.s3.generate_presigned_url('get_object', Params={'Bucket': self.bucket, 'Key': self.key(name)}, ExpiresIn=URL_SEC)

    def get_urls(self, folder: str, files: dict[str, Any]) -> dict[str, Any]:
        """Return the files of a folder, {name: {sha256, bytes}}, with a `url` each."""
        return {name: {'url': self.get_url(f'{folder}/{name}'), **content} for name, content in files.items()}

    def put_url(self, name: str, sha256: str, num_bytes: int) -> SignedPut:
        digest = base64.b64encode(bytes.fromhex(sha256)).decode()
        content = {'IfNoneMatch': '*', 'ContentLength': num_bytes, 'ChecksumSHA256': digest}
        url = self.s3.generate_presigned_url(
            'put_object', Params={'Bucket': self.bucket, 'Key': self.key(name), **content}, ExpiresIn=URL_SEC, HttpMethod='PUT'
        )
        return SignedPut(url=url, headers={'If-None-Match': '*', 'Content-Length': str(num_bytes), 'x-amz-checksum-sha256': digest})

    def look(self, name: str) -> StoredObject | None:
        """Size and digest of an object; None if it is not there.

        Raises:
            StorageAway.
        """
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            head = self.s3.head_object(Bucket=self.bucket, Key=self.key(name), ChecksumMode='ENABLED')
        except ClientError as error:
            if error.response['Error']['Code'] in CODES_OF_NOTHING:
                return None
            raise StorageAway(f'HEAD: {error.response["Error"]["Code"]}') from error
        except BotoCoreError as error:
            raise StorageAway(f'HEAD: {type(error).__name__}') from error
        digest = head.get('ChecksumSHA256')
        return StoredObject(head['ContentLength'], base64.b64decode(digest).hex() if digest else None)

    def sha256_of(self, name: str) -> str:
        """Read an object and return its digest, hex.

        Raises:
            StorageAway.
        """
        from botocore.exceptions import BotoCoreError, ClientError

        digest = hashlib.sha256()
        try:
            for part in self.s3.get_object(Bucket=self.bucket, Key=self.key(name))['Body'].iter_chunks(1 << 20):
                digest.update(part)
        except (BotoCoreError, ClientError) as error:
            raise StorageAway(f'GET: {type(error).__name__}') from error
        return digest.hexdigest()

    def name_of(self, url: str) -> str | None:
        """The name below this folder of an object at `s3://...`; None if it lies elsewhere."""
        return url[len(self.url) + 1 :] if url.startswith(f'{self.url}/') else None


def _client(**options: Any) -> Any:
    import boto3
    from botocore.config import Config

    # Signatures of version 2 would leave the headers out. Path style, as a server of one's own has no name a bucket.
    config = Config(signature_version='s3v4', **options)
    return boto3.session.Session().client('s3', endpoint_url=os.environ.get('S3_ENDPOINT_URL'), config=config)
