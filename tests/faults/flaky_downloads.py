"""An S3 server on loopback that gives the files of a folder, and fails as it is told to."""

import threading
import time
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

HANG_SEC = 30


class FlakyDownloads(ThreadingHTTPServer):
    """`s3://bucket/NAME` is the file NAME of the folder.

    Args:
        folder: what is served.
        answer: of (name of the file, how many GETs there were of it before): a status to fail with, `cut` for half a body, `hang` for no
            answer, or None.
    """

    daemon_threads = True

    def __init__(self, folder: Path, answer: Callable[[str, int], int | str | None] = lambda name, before: None):
        super().__init__(('127.0.0.1', 0), _Handler)
        self.folder, self.answer, self.gets = folder, answer, Counter[str]()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def environment(self) -> dict[str, str]:
        return {
            'S3_ENDPOINT_URL': f'http://127.0.0.1:{self.server_address[1]}',
            'AWS_ACCESS_KEY_ID': 'test',
            'AWS_SECRET_ACCESS_KEY': 'test',
            'AWS_DEFAULT_REGION': 'us-east-1',
            'AWS_EC2_METADATA_DISABLED': 'true',
        }

    def handle_error(self, request, client_address):
        """Connections that are cut on purpose need no traceback."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'

    def do_HEAD(self) -> None:
        self._respond(None)

    def do_GET(self) -> None:
        name = self._name()
        before = self.server.gets[name]
        self.server.gets[name] += 1
        self._respond(self.server.answer(name, before))

    def _name(self) -> str:
        return self.path.partition('?')[0].removeprefix('/bucket/')

    def _respond(self, failure: int | str | None) -> None:
        if failure == 'hang':
            time.sleep(HANG_SEC)
        path = self.server.folder / self._name()
        status = failure if isinstance(failure, int) else 200 if path.is_file() else 404
        content = path.read_bytes() if status == 200 else b'<Error><Code>%s</Code></Error>' % (b'NoSuchKey' if status == 404 else b'SlowDown')
        self.send_response(status)
        self.send_header('content-length', str(len(content)))
        self.end_headers()
        if self.command == 'GET':
            self.wfile.write(content[: len(content) // 2] if failure == 'cut' else content)
            self.close_connection = failure == 'cut'

    def log_message(self, *_):
        pass
