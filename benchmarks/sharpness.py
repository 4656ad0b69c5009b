"""What scaling a JPEG while it is decoded does to sharpness, by the size of the file.

    python -m benchmarks.sharpness [--side 256]

One scene (random phases with a 1/f spectrum, as photographs have) is stored as JPEGs of growing size, and each brought to the same square as
training does it: decoded as a whole, or scaled by the decoder to no less than 1 or 2 times the square, then resized (bilinear, antialiased).
Printed are the energy in the upper half of the frequencies, relative to an ideal low-pass filter, the PSNR against the whole decoding, and the time.
"""

from __future__ import annotations

import io
import time

import numpy as np
from PIL import Image

from diffusion.common.arguments import CommandParser, positive_int

MARGINS = (None, 1, 2)
FACTORS = (1, 1.25, 1.5, 1.9, 2, 2.5, 3, 3.9, 4, 5, 6, 8)
REPEATS = 5


def scene(side: int, seed: int = 0) -> np.ndarray:
    """(side, side, 3) floats around 128: colours that agree in most of their detail, amplitudes that fall as 1/f."""
    rng = np.random.default_rng(seed)
    frequency = np.hypot(np.fft.fftfreq(side)[:, None], np.fft.rfftfreq(side)[None])
    frequency[0, 0] = np.inf
    layers = [np.fft.irfft2(np.exp(2j * np.pi * rng.random(frequency.shape)) / frequency, (side, side)) for _ in range(4)]
    image = np.stack([layers[0] + 0.3 * layer for layer in layers[1:]], axis=-1)
    return 128 + 40 * image / image.std()


def low_pass(image: np.ndarray, side: int) -> np.ndarray:
    """The image at side x side: its lowest frequencies, unchanged."""
    spectrum = np.fft.fftshift(np.fft.fft2(image, axes=(0, 1)), axes=(0, 1))
    first = (image.shape[0] - side) // 2
    spectrum = spectrum[first : first + side, first : first + side] * (side / image.shape[0]) ** 2
    return np.fft.ifft2(np.fft.ifftshift(spectrum, axes=(0, 1)), axes=(0, 1)).real


def jpeg(image: np.ndarray, quality: int = 90) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(image.clip(0, 255).round().astype(np.uint8)).save(buffer, 'JPEG', quality=quality, subsampling=0)
    return buffer.getvalue()


def brought_to(content: bytes, side: int, margin: float | None) -> np.ndarray:
    """(side, side, 3): scaled by the decoder to no less than `margin` times the side (None: not at all), then resized."""
    image = Image.open(io.BytesIO(content), formats=('JPEG',))
    if margin is not None:
        image.draft(None, (int(margin * side), int(margin * side)))
    return np.asarray(image.resize((side, side), Image.Resampling.BILINEAR), np.float64)


def fine_energy(image: np.ndarray) -> float:
    """Energy in the upper half of the frequencies of each axis."""
    power = np.abs(np.fft.fft2(image, axes=(0, 1))) ** 2
    frequency = np.abs(np.fft.fftfreq(image.shape[0]))
    return float(power[np.maximum(frequency[:, None], frequency[None]) >= 0.25].sum())


def main() -> None:
    options = CommandParser('benchmarks.sharpness', __doc__)
    options.add_argument('--side', type=positive_int, default=256, metavar='PX', help='of the square (default %(default)s)')
    side = options.parse_args().side
    master = scene(side * max(FACTORS))
    ideal = fine_energy(low_pass(master, side))
    print('| file / square | fine detail kept: whole | scaled to >= 1x | scaled to >= 2x | PSNR, >= 1x | PSNR, >= 2x | ms: whole | >= 1x | >= 2x |')
    print('| --: | --: | --: | --: | --: | --: | --: | --: | --: |')
    for factor in FACTORS:
        content = jpeg(low_pass(master, round(side * factor)))
        images, seconds = [], []
        for margin in MARGINS:
            start = time.process_time()
            for _ in range(REPEATS):
                image = brought_to(content, side, margin)
            seconds.append((time.process_time() - start) / REPEATS)
            images.append(image)
        kept = [f'{fine_energy(image) / ideal:.2f}' for image in images]
        psnr = [f'{10 * np.log10(255**2 / error):.1f} dB' if (error := np.mean((image - images[0]) ** 2)) else 'equal' for image in images[1:]]
        print(f'| {factor} | ' + ' | '.join([*kept, *psnr, *(f'{1000 * value:.1f}' for value in seconds)]) + ' |')


if __name__ == '__main__':
    main()
