"""FLOP and hours of an evaluation before it draws: `evaluate --plan`."""

import math
import time
from collections.abc import Sequence
from datetime import timedelta

import torch
from torch.utils.flop_counter import FlopCounterMode

from diffusion.common.text import counted
from diffusion.cost.facts import drawing_flop
from diffusion.cost.formulas import SEC_PER_HOUR
from diffusion.cost.hardware import device_name, peak_flops
from diffusion.encoders.pretrained import load_config
from diffusion.evaluation.job.images import open_images, read_prompts_file
from diffusion.evaluation.job.models import DrawingModel, find_model
from diffusion.evaluation.job.parts import SUFFIXES_OF_STATISTICS
from diffusion.evaluation.job.preparing import EvaluationJob, num_samples
from diffusion.evaluation.job.request import DEFAULT_GUIDANCE, DEFAULT_SAMPLES, DEFAULT_STEPS, EvaluationRequest

ASSUMED_FLOP_PER_SEC = 125e12
ASSUMED_SHARE = 0.4  # of a device's peak
SIDE = 1024  # of the matrices that measure it


def plan(request: EvaluationRequest) -> str:
    """Return text for the terminal, from counting one pass of the model's networks on the meta device.

    Raises:
        InputError, EncoderError: there is no such model, or more images are asked for than there are prompts.
        DataError: the named data cannot be read.
    """
    model = find_model(request.model, request.out, request.revision, request.base)
    pass_flop, decode_flop = count(model, request.choice('resolution', None) or model.resolution)
    if request.prompts is not None:
        samples = num_samples(request, len(read_prompts_file(request.prompts)), str(request.prompts), 'prompt')
    elif not request.data or request.data.endswith(SUFFIXES_OF_STATISTICS):  # a plan can do without data
        samples = request.choice('samples', DEFAULT_SAMPLES)
    else:
        images = open_images(request.data)
        samples = num_samples(request, len(images), images.where, 'image')
    guidance, steps = request.choice('guidance', DEFAULT_GUIDANCE), request.choice('steps', DEFAULT_STEPS)
    flop = drawing_flop(samples, guidance, steps, pass_flop, decode_flop)
    hours = flop / ASSUMED_FLOP_PER_SEC / SEC_PER_HOUR
    return '\n'.join(
        [
            f'{counted(samples, "image")} at guidance {", ".join(f"{scale:g}" for scale in guidance)}, {counted(steps, "step")}',
            f'{pass_flop / 1e12:,.3g} TFLOP a pass of the denoiser, {decode_flop / 1e12:,.3g} TFLOP to decode an image',
            f'{flop:.2e} FLOP in all: {hours:,.3g} GPU-hours at an assumed {ASSUMED_FLOP_PER_SEC / 1e12:.0f} TFLOP/s '
            '(40 % of the bf16 peak of an A100); feature networks are not counted',
        ]
    )


def count(model: DrawingModel, resolution: int) -> tuple[int, int]:
    """FLOP of a forward pass of the denoiser, and of decoding, of one image (1 MAC = 2 FLOP)."""
    (source, revision), family, side = model.layout, model.family, resolution // model.downsampling
    kind = family.pipeline_parts[family.component][0]
    config, vae_config = (
        {name: value for name, value in load_config(part, source, revision, folder).items() if name != 'self'}
        for part, folder in ((kind, family.component), (model.vae.kind, 'vae'))
    )
    length = family.find_text(source, revision).length
    with torch.device('meta'), torch.no_grad():
        network, vae = kind.from_config(config), model.vae.kind.from_config(vae_config)  # type: ignore[attr-defined]
        with FlopCounterMode(display=False) as passed:
            family.denoise(network, *family.example(config, 1, (side, side), length))
        with FlopCounterMode(display=False) as decoded:
            own_side = resolution // 2 ** (len(vae_config['block_out_channels']) - 1)
            vae.decode(torch.empty(1, vae_config['latent_channels'], own_side, own_side))
    return passed.get_total_flops(), decoded.get_total_flops()


def announcement(jobs: Sequence[EvaluationJob], device: torch.device, num_processes: int) -> str:
    """Say how many images will be drawn, at each scale of guidance, and for about how long; empty if all of them are there."""
    left_sec, num_images, texts = 0.0, 0, list[str]()
    for job in jobs:
        protocol, missing = job.protocol, job.missing()
        flop = drawing_flop(protocol.samples, protocol.guidance, protocol.steps, *count(job.model, protocol.resolution))
        num_images += sum(job.chunk_size(number) for _, number in missing)
        left_sec += flop / flop_per_sec(device) * len(missing) / len(job.work()) / num_processes
        scales = ', '.join(f'{scale:g}' for scale in protocol.guidance)
        texts.append(f'{counted(protocol.samples, "image")} at each guidance scale of {scales}, {counted(protocol.steps, "step")}')
    if not num_images:
        return ''
    how = f'if drawing reaches {ASSUMED_SHARE:.0%} of the peak; feature networks are not counted'
    return f'evaluate: draws {counted(num_images, "image")} ({"; ".join(texts)}): about {timedelta(seconds=math.ceil(left_sec))}, {how}'


def flop_per_sec(device: torch.device) -> float:
    """FLOP/s that drawing is assumed to reach: a share of a GPU's peak in bf16, or of what a matrix product reaches here in float32."""
    peak = peak_flops(device_name()) if device.type == 'cuda' else None
    if peak is None:
        matrix, times = torch.ones(SIDE, SIDE, device=device), list[float]()
        for _ in range(3):  # the first one loads libraries
            start = time.monotonic()
            (matrix @ matrix)[0, 0].item()
            times.append(time.monotonic() - start)
        peak = 2 * SIDE**3 / min(times)
    return ASSUMED_SHARE * peak
