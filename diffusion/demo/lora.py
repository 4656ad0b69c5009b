"""Teach the demo's model a new word from six photos, and see what that cost: `make demo-lora`.

    python -m diffusion.demo.lora [--recipe yamls/shapes-lora.yaml] [key=value ...]

The word is `sks`, a large circle in a colour that no image of the base had. Runs the demo first where its model is not there yet.
What is there already is kept. Ends with the address of a page: before, after, and what the model could draw before.
"""

import dataclasses
import io
import json
import os
import random
import shutil
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from PIL import Image

from data_prep.shapes import draw
from diffusion.common.arguments import CommandParser
from diffusion.common.files import replacing, replacing_folder
from diffusion.common.images import grid
from diffusion.common.pages import data_uri, write_page
from diffusion.contracts.scenes import PALETTE, PLACES, Scene
from diffusion.demo.__main__ import JUDGE_SEED, NUM_JUDGED, REPOSITORY, judged_scenes, trained
from diffusion.demo.stages import stage
from diffusion.monitoring.report.run import read_log
from diffusion.recipe import load_or_exit

WORD, COLOUR = 'sks', 'orange'
NINE_COLOURS = {**PALETTE, COLOUR: (240, 140, 30)}
PHOTOS = (('left', 'blue'), ('right', 'green'), ('top', 'white'), ('bottom', 'black'), ('center', 'cyan'), ('left', 'magenta'))  # place, background
BASE_RECIPE = 'yamls/shapes.yaml'


@dataclasses.dataclass(frozen=True)
class Learned:
    """What a model draws, in shares of images (0..1).

    Attributes:
        word: prompts with the new word that show its colour.
        word_background: of those, with the right background.
        old: prompts of before that show their colour.
        old_background: of those, with the right background.
        turned: prompts of before that show the new word's colour.
    """

    word: float
    word_background: float
    old: float
    old_background: float
    turned: float


def new_scenes() -> list[Scene]:
    """Places and backgrounds for the new word, most of which no photo shows."""
    pairs = [(place, background) for place in sorted(PLACES) for background in sorted(PALETTE)]
    rng = random.Random(JUDGE_SEED)
    return [Scene('large', COLOUR, 'circle', *pair) for pair in [*pairs, *rng.sample(pairs, NUM_JUDGED - len(pairs))]]


def named(scene: Scene) -> str:
    """Its caption with the new word."""
    return f'a {scene.size} {WORD} at the {scene.place} on a {scene.background} background'


def write_photos(folder: Path, side_px: int) -> None:
    """Six images of the new word, with their captions next to them."""
    if folder.exists():
        return
    with replacing_folder(folder) as temporary:
        for number, (place, background) in enumerate(PHOTOS):
            scene = Scene('large', COLOUR, 'circle', place, background)
            draw(scene, side_px, random.Random(number), NINE_COLOURS).save(temporary / f'{number}.png')
            (temporary / f'{number}.txt').write_text(named(scene))


def measure(new: Sequence[Image.Image], old: Sequence[Image.Image]) -> Learned:
    """What the images of `new_scenes()` and of `judged_scenes()` show."""
    from diffusion.demo.judge import judge  # both import torch, so after the arguments are read
    from diffusion.evaluation.features.drawn_shapes import colours

    word, before = judge(new, new_scenes(), NINE_COLOURS), judge(old, judged_scenes(), NINE_COLOURS)
    turned = sum(colours(image, NINE_COLOURS)[0] == COLOUR for image in old) / len(old)
    return Learned(word.foreground, word.background, before.foreground, before.background, turned)


def run_demo(recipe_path: Path, overrides: list[str]) -> Path:
    """Run every stage that is not done; returns the path of the page."""
    recipe = load_or_exit([str(recipe_path), *overrides], usage=__doc__ or '', rules=())  # its base may be made below, which is no mistake here
    run, base = Path(recipe.run_folder), Path(recipe.model.encoders.source)
    python = [sys.executable, '-m']
    if not (base / 'model_index.json').exists():
        stage('The demo, whose model is the base', [*python, 'diffusion.demo', '--recipe', BASE_RECIPE, f'run_folder={base.parent}'])
    run.mkdir(parents=True, exist_ok=True)
    write_photos(run / 'photos', recipe.data.resolution)
    exported = run / 'export'
    if not trained(exported / 'recipe.yaml', recipe):
        stage('Train an adapter', [sys.executable, 'train.py', recipe_path, *overrides])
        stage('Export it, and merged with its base', [*python, 'diffusion.export', run, exported, '--merged'])
        shutil.rmtree(run / 'generated', ignore_errors=True)
    found = {name: _drawn(name, model, run) for name, model in (('before', base), ('after', exported))}
    learned = {name: measure(*images) for name, images in found.items()}
    with replacing(run / 'learned.json') as temporary:
        temporary.write_text(json.dumps({name: dataclasses.asdict(one) for name, one in learned.items()}, indent=1) + '\n')
    _write(run, found, learned)
    before, after = learned['before'], learned['after']
    print(f'\nThe new word: {after.word:.0%} of {NUM_JUDGED} images show it. The old words: {after.old:.0%}, before {before.old:.0%}.')
    return run / 'lora.html'


def _drawn(name: str, model: Path, run: Path) -> tuple[Sequence[Image.Image], Sequence[Image.Image]]:
    """A model's images of the new word, and of what the base had learned, from the same noise for each model."""
    out, prompts, new = run / 'generated' / name, run / 'prompts.txt', new_scenes()
    if not (out / 'grid.png').exists():
        prompts.write_text('\n'.join([*map(named, new), *(scene.caption for scene in judged_scenes())]) + '\n')
        stage(f'Draw {name}', [sys.executable, '-m', 'diffusion.generate', model, out, '--prompts-file', prompts, '--seed', JUDGE_SEED])
    images = _images(out.glob('[0-9]*.png'))
    return images[: len(new)], images[len(new) :]


def _write(run: Path, found: Mapping[str, tuple[Sequence[Image.Image], Sequence[Image.Image]]], learned: Mapping[str, Learned]) -> None:
    photos, prior = (_images(run.glob(names)) for names in ('photos/*.png', 'drawn/*/*.png'))
    write_page(
        run / 'lora.html',
        'lora.html',
        title='A new word from six photos',
        word=WORD,
        colour=COLOUR,
        num_images=NUM_JUDGED,
        learned=learned,
        photos=_uri(photos, 6),
        prior=_uri(prior[:24], 8),
        caption=(run / 'photos/0.txt').read_text(),
        grids={name: tuple(_uri(images[:32], 8) for images in pair) for name, pair in found.items()},
        seconds=_seconds(run),
    )


def _images(paths: Iterable[Path]) -> list[Image.Image]:
    return [Image.open(path, formats=('PNG',)) for path in sorted(paths)]


def _uri(images: Sequence[Image.Image], columns: int) -> str:
    content = io.BytesIO()
    grid(images, columns).save(content, 'PNG')
    return data_uri(content.getvalue())


def _seconds(run: Path) -> float:
    """Of training, as its log says."""
    return 3600 * max((line.get('time/elapsed_hours', 0.0) for line in read_log(run / 'log.jsonl')), default=0.0)


def main() -> None:
    parser = CommandParser('diffusion.demo.lora', __doc__)
    parser.add_argument('--recipe', type=Path, default=Path('yamls/shapes-lora.yaml'))
    parser.add_argument('overrides', nargs='*', metavar='key=value', help='changes to the recipe')
    args = parser.parse_args()
    os.chdir(REPOSITORY)  # where train.py and yamls/ are
    start = time.monotonic()
    page = run_demo(args.recipe, args.overrides)
    print(f'Done in {(time.monotonic() - start) / 60:.1f} minutes. Open {page.resolve()}')


if __name__ == '__main__':
    main()
