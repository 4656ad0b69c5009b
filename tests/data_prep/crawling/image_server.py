"""A web server on this host that behaves in all the ways that crawlers meet."""

import gzip
import io
import threading
from collections import Counter
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

from PIL import Image

TRICKLE = 0.05  # seconds between bytes
LATE = 0.3  # seconds before an answer


def image_bytes(number: int, kind: str = 'JPEG') -> bytes:
    buffer = io.BytesIO()
    Image.new('RGB', (20, 20), (number * 7 % 256, number % 256, 90)).save(buffer, kind)
    return buffer.getvalue()


class ImageServer(ThreadingHTTPServer):
    """`/7.jpg`, `/7.png` and `/7.webp` are images; `handle` below lists the other paths."""

    def __init__(self):
        super().__init__(('127.0.0.1', 0), Handler)
        self.asked = Counter()
        """Requests by path."""
        self.repaired = False
        """Whether /broken/7.jpg is an image, not an error."""
        self.held = threading.Event()
        """Set when somebody asks for a /hold/ image."""
        self.released = threading.Event()
        """Set by the test to answer those."""

    @property
    def url(self) -> str:
        return f'http://127.0.0.1:{self.server_port}'


class Handler(BaseHTTPRequestHandler):
    server: ImageServer

    def log_message(self, *_):
        pass

    def do_GET(self):
        path = urlsplit(self.path).path
        self.server.asked[path] += 1
        with suppress(BrokenPipeError, ConnectionResetError):
            self.answer(path)

    def answer(self, path):
        first, *rest = path.strip('/').split('/')
        if first == 'hold':
            self.server.held.set()
            self.server.released.wait(60)
        match first:
            case 'page':
                self.send(b'<html>for sale</html>', {'Content-Type': 'image/jpeg'})
            case 'empty':
                self.send(b'')
            case 'half':
                self.send(image_bytes(1)[:-200])
            case 'cut':
                self.send(image_bytes(1), {'Content-Length': '5000'})
            case 'gzip':
                self.send(gzip.compress(image_bytes(1), mtime=0), {'Content-Encoding': 'gzip'})
            case 'noai':
                self.send(image_bytes(1), {'X-Robots-Tag': 'noai'})
            case 'megabytes':
                self.send(image_bytes(1) + bytes(int(rest[0]) << 20))
            case 'endless':
                self.send(image_bytes(1), length=False)
                while True:
                    self.wfile.write(bytes(1 << 16))
            case 'slow':
                self.send(image_bytes(1), {'Content-Length': '5000'})
                while True:
                    self.wfile.write(b'x')
                    threading.Event().wait(TRICKLE)
            case 'slow-headers':
                self.wfile.write(b'HTTP/1.0 200 OK\r\nX-Slow: ')
                while True:
                    self.wfile.write(b'x')
                    threading.Event().wait(TRICKLE)
            case 'to':  # /to/LOCATION
                self.send(b'', {'Location': self.path.removeprefix('/to/')}, code=302)
            case 'hops':  # /hops/2: that many redirects to an image
                left = int(rest[0])
                self.send(b'', {'Location': f'/hops/{left - 1}' if left > 1 else '/1.jpg'}, code=302)
            case 'late-hops':
                threading.Event().wait(LATE)
                self.send(b'', {'Location': f'/late-hops/{int(rest[0]) - 1}' if rest[0] != '1' else '/1.jpg'}, code=302)
            case 'broken' if not self.server.repaired:
                self.send(b'', code=503)
            case _:
                number, _, kind = path.rpartition('/')[2].partition('.')
                if number.isdigit() and kind in ('jpg', 'png', 'webp'):
                    self.send(image_bytes(int(number), {'jpg': 'JPEG'}.get(kind, kind.upper())))
                else:
                    self.send(b'', code=404)

    def send(self, content, headers=None, code=200, length=True):
        self.send_response(code)
        for name, value in {**({'Content-Length': str(len(content))} if length else {}), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)


@contextmanager
def running(server):
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        if isinstance(server, ImageServer):
            server.released.set()
        server.shutdown()
        thread.join()
        server.socket.close()
