"""The whole path in one command, on images that the repository draws: `make demo`.

    python -m diffusion.demo [--recipe yamls/shapes.yaml] [key=value ...]

Each stage is a command that you could type yourself and is printed as such. What is there already is kept, so that a stopped
demo resumes where it was. Ends with the address of the report.
"""

import dataclasses
import json
import os
import random
import shutil
import sys
import time
from pathlib import Path

import yaml

from diffusion.common.arguments import CommandParser, positive_int
from diffusion.common.files import write_text
from diffusion.common.text import counted
from diffusion.contracts.scenes import Scene, random_scene
from diffusion.demo.stages import make_encoders, stage
from diffusion.evaluation.job.results import RESULT_NAME, read_evaluation
from diffusion.recipe import Recipe, changed_fields, load_or_exit, to_yaml

NUM_IMAGES = 8192
NUM_JUDGED = 64
METRICS = 'shapes,kid@random-conv'  # need no weights
JUDGE_SEED = 1_000_000  # far from every seed that training and its sample grids use
REPOSITORY = Path(__file__).parents[2]


def run_demo(recipe_path: Path, overrides: list[str], num_images: int, autoencoder_steps: int | None) -> Path:
    """Run every stage that is not done; returns the path of the report."""
    recipe = _load(recipe_path, [*overrides, 'model.encoders.source=.'])  # they are made below, which is no mistake here
    run = Path(recipe.run_folder)
    run.mkdir(parents=True, exist_ok=True)
    python = [sys.executable, '-m']
    exported, generated, scored, prompts = run / 'export', run / 'generated', run / 'scored', run / 'prompts.txt'

    prepare(run, recipe.data.resolution, num_images, autoencoder_steps)
    if not trained(exported / 'recipe.yaml', _load(recipe_path, overrides)):
        # Without `composer`: its batch is made for one device, however many there are, and the launcher takes as long to start as training does.
        stage('Train', [sys.executable, 'train.py', recipe_path, *overrides])
        stage('Export the EMA weights', [*python, 'diffusion.export', run, exported])
        for made_with_it in (generated, scored):
            shutil.rmtree(made_with_it, ignore_errors=True)
    scenes = judged_scenes()
    if not (generated / 'grid.png').exists():
        prompts.write_text('\n'.join(scene.caption for scene in scenes) + '\n')
        stage('Generate', [*python, 'diffusion.generate', exported, generated, '--prompts-file', prompts, '--seed', JUDGE_SEED])
    if not (scored / RESULT_NAME).exists():
        samples = recipe.log.samples
        drawn_as = ['--guidance', samples.guidance, '--steps', samples.steps, '--seed', JUDGE_SEED, '--samples', len(scenes), '--prompts', prompts]
        stage('Score', [*python, 'diffusion.evaluate', exported, '--data', run / 'images', '--out', scored, '--metrics', METRICS, *drawn_as])
    from diffusion.demo.judge import calibration, verdict_of  # imports torch, so after the arguments are read

    verdict = verdict_of(read_evaluation(scored))
    known = {name: dataclasses.asdict(each) for name, each in calibration(recipe.data.resolution, run / 'encoders').items()}
    write_text(run / 'judge.json', json.dumps({**dataclasses.asdict(verdict), **known}, indent=1) + '\n')
    stage('Report', [*python, 'diffusion.report', run])
    print(f'Right foreground in {verdict.foreground:.1%}, right background in {verdict.background:.1%} of {counted(verdict.num_images, "image")}.')
    print(f'Right shape in {verdict.shape:.1%}, size in {verdict.size:.1%}, place in {verdict.place:.1%}; all five in {verdict.everything:.1%}.')
    return run / 'report.html'


def prepare(run: Path, resolution: int, num_images: int = NUM_IMAGES, autoencoder_steps: int | None = None) -> None:
    """The data and the encoders of the demo: `latents` and `encoders` in its run folder."""
    python = [sys.executable, '-m']
    crawl, images, latents, encoders = run / 'crawl', run / 'images', run / 'latents', run / 'encoders'
    stage('Draw captioned shapes', [*python, 'data_prep.shapes', crawl, '--count', num_images, '--size', resolution])
    if not (images / 'manifest.json').exists():
        stage('Convert them to MDS shards', [*python, 'data_prep.convert', crawl, images])
    make_encoders(images, encoders, resolution, autoencoder_steps)
    if not (latents / 'manifest.json').exists():
        stage('Encode the images to latents', [*python, 'data_prep.encode', images, latents, '--resolution', resolution, '--encoders', encoders])


def trained(exported: Path, recipe: Recipe) -> bool:
    """Whether the export is of this recipe, trained to its end; what does not shape the result may differ."""
    if not exported.exists():
        return False
    before, now = yaml.safe_load(exported.read_text()), yaml.safe_load(to_yaml(recipe))
    return before['train']['duration'] == now['train']['duration'] and not changed_fields(before, now)


def judged_scenes(count: int = NUM_JUDGED) -> list[Scene]:
    """The prompts that the exported model is judged by."""
    rng = random.Random(JUDGE_SEED)
    return [random_scene(rng) for _ in range(count)]


def _load(recipe_path: Path, overrides: list[str]) -> Recipe:
    return load_or_exit([str(recipe_path), *overrides], usage=__doc__ or '')


def main() -> None:
    parser = CommandParser('diffusion.demo', __doc__)
    parser.add_argument('--recipe', type=Path, default=Path('yamls/shapes.yaml'))
    parser.add_argument('--images', type=int, default=NUM_IMAGES, help='images to draw (default %(default)s)')
    parser.add_argument('--autoencoder-steps', type=positive_int, help="of the small autoencoder, if it is not there yet (default: its recipe's)")
    parser.add_argument('overrides', nargs='*', metavar='key=value', help='changes to the recipe')
    args = parser.parse_args()
    os.chdir(REPOSITORY)  # where train.py and yamls/ are
    start = time.monotonic()
    report = run_demo(args.recipe, args.overrides, args.images, args.autoencoder_steps)
    print(f'\nDone in {(time.monotonic() - start) / 60:.1f} minutes. Open {report.resolve()}')


if __name__ == '__main__':
    main()
