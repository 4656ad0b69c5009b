"""A recipe trained by Composer's own Trainer, as the twins of promises need it: `python -m tests.faults.stock_recipe SAVE_FOLDER key=value ...`."""

import sys
from pathlib import Path

from composer.core import Callback

from diffusion.common.processes import failpoint
from diffusion.recipe import load_recipe
from diffusion.training import builder as training
from tests.conftest import REPOSITORY
from tests.faults.driver import YAML, composers_trainer


class Failpoint(Callback):
    def batch_start(self, state, logger):
        failpoint('step')


if __name__ == '__main__':
    resuming = {'autoresume': True, 'save_latest_filename': 'latest-rank{rank}.pt'}
    training.Trainer = composers_trainer(Path(sys.argv[1]), **resuming)
    trainer = training.build_trainer(load_recipe(REPOSITORY / YAML, sys.argv[2:]))
    trainer.state.callbacks.append(Failpoint())
    trainer.fit()
    trainer.close()
