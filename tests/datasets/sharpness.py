"""Scenes with the spectrum of photographs, and how much fine detail an image of one has."""

import io

import numpy as np
from PIL import Image


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


def fine_energy(image: np.ndarray) -> float:
    """Energy in the upper half of the frequencies of each axis."""
    power = np.abs(np.fft.fft2(image, axes=(0, 1))) ** 2
    frequency = np.abs(np.fft.fftfreq(image.shape[0]))
    return float(power[np.maximum(frequency[:, None], frequency[None]) >= 0.25].sum())
