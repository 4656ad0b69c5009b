"""The whole path in one command, on images that the repository draws: `make demo`.

    python -m diffusion.demo [--recipe yamls/shapes.yaml] [key=value ...]

Each stage is a command that you could type yourself and is printed as such. What is there already is kept, so that a stopped
demo resumes where it was. Ends with the address of the report.
"""

import json
import os
import random
import sys
import time
from pathlib import Path

import yaml
from pydantic import PositiveInt

from diffusion.common.command_line import Arguments, option, positional
from diffusion.common.files import write_text
from diffusion.common.text import counted
from diffusion.contracts.scenes import Scene, random_scene
from diffusion.demo.stages import PYTHON, REPOSITORY, Stage, encoder_stages, latents_stage, run_stages, stage
from diffusion.evaluation.job.results import RESULT_NAME, read_evaluation
from diffusion.recipe import Recipe, changed_fields, load_or_exit, to_yaml

NUM_IMAGES = 8192
NUM_JUDGED = 192  # a share of them has a standard error of at most 3.6 percentage points
NUM_SHOWN = 64
METRICS = 'shapes,kid@random-conv'  # need no weights
JUDGE_SEED = 1_000_000  # far from every seed that training and its sample grids use


def run_demo(recipe_path: Path, overrides: list[str], num_images: int, autoencoder_steps: int | None) -> Path:
    """Run every stage that is not done; returns the path of the report."""
    recipe = _load(recipe_path, [*overrides, 'model.encoders.source=.'])  # they are made below, which is no mistake here
    run, resolution, samples = Path(recipe.run_folder), recipe.data.resolution, recipe.log.samples
    crawl, images, encoders, exported = (run / name for name in ('crawl', 'images', 'encoders', 'export'))
    generated, scored, prompts, shown = run / 'generated', run / 'scored', run / 'prompts.txt', run / 'shown.txt'
    scenes = judged_scenes()
    run.mkdir(parents=True, exist_ok=True)
    prompts.write_text(''.join(f'{scene.caption}\n' for scene in scenes))
    shown.write_text(''.join(f'{scene.caption}\n' for scene in scenes[:NUM_SHOWN]))

    def is_trained() -> bool:
        return trained(exported / 'recipe.yaml', _load(recipe_path, overrides))

    drawn_as = ['--guidance', samples.guidance, '--steps', samples.steps, '--seed', JUDGE_SEED, '--samples', len(scenes), '--prompts', prompts]
    score = [*PYTHON, 'diffusion.evaluate', exported, '--data', images, '--out', scored, '--metrics', METRICS, *drawn_as]
    generate = [*PYTHON, 'diffusion.generate', exported, generated, '--prompts-file', shown, '--seed', JUDGE_SEED]
    run_stages(
        [
            Stage('Draw captioned shapes', [*PYTHON, 'data_prep.shapes', crawl, '--count', num_images, '--size', resolution], None),
            Stage('Convert them to MDS shards', [*PYTHON, 'data_prep.convert', crawl, images], images / 'manifest.json'),
            *encoder_stages(images, encoders, resolution, autoencoder_steps),
            latents_stage('Encode the images to latents', images, run / 'latents', resolution, encoders),
            # Without `composer`: its batch is made for one device, however many there are, and the launcher takes as long to start as training does.
            Stage('Train', [sys.executable, 'train.py', recipe_path, *overrides], is_trained),
            Stage('Export the EMA weights', [*PYTHON, 'diffusion.export', run, exported], is_trained, outdates=(generated, scored)),
            Stage('Generate', generate, generated / 'grid.png'),
            Stage('Score', score, scored / RESULT_NAME),
        ]
    )
    from diffusion.demo.judge import calibration, verdict_of  # imports torch, so after the arguments are read

    verdict = verdict_of(read_evaluation(scored))
    write_text(run / 'judge.json', json.dumps({**verdict, **calibration(resolution, encoders)}, indent=1) + '\n')
    stage('Report', [*PYTHON, 'diffusion.report', run])
    shares = {name: f'{share:.1%}' for name, share in verdict.items() if isinstance(share, float)}
    print('Right foreground in {foreground}, right background in {background} of'.format(**shares), f'{counted(len(scenes), "image")}.')
    print('Right shape in {shape}, size in {size}, place in {place}; all five in {everything}.'.format(**shares))
    return run / 'report.html'


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


class DemoRequest(Arguments):
    """Recipe and size of the demo."""

    recipe: Path = option(Path('yamls/shapes.yaml'), 'recipe of the run')
    images: PositiveInt = option(NUM_IMAGES, 'images to draw')
    autoencoder_steps: PositiveInt | None = option(None, "of the small autoencoder, if it is not there yet (default: its recipe's)")
    overrides: list[str] = positional('key=value', 'changes to the recipe', default=[])


def main() -> None:
    args = DemoRequest.parse('diffusion.demo', __doc__)
    os.chdir(REPOSITORY)  # where train.py and yamls/ are
    start = time.monotonic()
    report = run_demo(args.recipe, args.overrides, args.images, args.autoencoder_steps)
    print(f'\nDone in {(time.monotonic() - start) / 60:.1f} minutes. Open {report.resolve()}')


if __name__ == '__main__':
    main()
