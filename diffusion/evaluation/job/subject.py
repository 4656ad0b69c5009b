"""DreamBooth: is it the subject (CLIP-I, DINO), does it do what the prompt says (CLIP-T)? The model before fine-tuning is the floor.

Prompts hold `{}` where the subject is named: by its made-up word for the fine-tuned model, by its class for the model before and for CLIP, to
which the word means nothing.
"""

from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from diffusion.contracts.errors import InputError
from diffusion.datasets.transforms import SQUARE
from diffusion.evaluation.features.extractors import Extractor, TextExtractor, load_extractors
from diffusion.evaluation.job.images import FolderImages, Prompt, open_images, prompts_sha256, read_prompts_file
from diffusion.evaluation.job.models import DrawingModel, find_model, refuse_absent
from diffusion.evaluation.job.parts import RealFeatures
from diffusion.evaluation.job.preparing import CACHE, FLOOR, EvaluationJob, refuse_foreign
from diffusion.evaluation.job.request import DEFAULT_STEPS, EvaluationRequest
from diffusion.evaluation.job.results import PHOTOS, Protocol, Value
from diffusion.evaluation.metrics.distances import Estimate, photo_fidelity, prompt_fidelity, subject_fidelity
from diffusion.families.pipeline import precision_on

NETWORKS = ('clip-vit-l14', 'dino-vits16')
IMAGES_PER_PROMPT = 4  # as DreamBooth draws
DEFAULT_GUIDANCE_OF_SUBJECTS = (7.5,)
PLACE = '{}'
MEANINGS = {
    'clip_i': 'mean cosine of drawn images and photos by CLIP: the kind of subject',
    'dino': 'mean cosine of drawn images and photos by DINO: which one of its kind it is',
    'clip_t': 'mean cosine of drawn images and their prompts, with the class in place of the word, by CLIP',
}


class SubjectEvaluation:
    """What is drawn of a subject and with what it is compared.

    Args:
        request: with `subject`, `word`, `kind` and `prompts`.

    Raises:
        InputError: a prompt without a place for the subject, no photos, no such model.
        EncoderError: weights of a feature network are missing.
    """

    def __init__(self, request: EvaluationRequest, device: torch.device):
        assert request.subject is not None
        if request.prompts is None or not request.word or not request.class_word:
            raise InputError('--subject needs --prompts FILE with {} where the subject is named, --word "sks dog" and --class-word dog')
        refuse_foreign(request.out)
        refuse_absent(request.model, request.revision)
        lines = [prompt.text for prompt in read_prompts_file(request.prompts)]
        without = [line for line in lines if PLACE not in line]
        if without:
            raise InputError(f'{request.prompts}: {without[0]!r} does not say where the subject is; write {PLACE} in its place')
        photos = open_images(str(request.subject))
        if not isinstance(photos, FolderImages):
            raise InputError(f'{request.subject}: is an MDS dataset; name the folder of the photos')
        self.clip, self.dino = load_extractors(NETWORKS, request.weights, device, request.download)
        model = find_model(request.model, request.out, request.revision, request.base)  # last: it may export a checkpoint into OUT
        base = _base_of(model, request)
        resolution = request.resolution or model.resolution
        count = request.samples or IMAGES_PER_PROMPT * len(lines)
        cache = request.cache or request.out.absolute().parent / CACHE
        self.photos = RealFeatures(photos, range(photos.parts[-1]), resolution, request.chunk, cache)
        self.kinds = [line.replace(PLACE, request.class_word) for line in lines]
        prompts = [Prompt(i, lines[i % len(lines)].replace(PLACE, request.word)) for i in range(count)]
        protocol = Protocol(
            preset='',
            metrics=tuple(MEANINGS),
            samples=count,
            guidance=tuple(sorted(request.guidance or DEFAULT_GUIDANCE_OF_SUBJECTS)),
            steps=request.steps or DEFAULT_STEPS,
            sampler=request.sampler or model.sampler,
            seed=request.seed,
            resolution=resolution,
            chunk=request.chunk,
            precision=request.precision or precision_on(device),
            resize=SQUARE,
            extractors={one.name: one.sha256 for one in (self.clip, self.dino)},
            prompts={'from': 'file', 'choice': 'its lines in turn', 'sha256': prompts_sha256(prompts), 'class': request.class_word},
            real={'kind': PHOTOS, 'identity': photos.identity, 'count': photos.parts[-1]},
        )
        networks = (self.clip, self.dino)
        self.tuned, self.floor = EvaluationJob(request, request.out, protocol, model, prompts, {}, networks, self.photos), None
        if base is not None:
            of_class = [Prompt(i, self.kinds[i % len(lines)]) for i in range(count)]
            self.floor = EvaluationJob(request, request.out / FLOOR, replace(protocol, sampler=base.sampler), base, of_class, {}, networks)

    @property
    def jobs(self) -> list[EvaluationJob]:
        """What is drawn: by the model, and by the one before fine-tuning if it is known."""
        return [self.tuned, *([self.floor] if self.floor is not None else [])]

    def metrics(self, guidance: float) -> dict[str, Value]:
        """All three at a guidance scale; `floor` is of the model before fine-tuning, `ceiling` of the photos among themselves."""
        found = self._of(self.tuned, guidance)
        floor = self._of(self.floor, guidance) if self.floor is not None else {}
        ceiling = {name: photo_fidelity(self._photos(one)).value for name, one in (('clip_i', self.clip), ('dino', self.dino))}
        values: dict[str, Value] = {}
        for name, estimate in found.items():
            value = {'value': estimate.value, 'error': estimate.error, 'meaning': MEANINGS[name], 'lower_is_better': False}
            value |= {'floor': floor[name].value} if name in floor else {}
            value |= {'ceiling': ceiling[name]} if name in ceiling and self.photos.images.parts[-1] > 1 else {}
            values[name] = cast(Value, {**value, 'extractor': (self.dino if name == 'dino' else self.clip).name})
        return values

    def _of(self, job: EvaluationJob, guidance: float) -> dict[str, Estimate]:
        clip, dino = (job.drawn(guidance).load(next(iter(one.features))) for one in (self.clip, self.dino))
        assert isinstance(self.clip, TextExtractor)
        texts = self.clip.texts(self.kinds).float().cpu()
        prompts = texts[torch.arange(len(clip)) % len(texts)]
        return {
            'clip_i': subject_fidelity(clip, self._photos(self.clip)),
            'dino': subject_fidelity(dino, self._photos(self.dino)),
            'clip_t': prompt_fidelity(clip, prompts),
        }

    def _photos(self, extractor: Extractor) -> Tensor:
        return self.photos.parts_of(extractor).load(next(iter(extractor.features)))


def _base_of(model: DrawingModel, request: EvaluationRequest) -> DrawingModel | None:
    """The model before fine-tuning: what --base names, or what an exported adapter, merged or not, belongs to; None if nothing says.

    Raises:
        InputError: it is not there.
    """
    base = model.facts.get('base')
    if request.base is not None:
        return find_model(request.base, request.out / FLOOR)
    if base is not None and base['revision'] is None and not Path(base['source'], 'model_index.json').is_file():
        raise InputError(
            f'{request.model}: the model that it was fine-tuned from, {base["source"]}, is no model in the diffusers layout on this machine; '
            'name its folder with --base'
        )
    return None if base is None else find_model(base['source'], request.out / FLOOR, base['revision'])
