"""Gradio's own queue behind the gate: no request ends it, and the server does not outlive it."""

import html
import threading
import time
from types import SimpleNamespace

import pytest
from starlette.testclient import TestClient

pytest.importorskip('gradio', reason="needs Gradio: uv pip install -e '.[serve]'")
from gradio.queueing import Queue

from diffusion.contracts.errors import IncompleteError
from diffusion.serving import server
from diffusion.serving.gate import JOIN, listen
from diffusion.serving.image_server import Limits
from diffusion.serving.server import build_page

LIMITS = Limits(num_images=4, steps=10)
MODEL = SimpleNamespace(
    label='model',
    resolution=32,
    guidance=4.0,
    steps=3,
    device='the CPU',
    latent_shape=(4, 4),
    num_unread_tokens=len,
    family=SimpleNamespace(pipeline_class=dict),
)


@pytest.mark.parametrize(
    ('data', 'said'),
    [
        (['x', 1, False, 'a', 3, 1, None], 'Guidance is a; give a number from 1 to 30.'),
        (['x', 1, False, 4, 10**6, 1, None], f'Steps is 1000000; give a whole number from 1 to {LIMITS.steps}.'),
        (['x', 1, False, 4, 3, 0, None], f'Images is 0; give a whole number from 1 to {LIMITS.num_images}.'),
        (['x', 1, False, 4, 3, 1, '33 x 1'], 'Width × height is 33 x 1; choose one of 32 × 32.'),
    ],
)
def test_values_that_no_visitor_can_choose_get_the_words_of_the_page(data, said, capsys):
    """Gradio's own checks wrote a traceback for each, and told the visitor nothing or no name."""
    page = build_page(SimpleNamespace(models=[MODEL], limits=LIMITS, stops={'one': threading.Event()}, sizes=list))
    (fn,) = [fn for fn in page.fns.values() if fn.queue]
    values = [field.preprocess(value) for field, value in zip(fn.inputs, data, strict=True)]
    shown, *_ = fn.fn(*values, SimpleNamespace(session_hash='one'))
    assert said in html.unescape(shown[0])
    assert capsys.readouterr().err == ''


def test_requests_without_a_session_do_not_end_the_queue():
    """Three of them, while an image is drawn, ended it: all later drawings got 503, while the page answered 200."""
    may_end, drawn = threading.Event(), []

    def draw(model, request, stop, on_step):
        assert may_end.wait(60)
        drawn.append(request.prompt)
        return SimpleNamespace(files=[], elapsed_sec=1.0)

    image_server = SimpleNamespace(models=[MODEL], limits=LIMITS, stops={}, sizes=list, draw=draw)
    page = build_page(image_server)
    (index,) = [index for index, fn in page.fns.items() if fn.queue]

    def join(client, session):
        image_server.stops[session] = threading.Event()
        return client.post(JOIN, json={'session_hash': session, 'fn_index': index, 'data': [f'for {session}', 1, False, 4, 3, 1, None]}).status_code

    with TestClient(server.application(page, only_here=True, on_leave=print), base_url='http://127.0.0.1', raise_server_exceptions=False) as client:
        assert join(client, 'first') == 200
        assert [join(client, '') for _ in range(3)] == [400] * 3
        assert client.get('/gradio_api/startup-events').status_code == 404  # would start a second queue, which forgets the drawing in progress
        may_end.set()
        assert join(client, 'second') == 200
        end = time.monotonic() + 60
        while len(drawn) < 2:
            assert time.monotonic() < end
            time.sleep(0.05)
        assert drawn == ['for first', 'for second']
        assert client.get('/health').status_code == 200


def test_the_server_ends_when_its_queue_has_ended(monkeypatch):
    async def end(queue):
        queue.stopped = True

    monkeypatch.setattr(Queue, 'start_processing', end)
    monkeypatch.setattr(server, 'load', lambda *_: [MODEL])
    with listen('127.0.0.1', 0) as bound, pytest.raises(IncompleteError, match='start the server again'):
        server.serve([], None, None, *LIMITS, 1, bound)
