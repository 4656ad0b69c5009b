"""A service of the protocol in one process: jobs in a list, objects in a dictionary, and whatever goes wrong on request."""

import base64
import hashlib
import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

TOKEN, NODE_TOKEN = 'pool-token-of-the-test', 'node-token-of-the-test'
SIGNATURE = 'X-Amz-Signature=5ecret5ignature'


class FakeService(ThreadingHTTPServer):
    """Args:
    jobs: leases to hand out in turn, without addresses; `inputs` and so on name objects.
    fails: asked for each request (method, path); returns a status to answer with instead, `cut` to close the connection, or None.
    """

    daemon_threads = True

    def __init__(self, jobs: list[dict[str, Any]], **times: float):
        super().__init__(('127.0.0.1', 0), _Handler)
        self.jobs = jobs
        self.times = {'lease_sec': 5.0, 'renew_sec': 0.3, 'poll_sec': 0.2, 'grace_sec': 2.0, **times}
        self.fails: Callable[[str, str], int | str | None] = lambda method, path: None
        self.objects: dict[str, bytes] = {}
        self.leases: dict[str, int] = {}  # job: epoch that may write
        self.action = 'continue'
        self.retry_after: int | None = None
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.checkpoints: dict[str, dict[str, Any]] = {}
        self.ended: dict[str, dict[str, Any]] = {}
        self.expired: set[str] = set()  # addresses by object
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f'http://127.0.0.1:{self.server_address[1]}'

    def handle_error(self, request, client_address):
        """Connections that are cut on purpose need no traceback."""

    def put(self, key: str, content: bytes) -> dict[str, Any]:
        self.objects[key] = content
        return self.described(key)

    def described(self, key: str) -> dict[str, Any]:
        content = self.objects[key]
        return {'key': key, 'sha256': hashlib.sha256(content).hexdigest(), 'bytes': len(content)}

    def asked(self, path: str) -> list[dict[str, Any]]:
        """Bodies of the requests whose path ends so."""
        return [body for where, body in self.requests if where.endswith(path)]

    def signed(self, files: dict[str, Any]) -> dict[str, Any]:
        return {
            name: {
                'url': f'{self.url}/o/{file["key"]}?fresh={len(self.asked("/inputs"))}&{SIGNATURE}',
                'sha256': file['sha256'],
                'bytes': file['bytes'],
            }
            for name, file in files.items()
        }

    def addresses(self, lease: dict[str, Any]) -> dict[str, Any]:
        checkpoint = self.checkpoints.get(lease['job']) or lease.get('checkpoint')
        return {
            'inputs': self.signed(lease.get('inputs', {})),
            'model': {'files': self.signed(lease['model'])} if lease.get('model') else None,
            'checkpoint': {'step': checkpoint['step'], 'files': self.signed(checkpoint['files'])} if checkpoint else None,
        }

    def answer(self, path: str, token: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if path == '/enroll':
            if token != TOKEN:
                return 401, {'error': 'no such token'}
            return 200, {'node': body['machine'], 'token': NODE_TOKEN, **self.times}
        if token != NODE_TOKEN:
            return 401, {'error': 'no such token'}
        if path == '/leave':
            return 200, {}
        if path == '/claim':
            if not self.jobs:
                return 204, {}
            lease = self.jobs.pop(0)
            self.leases[lease['job']] = lease['epoch']
            self.current = lease
            return 200, {**lease, **self.addresses(lease)}
        _, _, job, what = path.split('/')
        if self.leases.get(job) != body['epoch']:
            return 409, {'error': f'attempt {body["epoch"]} is over'}
        prefix = f'owners/o/jobs/{job}/e{body["epoch"]}'
        if what == 'renew':
            return 200, {'action': self.action, 'reason': ''}
        if what == 'inputs':
            return 200, self.addresses(self.current)
        if what == 'urls':
            folder = 'result' if body['step'] is None else f's{body["step"]}'
            return 200, {'files': {name: self._put_address(f'{prefix}/{folder}/{name}', file) for name, file in body['files'].items()}}
        if what == 'publish':
            return self._publish(job, f'{prefix}/s{body["step"]}', body)
        if what == 'end':
            wrong = self._differing(f'{prefix}/result', body['files'])
            if wrong:
                return 422, {'error': f'{wrong} is missing or differs'}
            self.ended[job] = body
            del self.leases[job]
            return 200, {}
        return 404, {'error': 'no such path'}

    def _put_address(self, key: str, file: dict[str, Any]) -> dict[str, Any]:
        checksum = base64.b64encode(bytes.fromhex(file['sha256'])).decode()
        headers = {'If-None-Match': '*', 'x-amz-checksum-sha256': checksum, 'content-length': str(file['bytes'])}
        return {'url': f'{self.url}/o/{key}?{SIGNATURE}', 'headers': headers}

    def _publish(self, job: str, folder: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        wrong = self._differing(folder, body['files'])
        if wrong:
            return 422, {'error': f'{wrong} is missing or differs'}
        self.checkpoints[job] = {'step': body['step'], 'files': {name: self.described(f'{folder}/{name}') for name in body['files']}}
        return 200, {}

    def _differing(self, folder: str, files: dict[str, Any]) -> str:
        for name, file in files.items():
            content = self.objects.get(f'{folder}/{name}')
            if content is None or (hashlib.sha256(content).hexdigest(), len(content)) != (file['sha256'], file['bytes']):
                return name
        return ''

    def store(self, method: str, path: str, headers: Any, body: bytes) -> tuple[int, bytes]:
        key, query = path.removeprefix('/o/').partition('?')[0], parse_qs(urlsplit(path).query)
        if SIGNATURE not in path or (key in self.expired and query.get('fresh') == ['0']):
            return 403, b'<Error><Code>AccessDenied</Code></Error>'
        if method == 'GET':
            content = self.objects.get(key)
            return (404, b'') if content is None else (200, content)
        if headers.get('If-None-Match') != '*' or 'Transfer-Encoding' in headers or 'Authorization' in headers:
            return 403, b'<Error><Code>SignatureDoesNotMatch</Code></Error>'
        if base64.b64decode(headers['x-amz-checksum-sha256']) != hashlib.sha256(body).digest():
            return 400, b'<Error><Code>BadDigest</Code></Error>'
        if key in self.objects:
            return 412, b''
        self.objects[key] = body
        return 200, b''


class _Handler(BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'

    def handle_it(self):
        service: FakeService = self.server
        body = self.rfile.read(int(self.headers.get('content-length') or 0))
        path = self.path.partition('?')[0]
        failure = service.fails(self.command, path)
        if path.startswith('/o/'):
            status, content = service.store(self.command, self.path, self.headers, body) if failure is None else (failure, b'')
        else:
            service.requests.append((path, json.loads(body or b'{}')))
            token = self.headers.get('Authorization', '').removeprefix('Bearer ')
            if failure is None:
                status, answer = service.answer(path, token, json.loads(body))
            else:
                status, answer = failure, {'error': 'on purpose'}
            content = b'' if status == 204 else json.dumps(answer).encode()
        if failure == 'cut':
            self.close_connection = True
            self.connection.close()
            return
        self.send_response(status)
        if service.retry_after is not None and status in (204, 503):
            self.send_header('Retry-After', str(service.retry_after))
        self.send_header('content-length', str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_PUT = do_POST = handle_it

    def log_message(self, *_):
        pass
