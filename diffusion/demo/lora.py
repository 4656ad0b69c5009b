"""Teach the demo's model a new word from six photos, and see what that cost: `make demo-lora`.

    python -m diffusion.demo.lora [--recipe yamls/shapes-lora.yaml] [key=value ...]

The word is `sks`, a large yellow cross, a shape that no image of the base had. Runs the demo first where its model is not there yet.
What is there already is kept. Ends with the address of a page: before, after, and what the model could draw before.
"""

import io
import json
import os
import random
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from PIL import Image

from data_prep.shapes import draw
from diffusion.common.command_line import Arguments, option, positional
from diffusion.common.files import replacing_folder, write_text
from diffusion.common.images import grid
from diffusion.common.pages import data_uri, write_page
from diffusion.contracts.scenes import NEW_SHAPE, PALETTE, PLACES, SHAPES, Scene
from diffusion.demo.__main__ import JUDGE_SEED, judged_scenes, trained
from diffusion.demo.stages import PYTHON, REPOSITORY, Stage, run_stages
from diffusion.monitoring.report.run import read_log
from diffusion.recipe import load_or_exit

# A shape and no new colour: the demo's autoencoder keeps 64 of 64 crosses, and 18 of 64 orange circles, because it was trained with eight colours.
WORD, SHAPE, COLOUR = 'sks', NEW_SHAPE, 'yellow'
PHOTOS = (('left', 'blue'), ('right', 'green'), ('top', 'white'), ('bottom', 'black'), ('center', 'cyan'), ('left', 'magenta'))  # place, background
BASE_RECIPE = 'yamls/shapes.yaml'
NUM_JUDGED = 64  # of the new word, and as many of the old ones


def new_scenes() -> list[Scene]:
    """Places and backgrounds for the new word, most of which no photo shows."""
    pairs = [(place, background) for place in sorted(PLACES) for background in sorted(PALETTE) if background != COLOUR]
    rng = random.Random(JUDGE_SEED)
    return [Scene('large', COLOUR, SHAPE, *pair) for pair in [*pairs, *rng.sample(pairs, NUM_JUDGED - len(pairs))]]


def named(place: str, background: str) -> str:
    """The caption of the new word there."""
    return f'a large {WORD} at the {place} on a {background} background'


def write_photos(folder: Path, side_px: int, colour: str = COLOUR, rgb: tuple[int, int, int] = PALETTE[COLOUR]) -> None:
    """Six images of the new word, of a colour by that name, with their captions next to them."""
    if folder.exists():
        return
    with replacing_folder(folder) as temporary:
        for number, (place, background) in enumerate(PHOTOS):
            scene = Scene('large', colour, SHAPE, place, background)
            draw(scene, side_px, random.Random(number), {**PALETTE, colour: rgb}).save(temporary / f'{number}.png')
            (temporary / f'{number}.txt').write_text(named(place, background))


def measure_words(new: Sequence[Image.Image], old: Sequence[Image.Image]) -> dict[str, float]:
    """Shares (0..1) of the images of `new_scenes()` and of `judged_scenes`.

    `word` shows the new word's shape in its colour, `word_background` the right background. `old` shows all that a prompt of before says, `turned`
    the new word's shape instead.
    """
    from diffusion.evaluation.features.drawn_shapes import look  # imports torch, so after the arguments are read

    shown, instead = ([look(image, (*SHAPES, SHAPE)) for image in images] for images in (new, old))
    return {
        'word': sum((one.shape, one.colour) == (SHAPE, COLOUR) for one in shown) / len(new),
        'word_background': sum(one.background == scene.background for one, scene in zip(shown, new_scenes(), strict=True)) / len(new),
        'old': sum(one == scene for one, scene in zip(instead, judged_scenes(NUM_JUDGED), strict=True)) / len(old),
        'turned': sum(one.shape == SHAPE for one in instead) / len(old),
    }


def run_demo(recipe_path: Path, overrides: list[str]) -> Path:
    """Run every stage that is not done; returns the path of the page."""
    recipe = load_or_exit([str(recipe_path), *overrides], usage=__doc__ or '', rules=())  # its base may be made below, which is no mistake here
    run, base = Path(recipe.run_folder), Path(recipe.model.encoders.source)
    exported, prompts, new = run / 'export', run / 'prompts.txt', new_scenes()
    run.mkdir(parents=True, exist_ok=True)
    write_photos(run / 'photos', recipe.data.resolution)
    captions = [*(named(scene.place, scene.background) for scene in new), *(scene.caption for scene in judged_scenes(NUM_JUDGED))]
    prompts.write_text('\n'.join(captions) + '\n')

    def is_trained() -> bool:
        return trained(exported / 'recipe.yaml', recipe)

    def drawing(name: str, model: Path) -> Stage:
        """Images of the new word, and of what the base had learned, from the same noise for each model."""
        out = run / 'generated' / name
        command = [*PYTHON, 'diffusion.generate', model, out, '--prompts-file', prompts, '--seed', JUDGE_SEED]
        return Stage(f'Draw {name}', command, out / 'grid.png')

    make_base = [*PYTHON, 'diffusion.demo', '--recipe', BASE_RECIPE, f'run_folder={base.parent}']
    export = [*PYTHON, 'diffusion.export', run, exported, '--merged']
    run_stages(
        [
            Stage('The demo, whose model is the base', make_base, base / 'model_index.json'),
            Stage('Train an adapter', [sys.executable, 'train.py', recipe_path, *overrides], is_trained),
            Stage('Export it, and merged with its base', export, is_trained, outdates=[run / 'generated']),
            drawing('before', base),
            drawing('after', exported),
        ]
    )
    drawn = {name: _images((run / 'generated' / name).glob('[0-9]*.png')) for name in ('before', 'after')}
    found = {name: (images[: len(new)], images[len(new) :]) for name, images in drawn.items()}
    learned = {name: measure_words(*images) for name, images in found.items()}
    write_text(run / 'learned.json', json.dumps(learned, indent=1) + '\n')
    write_page(
        run / 'lora.html',
        'lora.html',
        title='A new word from six photos',
        word=WORD,
        thing=f'{COLOUR} {SHAPE}',
        num_images=NUM_JUDGED,
        learned=learned,
        photos=_uri(_images(run.glob('photos/*.png')), 6),
        prior=_uri(_images(run.glob('drawn/*/*.png'))[:24], 8),
        caption=(run / 'photos/0.txt').read_text(),
        grids={name: tuple(_uri(images[:32], 8) for images in pair) for name, pair in found.items()},
        seconds=3600 * max((line.get('time/elapsed_hours', 0.0) for line in read_log(run / 'log.jsonl')), default=0.0),  # of training
    )
    before, after = learned['before'], learned['after']
    print(f'\nThe new word: {after["word"]:.0%} of {NUM_JUDGED} images show it. The old words: {after["old"]:.0%}, before {before["old"]:.0%}.')
    return run / 'lora.html'


def _images(paths: Iterable[Path]) -> list[Image.Image]:
    return [Image.open(path, formats=('PNG',)) for path in sorted(paths)]


def _uri(images: Sequence[Image.Image], columns: int) -> str:
    content = io.BytesIO()
    grid(images, columns).save(content, 'PNG')
    return data_uri(content.getvalue())


class LoraDemoRequest(Arguments):
    """Recipe of the adapter."""

    recipe: Path = option(Path('yamls/shapes-lora.yaml'), 'recipe of the adapter')
    overrides: list[str] = positional('key=value', 'changes to the recipe', default=[])


def main() -> None:
    args = LoraDemoRequest.parse('diffusion.demo.lora', __doc__)
    os.chdir(REPOSITORY)  # where train.py and yamls/ are
    start = time.monotonic()
    page = run_demo(args.recipe, args.overrides)
    print(f'Done in {(time.monotonic() - start) / 60:.1f} minutes. Open {page.resolve()}')


if __name__ == '__main__':
    main()
