"""What a visitor asks for, and the limits that keep one visitor from occupying the GPU."""

from dataclasses import dataclass
from typing import Any

from diffusion.contracts.errors import InputError

MAX_PROMPT_LETTERS = 2000  # text encoders read 77 to 256 tokens
MAX_GUIDANCE = 30.0
MAX_SEED = 2**32 - 1  # browsers hold whole numbers up to 2^53


@dataclass(frozen=True)
class Limits:
    """Largest values of one drawing."""

    num_images: int
    steps: int


@dataclass(frozen=True)
class DrawingRequest:
    """Args:
    seed: of the first image; image i has `seed + i`.
    size: (width, height) in pixels; None for the model's own.
    """

    prompt: str
    seed: int
    guidance: float
    steps: int
    num_images: int
    size: tuple[int, int] | None = None


def read_request(prompt: Any, seed: Any, guidance: Any, steps: Any, num_images: Any, size: tuple[int, int] | None, limits: Limits) -> DrawingRequest:
    """Check values from a browser, which may be anything: a page's own limits bind nobody.

    Raises:
        InputError: one of them is missing, no number, or beyond its limit.
    """
    if not isinstance(prompt, str) or not prompt.strip():
        raise InputError('The prompt is empty: say what to draw.')
    if len(prompt) > MAX_PROMPT_LETTERS:
        raise InputError(f'The prompt has {len(prompt):,} letters; {MAX_PROMPT_LETTERS:,} are allowed. Shorten it.')
    try:
        prompt.encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair
        raise InputError('The prompt holds a character that is none; write it again.') from error
    num_images = _whole_number('Images', num_images, 1, limits.num_images)
    return DrawingRequest(
        prompt=prompt.strip(),
        seed=_whole_number('Seed', seed, 0, MAX_SEED - num_images + 1),
        guidance=_number('Guidance', guidance, 1, MAX_GUIDANCE),
        steps=_whole_number('Steps', steps, 1, limits.steps),
        num_images=num_images,
        size=size,
    )


def _number(name: str, value: Any, least: float, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        given = 'missing' if value is None else f'{str(value)[:40]}'
        raise InputError(f'{name} is {given}; give a number from {least:,} to {most:,g}.')
    return float(value)


def _whole_number(name: str, value: Any, least: int, most: int) -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        given = 'missing' if value is None else f'{str(value)[:40]}'
        raise InputError(f'{name} is {given}; give a whole number from {least} to {most}.')
    return value
