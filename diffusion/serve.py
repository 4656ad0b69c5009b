"""A page in the browser to try a model, or to compare two.

    python -m diffusion.serve MODEL [MODEL2] [--port 7860] [--base FOLDER]

The page asks for a prompt, seed, guidance, steps and the number of images, and shows what diffusion.generate draws with them, to the
byte. Two models draw the same prompt from the same seed, side by side. Downloaded images have prompt, seed, guidance, steps, precision and model
inside. One drawing at a time; others wait for it, or stop theirs. MODEL may also be an exported adapter (--base as for diffusion.generate).

It listens on this machine only. With --host others can reach it: there is no password and no encryption, so put a proxy with both in front.

Exit codes: 0 ended by SIGTERM; 2 a model cannot be opened, the port is taken, or the extra `serve` is not installed; 3 the queue of drawings has
ended by an error of Gradio: start it again; 130 ended by Ctrl-C.
"""

import importlib.util
import os
import signal
import sys
from pathlib import Path
from typing import Annotated

from pydantic import Field, PositiveInt

from diffusion.common.command_line import Arguments, Precision, option, positional
from diffusion.common.processes import quick_imports
from diffusion.contracts.errors import INTERRUPTED, InputError, refuse_no_model, run_command

LOOPBACK = '127.0.0.1'
EXTRA = "uv pip install -e '.[serve]'"


class ServeRequest(Arguments):
    """Models to try, and who may ask for how much."""

    models: list[Path] = positional('MODEL', 'folder that diffusion.export wrote, or a published model of a known family; one or two')
    base: str | None = option(None, 'where the model that an exported adapter belongs to is, if it has moved', 'FOLDER')
    host: str = option(LOOPBACK, f'address to listen at (default {LOOPBACK}: this machine only; 0.0.0.0: everybody)')
    port: Annotated[int, Field(ge=0, le=65535)] = option(7860, '0 takes a free one and prints it')
    precision: Precision | None = option(None, 'of weights and arithmetic (default: bf16 on a GPU, fp32 without one)')
    batch_size: PositiveInt = option(16, 'images drawn together')
    max_images: PositiveInt = option(16, 'images that a visitor may ask for at once')
    max_steps: PositiveInt = option(150, 'sampling steps that a visitor may ask for')


def main() -> int:
    args = ServeRequest.parse('diffusion.serve', __doc__)

    def work() -> None:
        if len(args.models) > 2:
            raise InputError(f'{len(args.models)} models; give one, or two to compare')
        for model in args.models:
            refuse_no_model(model)
        if importlib.util.find_spec('gradio') is None:
            raise InputError(f'the page needs Gradio, which is not installed: {EXTRA}')
        os.environ['GRADIO_ANALYTICS_ENABLED'] = 'False'  # read when Gradio is imported
        os.environ['HF_HUB_DISABLE_TELEMETRY'] = '1'
        from diffusion.serving.gate import is_loopback, listen

        with listen(args.host, args.port) as bound:
            if not is_loopback(args.host):
                print(f'warning: all who reach {args.host} can draw with this machine; there is no password and no encryption', file=sys.stderr)
            with quick_imports():  # of torch, so after the arguments are read
                from diffusion.serving.server import serve

            # Over the handler that Composer installs when it is imported; uvicorn raises the signal again once it has ended.
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
            serve(args.models, args.base, args.precision, args.max_images, args.max_steps, args.batch_size, bound)

    try:
        return run_command(work, also=(OSError,))
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == '__main__':
    raise SystemExit(main())
