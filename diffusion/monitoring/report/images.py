"""Images of a run next to their prompts: sample grids over training, and those that the exported model drew."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, UnidentifiedImageError

from diffusion.common.files import open_regular, parse_json
from diffusion.common.images import InlineImage, cells, to_inline
from diffusion.contracts.errors import RunError
from diffusion.monitoring.report.run import REMEDY

MOST_GRIDS = 8  # in a page; the folder has all
MOST_GENERATED = 16


@dataclass(frozen=True)
class Strip:
    """Images of one prompt."""

    prompt: str
    images: list[InlineImage]


@dataclass(frozen=True)
class Grid:
    """A file in `samples/`."""

    batch: int
    weights: str
    prompts: Sequence[str]
    images: Sequence[Image.Image]

    @property
    def caption(self) -> str:
        return f'batch {self.batch:,}, {self.weights} weights'


def sample_grids(run: Path) -> tuple[list[Grid], int]:
    """Read at most MOST_GRIDS of a run's grids, evenly spread, with the first and the last; also return how many there are."""
    paths = sorted((run / 'samples').glob('ba*.png'))
    count = min(MOST_GRIDS, len(paths))
    chosen = sorted({round(i * (len(paths) - 1) / max(1, count - 1)) for i in range(count)})
    return [_read(paths[index]) for index in chosen], len(paths)


def _read(path: Path) -> Grid:
    batch, _, weights = path.stem.removeprefix('ba').partition('-')
    image = _open(path)
    try:
        prompts = parse_json(image.info.get('prompts', '[]'))  # SampleGrid writes them
        if not isinstance(prompts, list) or not all(isinstance(prompt, str) for prompt in prompts):
            raise ValueError('its prompts are no list of texts')
        images = cells(image, len(prompts)) if prompts else [image]
        if not all(images[0].size):
            raise ValueError(f'{len(prompts):,} prompts of {image.width} x {image.height} pixels')
    except ValueError as error:
        raise RunError(f'{path}: is no grid of samples: {error}; {REMEDY}') from error
    return Grid(int(batch) if batch.isdecimal() else 0, weights, prompts or [''], images)


def _open(path: Path) -> Image.Image:
    try:
        with open_regular(path) as file, Image.open(file, formats=('PNG',)) as image:
            image.load()
            return image.copy()  # with its texts
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:  # SyntaxError: Pillow of a broken PNG
        reason = 'not a PNG' if isinstance(error, UnidentifiedImageError) else error
        raise RunError(f'{path}: cannot be read: {reason}; {REMEDY}') from error


def strips(grids: Sequence[tuple[str, Grid]]) -> list[Strip]:
    """Arrange the images of all grids by prompt, in order, with these captions."""
    prompts = list(dict.fromkeys(prompt for _, grid in grids for prompt in grid.prompts))
    return [
        Strip(
            prompt,
            [
                to_inline(image, caption)
                for caption, grid in grids
                for own, image in zip(grid.prompts, grid.images, strict=True)
                if own == prompt
            ],
        )
        for prompt in prompts
    ]  # fmt: skip


def generated(run: Path) -> tuple[list[InlineImage], int]:
    """Read the first MOST_GENERATED images of the exported model, each with its prompt; also return how many there are."""
    paths = sorted((run / 'generated').glob('[0-9]*.png'))
    images = map(_open, paths[:MOST_GENERATED])
    return [to_inline(image, str(image.info.get('prompt', ''))) for image in images], len(paths)
