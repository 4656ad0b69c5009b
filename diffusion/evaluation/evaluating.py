"""Work of an evaluation that its processes share: parts of real images and chunks of drawn ones become features on the disk."""

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from tqdm import tqdm

from diffusion.common.files import replacing, try_lock
from diffusion.common.images import save_png, to_pil
from diffusion.common.processes import failpoint
from diffusion.common.text import counted
from diffusion.contracts.errors import IncompleteError
from diffusion.cost.hardware import own_device
from diffusion.evaluation.extractors import TextExtractor
from diffusion.evaluation.features import in_batches
from diffusion.evaluation.job import NUM_SHOWN, sample_name
from diffusion.evaluation.kept import keep_chunk
from diffusion.evaluation.planning import announcement
from diffusion.evaluation.preparing import PreparedEvaluation, Request, prepare
from diffusion.evaluation.results import Evaluation
from diffusion.evaluation.scoring import score, score_subject, texts_of
from diffusion.evaluation.subject import SubjectEvaluation

Part = TypeVar('Part')


@dataclass(frozen=True)
class Ranks:
    """Which of the processes this is; each has every `world_size`-th part."""

    rank: int = 0
    world_size: int = 1

    def own(self, parts: Sequence[Part]) -> Sequence[Part]:
        """The parts of this process."""
        return parts[self.rank :: self.world_size]


def launched() -> tuple[Ranks, torch.device]:
    """This process among others and its device, from the environment that composer and torchrun set."""
    rank, world_size = (int(os.environ.get(name) or default) for name, default in (('RANK', 0), ('WORLD_SIZE', 1)))
    return Ranks(rank, world_size), own_device()


def evaluate(request: Request, ranks: Ranks, device: torch.device) -> Evaluation | None:
    """Draw, compute features and score.

    Nothing is sent between processes: each looks at what is on the disk, and the one that finds all parts scores.

    Returns:
        None if parts of other processes are not there yet, or another one is scoring.

    Raises:
        InputError, DataError, EncoderError, CheckpointError: wrong input, with the remedy.
        IncompleteError: this process did all of its parts, and there are no others, but some are missing.
    """
    whole: list[PreparedEvaluation]
    finish: Callable[[], Evaluation]
    if request.subject is not None:
        subject = SubjectEvaluation(request, device)
        whole, finish = subject.all, partial(score_subject, subject)
    else:
        prepared = prepare(request, device)
        whole, finish = [prepared], partial(score, prepared)
    for one in whole:
        one.job.begin()
    if ranks.rank == 0 and (text := announcement([one.job for one in whole], device, ranks.world_size)):
        print(text, file=sys.stderr, flush=True)
    for one in whole:
        _compute_real(one, ranks)
        _draw(one, ranks)
    missing = sum(len(one.job.missing()) + sum(len(real.missing(extractors)) for real, extractors in one.real_parts) for one in whole)
    if missing and ranks.world_size == 1:
        raise IncompleteError(f'{request.out}: {counted(missing, "part")} vanished while others were written; run the same command again')
    with (request.out / '.scoring.lock').open('w') as file:
        return finish() if not missing and try_lock(file) else None


def _compute_real(prepared: PreparedEvaluation, ranks: Ranks) -> None:
    for real, extractors in prepared.real_parts:
        missing = set(real.missing(extractors))
        own = ranks.own(real.parts)
        with tqdm(own, desc='real images', unit='part', disable=not missing.intersection(own)) as parts:
            for part in parts:
                if part in missing:
                    real.compute(extractors, part)
                    failpoint('evaluation.real')


def _draw(prepared: PreparedEvaluation, ranks: Ranks) -> None:
    job = prepared.job
    own, missing = ranks.own(job.work()), set(job.missing())
    todo = [part for part in own if part in missing]
    size = job.protocol.chunk
    with tqdm(total=len(own) * size, initial=(len(own) - len(todo)) * size, desc='draw', unit='image', disable=not todo) as bar:
        for guidance, number in todo:
            _draw_part(prepared, guidance, number)
            failpoint('evaluation.drawn')
            bar.update(size)


def _draw_part(prepared: PreparedEvaluation, guidance: float, number: int) -> None:
    """Draw a chunk and write what is kept of it; its features last, because they are the mark that it is done."""
    job, start = prepared.job, time.monotonic()
    chunk = job.chunks[number]
    images = prepared.draw(guidance, number)
    seconds = time.monotonic() - start
    features: dict[str, Tensor] = {}
    for extractor in prepared.extractors:
        features |= in_batches(extractor, images, job.protocol.chunk)
        if isinstance(extractor, TextExtractor) and any(m.needs_captions and m.extractor == extractor.name for m in prepared.metrics.values()):
            features[texts_of(extractor.name)] = extractor.texts([prompt.text for prompt in chunk]).float().cpu()
    count = job.chunk_size(number)
    facts: dict[str, Any] = {'seconds': seconds, 'images': count}
    if job.keep_images:
        facts['shard'] = keep_chunk(job.images(guidance), number, chunk[:count], images[:count])
    for place, (prompt, image) in enumerate(zip(chunk[:count], images, strict=False), start=number * job.protocol.chunk):
        if place < NUM_SHOWN:
            with replacing(job.samples(guidance) / sample_name(prompt)) as temporary:
                save_png(to_pil(image), temporary, {'prompt': prompt.text, 'seed': str(job.protocol.seed), 'id': str(prompt.id)})
    job.drawn(guidance).put(number, {name: value[:count] for name, value in features.items()}, facts)
