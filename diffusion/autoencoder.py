"""Train an autoencoder, the VAE of text-to-image networks, and export it with the scale of its latents.

    python -m diffusion.autoencoder yamls/vae-f8c4.yaml [key=value ...]
    composer [-n GPUS] -m diffusion.autoencoder yamls/vae-f8c4.yaml [key=value ...]

Run the same command again to resume after a stop. At the end the averaged weights are exported to `run_folder`/export, with the mean and deviation of
the latents of training crops in vae/config.json: a folder for model.encoders.source and data_prep.encode once text encoders lie next to it
(docs/autoencoders.md). To export again, delete that folder and run the same command. Exit codes are those of train.py.
"""

from diffusion.faults import preemption, terminal

if __name__ == '__main__':  # also required by Composer's upload processes, which import this file
    preemption.listen(preemption.READING)  # first, as imports take seconds
    terminal.take()

import sys
from pathlib import Path

from diffusion.common.processes import quick_imports
from diffusion.contracts.errors import BAD_RECIPE, FINISHED
from diffusion.cost.prices import RULES
from diffusion.faults.process import before_imports, end, explain
from diffusion.recipe import AutoencoderRecipe, load_or_exit


def train(recipe: AutoencoderRecipe) -> int:
    before_imports()
    with preemption.kept(), quick_imports(recipe.train.cpu_threads):
        from diffusion.autoencoding.builder import build_trainer
        from diffusion.autoencoding.exporting import export
        from diffusion.training.builder import finished, fit

    trainer, out = None, Path(recipe.run_folder) / 'export'
    try:
        preemption.listen()
        trainer = built = build_trainer(recipe)
        already = finished(trainer)
        fit(trainer, recipe, afterwards=lambda: export(built, recipe, out))
        print(f'{recipe.name} is {"already " if already else ""}trained to {recipe.train.duration}; its autoencoder: {out}')
        return end(FINISHED)
    except (Exception, preemption.Preempted) as error:
        return end(explain(error), trainer)


def main() -> int:
    return train(load_or_exit(sys.argv[1:], usage=__doc__ or '', code=BAD_RECIPE, rules=RULES, kind=AutoencoderRecipe))


if __name__ == '__main__':
    raise SystemExit(main())
