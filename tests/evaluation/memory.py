"""Evaluate constructed images and print the peak of resident memory in MB: `python -m tests.evaluation.memory MODEL NUM FOLDER`.

The images are drawn by no model: what a model takes does not depend on their number.
"""

import resource
import sys
from pathlib import Path

import numpy as np
import torch

from diffusion.evaluation.job.evaluating import Ranks, evaluate
from diffusion.evaluation.job.images import Prompt
from diffusion.evaluation.job.parts import finish_kept, keep_chunk
from diffusion.evaluation.job.preparing import EvaluationJob
from diffusion.evaluation.job.request import EvaluationRequest

SIDE = 32


def construct(ids, shift):
    """(B, 3, SIDE, SIDE) uint8: a colour and noise of each id."""
    images = [np.random.default_rng(i).integers(0, 128, (3, SIDE, SIDE)) + np.array([i % 120, i % 90, shift])[:, None, None] for i in ids]
    return torch.from_numpy(np.stack(images).astype(np.uint8))


def write_real(folder, count):
    entries = []
    for number, start in enumerate(range(0, count, 500)):
        ids = range(start, min(start + 500, count))
        entries.append(keep_chunk(folder, number, [Prompt(i, f'number {i}') for i in ids], construct(ids, 40)))
    finish_kept(folder, entries, {}, SIDE)


def main(model, count, folder):
    def draw(self, guidance, number):
        return construct([prompt.id for prompt in self.chunks[number]], 60)

    write_real(folder / 'real', count)
    EvaluationJob.draw = draw  # type: ignore[method-assign]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    request = EvaluationRequest(
        model=model,
        data=str(folder / 'real'),
        out=folder / 'out',
        metrics=('kid@random-conv', 'fid@random-conv'),
        samples=count,
        guidance=(3.0,),
        steps=1,
        chunk=100,
    )
    evaluate(request, Ranks(), torch.device('cpu'))
    print(f'{before:.0f} {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f}')


if __name__ == '__main__':
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
