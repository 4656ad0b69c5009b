"""The server: loads models, builds the page, and answers until a signal ends it."""

import logging
import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from socket import socket
from tempfile import TemporaryDirectory
from typing import Any

import fastapi
import gradio as gr
import uvicorn

from diffusion.contracts.errors import IncompleteError
from diffusion.serving.gate import JOIN, RUN, Gate, is_loopback, url_of
from diffusion.serving.page import CSS, THEME, build_page
from diffusion.serving.studio import Limits, Studio, load

CLOSING_SEC = 2  # at the end, for answers in progress; an open page holds one for as long as it is open


def serve(folders: Sequence[Path], base: str | None, precision: str | None, max_images: int, max_steps: int, batch_size: int, bound: socket) -> None:
    """Serve models until SIGINT or SIGTERM, which are raised again once the drawing in progress has stopped.

    Args:
        base: where the model that an adapter belongs to is now, if it has moved.
        precision: `fp32` or `bf16`; None takes `precision_on` the device.
        bound: where to listen.

    Raises:
        EncoderError: a model cannot be loaded.
        IncompleteError: Gradio's queue has ended, so that nothing would be drawn any more.
    """
    warnings.filterwarnings('ignore', module=r'gradio\.')  # of constants of Starlette that it will have to rename
    models = load(folders, base, precision)
    with TemporaryDirectory(prefix='diffusion-serve-', ignore_cleanup_errors=True) as folder:  # a drawing may still write into it
        os.environ['GRADIO_TEMP_DIR'] = folder  # the only folder whose files Gradio hands out
        studio = Studio(models, Path(folder), Limits(max_images, max_steps), batch_size)
        gate = application(build_page(studio), is_loopback(bound.getsockname()[0]), studio.stop)
        config = uvicorn.Config(
            gate, log_level='warning', access_log=False, server_header=False, timeout_graceful_shutdown=CLOSING_SEC, ws='none', lifespan='on'
        )
        bound.listen(128)  # who reads the next line may connect at once
        print(f'open {url_of(bound)} in a browser; Ctrl-C ends', flush=True)
        server = Server(config, studio.closed.set, gate.is_alive)
        server.run(sockets=[bound])
        if server.has_failed:
            raise IncompleteError('the queue of drawings has ended, by an error of Gradio: nothing could be drawn any more; start the server again')


class Server(uvicorn.Server):
    """uvicorn's server, which also ends with the queue of drawings.

    Args:
        on_end: called at the first SIGINT or SIGTERM, or when the queue has ended, before open connections are closed.
        is_alive: whether drawings still leave the queue; if not, the server ends, and `has_failed`: pages would wait for ever.
    """

    def __init__(self, config: uvicorn.Config, on_end: Callable[[], object], is_alive: Callable[[], bool]):
        super().__init__(config)
        self.has_failed = False
        self._on_end = on_end
        self._is_alive = is_alive

    def handle_exit(self, sig: int, frame: Any) -> None:
        self._end()
        super().handle_exit(sig, frame)

    async def on_tick(self, counter: int) -> bool:
        if not self.should_exit and not self._is_alive():
            self.has_failed = self.should_exit = True
            self._end()
        return await super().on_tick(counter)

    def _end(self) -> None:
        logging.getLogger('uvicorn.error').setLevel(logging.CRITICAL)  # it writes a traceback for each open page, whose answer is broken off
        self._on_end()


def application(page: gr.Blocks, only_here: bool, on_leave: Callable[[str], object]) -> Gate:
    """Return a page as an application behind its gate (see there for the arguments)."""
    app = gr.mount_gradio_app(
        fastapi.FastAPI(docs_url=None, redoc_url=None, openapi_url=None), page, '/', footer_links=[], show_error=False,
        ssr_mode=False, pwa=False, mcp_server=False, enable_monitoring=False, theme=THEME, css=CSS,
    )  # fmt: skip
    calls = {(JOIN if fn.queue else RUN, index): len(fn.inputs) for index, fn in page.fns.items()}
    return Gate(app, only_here, on_leave, calls, is_alive=lambda: not page._queue.stopped)
