"""The page and its server. Gradio makes HTML and scripts of fields and images, and queues the drawings; uvicorn answers until a signal ends it."""

import logging
import math
import os
import random
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from html import escape
from pathlib import Path
from socket import socket
from tempfile import TemporaryDirectory
from typing import Any

import fastapi
import gradio as gr
import uvicorn

from diffusion.common.pages import PALETTE
from diffusion.common.text import counted
from diffusion.contracts.errors import IncompleteError, InputError
from diffusion.serving.gate import JOIN, RUN, Gate, is_loopback, url_of
from diffusion.serving.image_server import (
    MAX_GUIDANCE,
    MAX_PROMPT_LETTERS,
    MAX_SEED,
    DrawingRequest,
    DrawnFiles,
    ImageServer,
    Limits,
    LoadedModel,
    Stopped,
    load,
    read_request,
)

CLOSING_SEC = 2  # at the end, for answers in progress; an open page holds one for as long as it is open
MAX_WAITING = 20  # drawings in the queue
PROGRESS = gr.Progress()  # Gradio finds it as the default of an argument
FONTS = ['system-ui', 'sans-serif']
THEME = gr.themes.Default(primary_hue='blue', neutral_hue='slate', font=FONTS, font_mono=['ui-monospace', 'monospace'])
CSS = f"""
:root {{ --problem: {PALETTE['bad'][0]} }}
.dark {{ --problem: {PALETTE['bad'][1]} }}
.problem {{ color: var(--problem); font-weight: 600 }}
.status {{ min-height: 4.5rem; overflow-wrap: anywhere }}
#status .pending {{ visibility: hidden }}
#status .progress-text {{ position: static; order: 1; padding: 0.25rem 0 0; transform: none }}
.gallery, .gallery .grid-wrap {{ height: auto !important; max-height: none !important }}
.gallery .grid-wrap {{ overflow: visible }}
.gallery .grid-container {{ grid-template: none / repeat(var(--grid-cols), minmax(0, 24rem)) !important; grid-auto-rows: auto }}
.named .grid-wrap {{ padding-top: 2rem }}
.small .grid-container {{ grid-template: none / repeat(var(--grid-cols), minmax(0, 12rem)) !important }}
.small img {{ image-rendering: pixelated }}
"""
SMALL_PX = 128  # images of fewer pixels are shown larger, as squares of pixels


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
        image_server = ImageServer(models, Path(folder), Limits(max_images, max_steps), batch_size)
        gate = application(build_page(image_server), is_loopback(bound.getsockname()[0]), image_server.stop)
        config = uvicorn.Config(
            gate, log_level='warning', access_log=False, server_header=False, timeout_graceful_shutdown=CLOSING_SEC, ws='none', lifespan='on'
        )
        bound.listen(128)  # who reads the next line may connect at once
        print(f'open {url_of(bound)} in a browser; Ctrl-C ends', flush=True)
        server = Server(config, image_server.closed.set, gate.is_alive)
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


def build_page(image_server: ImageServer) -> gr.Blocks:
    """The page of one model, or of two that draw the same request next to each other."""
    models, limits = image_server.models, image_server.limits
    sizes = {f'{width} × {height}': (width, height) for width, height in image_server.sizes()}
    own_size = f'{models[0].resolution} × {models[0].resolution}'

    def begin(request: gr.Request) -> tuple[Any, Any, str]:
        image_server.stops[str(request.session_hash)] = threading.Event()
        return gr.update(interactive=False), gr.update(interactive=True), _status()

    def run(
        prompt: Any, seed: Any, new_seed: Any, guidance: Any, steps: Any, num_images: Any, size: Any, request: gr.Request, progress: Any = PROGRESS
    ) -> Iterator[tuple[Any, ...]]:
        """Yield status, seed, and the images of each model: as they come, one model after another."""
        stop = image_server.stops.get(str(request.session_hash))
        if stop is None:  # while this waited
            yield _status('Stopped.'), gr.skip(), *(gr.skip() for _ in models)
            return
        shown: list[Any] = [gr.skip() for _ in models]
        seed = random.randrange(MAX_SEED - limits.num_images) if new_seed is True else seed
        lines = []
        try:
            if size is not None and size not in (own_size, *sizes):
                raise InputError(f'Width × height is {str(size)[:40]}; choose one of {", ".join((own_size, *sizes))}.')
            asked = read_request(prompt, seed, guidance, steps, num_images, sizes.get(str(size)), limits)
            yield _status(), asked.seed, *(None for _ in models)
            for i, model in enumerate(models):

                def on_step(done: int, steps: int, label: str = model.label) -> None:
                    progress((done, steps), desc=label if len(models) > 1 else 'drawing', unit='steps')

                drawn = image_server.draw(model, asked, stop, on_step)
                lines.append(_result(model, asked, drawn, named=len(models) > 1))
                shown[i] = gr.update(
                    value=[(str(file), f'seed {asked.seed + j}') for j, file in enumerate(drawn.files)],
                    columns=min(4, math.ceil(math.sqrt(asked.num_images))),
                )
                yield _status(*lines), asked.seed, *shown
                shown[i] = gr.skip()
        except Stopped:
            yield _status(*lines, 'Stopped.'), seed, *shown
        except InputError as error:
            yield _status(*lines, problem=str(error)), gr.skip(), *shown
        except Exception:
            traceback.print_exc(file=sys.stderr)
            yield _status(*lines, problem='The drawing failed. The terminal that runs the server says why.'), gr.skip(), *shown

    def end() -> tuple[Any, Any]:
        return gr.update(interactive=True), gr.update(interactive=False)

    def stop(request: gr.Request) -> None:
        image_server.stop(str(request.session_hash))

    with gr.Blocks(title=f'Try {" and ".join(model.label for model in models)}', analytics_enabled=False) as page:
        gr.Markdown(_heading(models))
        with gr.Row():
            with gr.Column(scale=1, min_width=300):
                prompt = gr.Textbox(label='Prompt', lines=3, max_length=MAX_PROMPT_LETTERS, autofocus=True, elem_id='prompt')
                with gr.Row():
                    draw = gr.Button('Draw', variant='primary', min_width=100, elem_id='draw')
                    cancel = gr.Button('Stop', interactive=False, min_width=100, elem_id='stop')
                num_images = gr.Slider(1, limits.num_images, value=min(4, limits.num_images), step=1, label='Images', elem_id='images')
                with gr.Group():
                    seed = gr.Number(label='Seed of the first image', value=0, elem_id='seed')
                    new_seed = gr.Checkbox(label='A new seed each time', elem_id='new-seed')
                guidance = gr.Slider(1, MAX_GUIDANCE, value=models[0].guidance, step=0.1, label='Guidance', elem_id='guidance')
                steps = gr.Slider(1, limits.steps, value=min(models[0].steps, limits.steps), step=1, label='Steps', elem_id='steps')
                size = gr.Dropdown([own_size, *sizes], value=own_size, label='Width × height', visible=bool(sizes), elem_id='size')
            with gr.Column(scale=3, min_width=300):
                status = gr.HTML(_status(), elem_id='status')
                with gr.Row():
                    galleries = [_gallery(model, i, len(models)) for i, model in enumerate(models)]
        inputs = [prompt, seed, new_seed, guidance, steps, num_images, size]
        for field in inputs:  # Gradio's own checks end in tracebacks and name no field: `read_request` has them all
            field.preprocess = lambda payload: payload  # type: ignore[method-assign]
        begun = gr.on([draw.click, prompt.submit], begin, None, [draw, cancel, status], queue=False, show_progress='hidden', api_visibility='private')
        drawn = begun.then(
            run, inputs, [status, seed, *galleries], concurrency_limit=1, show_progress_on=status, api_visibility='private', scroll_to_output=True
        )
        drawn.then(end, None, [draw, cancel], queue=False, show_progress='hidden', api_visibility='private')
        cancel.click(stop, None, None, queue=False, show_progress='hidden', api_visibility='private')
    return page.queue(max_size=MAX_WAITING, api_open=False)


def _gallery(model: LoadedModel, number: int, num_models: int) -> gr.Gallery:
    classes = ['gallery', *['small'] * (model.resolution < SMALL_PX), *['named'] * (num_models > 1)]
    return gr.Gallery(
        label=model.label, show_label=num_models > 1, columns=2, height='auto', object_fit='contain', interactive=False, min_width=280,
        buttons=['download', 'fullscreen'], elem_id=f'gallery{number}', elem_classes=classes,
    )  # fmt: skip


def _heading(models: Sequence[LoadedModel]) -> str:
    lines = list[str]()
    for model in models:
        name = f'**{escape(model.label)}**: ' if len(models) > 1 else ''
        lines.append(
            f'{name}{model.family.pipeline_class.__name__}, {model.resolution} × {model.resolution} pixels; '
            f'its recipe draws with guidance {model.guidance:g} and {counted(model.steps, "step")}. On {model.device}.'
        )
    if len({model.latent_shape for model in models}) > 1:
        lines.append('The models have latents of different shapes: the same seed gives different noise.')
    title = ' and '.join(escape(model.label) for model in models)
    return f'# {title}\n\n' + '<br>'.join(lines)


def _result(model: LoadedModel, request: DrawingRequest, drawn: DrawnFiles, named: bool) -> str:
    name = f'{model.label}: ' if named else ''
    number = counted(request.num_images, 'image')
    unread = model.num_unread_tokens(request.prompt)
    cut = f' The end of the prompt, {counted(unread, "token")}, was not read: it is too long for the text encoder.' if unread else ''
    return f'{name}{number} in {drawn.elapsed_sec:.1f} s ({drawn.elapsed_sec / request.num_images:.1f} s an image).{cut}'


def _status(*lines: str, problem: str | None = None) -> str:
    parts = [f'<div>{escape(line)}</div>' for line in lines]
    if problem is not None:
        parts.append(f'<div class="problem" role="alert">{escape(problem)}</div>')
    return f'<div class="status" aria-live="polite">{"".join(parts)}</div>'
