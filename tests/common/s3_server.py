"""An S3 server on loopback, and a proxy before it that fails when told to."""

import base64
import hashlib
import threading
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import boto3
from moto.server import ThreadedMotoServer

BUCKET = 'bucket'
CONDITIONS = ('if-match', 'if-none-match')


class FlakyProxy(ThreadingHTTPServer):
    """Forwards to a server, unless `fails(method, path)` says to answer 503 (True) or another status, to cut the connection ('cut') or to do
    what is asked and answer 503 all the same ('lose'), or to answer 200 with these bytes.
    """

    daemon_threads = True

    def __init__(self, port: int):
        super().__init__(('127.0.0.1', 0), Handler)
        self.target_port = port
        self.fails = lambda method, path: False
        self.conditional = False  # whether the request that `fails` is asked about has a condition
        self.ignores_conditions = False  # as a store that knows none
        self.ignores_digests = False  # as a store that keeps whatever comes
        self.num_failures = 0
        self.requests: list[tuple[str, str]] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f'http://127.0.0.1:{self.server_address[1]}'

    def handle_error(self, request, client_address):
        """Connections that are cut on purpose need no traceback."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'

    def forward(self):
        server: FlakyProxy = self.server
        server.requests.append((self.command, self.path))
        body = self.rfile.read(int(self.headers.get('content-length') or 0))
        server.conditional = any(name.lower() in CONDITIONS for name in self.headers)
        failure = server.fails(self.command, self.path)
        said = self.headers.get('x-amz-checksum-sha256')  # which moto takes as it is
        if said and self.command == 'PUT' and base64.b64decode(said) != hashlib.sha256(body).digest() and not server.ignores_digests:
            self.answer(400, [], b'<Error><Code>BadDigest</Code></Error>')
            return
        if failure == 'lose':
            self.ask(body)
        if failure == 'cut' and self.command == 'GET':
            server.num_failures += 1
            status, headers, content = self.ask(body)
            self.answer(status, headers, content[: len(content) // 2], len(content))
            self.close_connection = True
        elif isinstance(failure, bytes):
            server.num_failures += 1
            self.answer(200, [('content-type', 'text/html')], failure)
        elif failure:
            server.num_failures += 1
            status = 503 if failure in (True, 'cut', 'lose') else failure
            code = {403: b'AccessDenied', 501: b'NotImplemented'}.get(status, b'SlowDown')
            self.answer(status, [], b'<Error><Code>%s</Code></Error>' % code)
        else:
            self.answer(*self.ask(body))

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = forward

    def ask(self, body):
        connection = HTTPConnection('127.0.0.1', self.server.target_port, timeout=30)
        dropped = ('connection', 'expect', *(CONDITIONS if self.server.ignores_conditions else ()))
        headers = {name: value for name, value in self.headers.items() if name.lower() not in dropped}
        connection.request(self.command, self.path, body, headers)
        answer = connection.getresponse()
        content = answer.read()
        kept = [
            (name, value)
            for name, value in answer.getheaders()
            if name.lower() not in ('transfer-encoding', 'connection', 'content-length', 'date', 'server')
        ]
        if self.command == 'HEAD':
            kept.append(('content-length', answer.getheader('content-length') or '0'))
        return answer.status, kept, content

    def answer(self, status, headers, content, length=None):
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        if not any(name.lower() == 'content-length' for name, _ in headers):
            self.send_header('content-length', str(len(content) if length is None else length))
        self.end_headers()
        if self.command != 'HEAD':
            self.wfile.write(content)
            self.wfile.flush()

    def log_message(self, *_):
        pass


class S3Server:
    """moto behind a FlakyProxy, with one bucket."""

    def __init__(self):
        self.moto = ThreadedMotoServer(ip_address='127.0.0.1', port=0, verbose=False)
        self.moto.start()
        _, port = self.moto.get_host_and_port()
        self.proxy = FlakyProxy(port)
        self.environment = {
            'S3_ENDPOINT_URL': self.proxy.url,
            'AWS_ACCESS_KEY_ID': 'test',
            'AWS_SECRET_ACCESS_KEY': 'test',
            'AWS_DEFAULT_REGION': 'us-east-1',
            'AWS_EC2_METADATA_DISABLED': 'true',
        }

    def client(self):
        return boto3.client('s3', endpoint_url=f'http://127.0.0.1:{self.proxy.target_port}')

    def object_names(self, prefix: str = '') -> list[str]:
        pages = self.client().get_paginator('list_objects_v2').paginate(Bucket=BUCKET, Prefix=prefix)
        return [item['Key'] for page in pages for item in page.get('Contents', [])]

    def empty(self) -> None:
        for key in self.object_names():
            self.client().delete_object(Bucket=BUCKET, Key=key)
        self.proxy.fails = lambda method, path: False
        self.proxy.num_failures = 0
        self.proxy.ignores_digests = False
        self.proxy.requests.clear()

    def stop(self) -> None:
        self.proxy.shutdown()
        self.moto.stop()
