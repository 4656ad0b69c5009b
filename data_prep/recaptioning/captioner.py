"""A vision-language model that describes images, loaded strictly: from its own safetensors, by a class of transformers, or not at all."""

import hashlib
import inspect
import json
import threading
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from PIL import Image
from torch import Tensor
from transformers import AutoProcessor, GenerationConfig, LogitsProcessorList, PretrainedConfig, TemperatureLogitsWarper, TopPLogitsWarper
from transformers.generation.logits_process import LogitsProcessor
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
from transformers.utils import logging as transformers_logging

from diffusion.common.text import first_line
from diffusion.contracts.errors import EncoderError
from diffusion.datasets.keyed_random import Draw, uniform
from diffusion.encoders.frozen_part import FrozenPart
from diffusion.encoders.pretrained import describe, hub_problem_of, is_empty, load_model, read_configs
from diffusion.recipe.schema import EncoderSource

CHAT_PROMPT = 'Describe this image in detail.'  # of models that answer a chat, where none is given
KNOWN = ('blip', 'blip-2', 'git', 'llava', 'qwen2_vl')  # that a message names, of the fifty
OPEN_ENDED = ('git',)  # continue the prompt, which their tokenizers end nevertheless (BLIP takes the end off by itself)
VERSIONED = ('transformers_version', '_name_or_path')  # in a configuration, and no part of what the model does


@dataclass(frozen=True)
class Generation:
    """How captions are generated; tokens are new ones in a caption, counted by the model's own tokenizer."""

    prompt: str | None = None  # what the model is told; None: nothing, or CHAT_PROMPT where a model answers a chat
    num_captions: int = 1  # for each image; several are drawn at a temperature
    max_tokens: int = 75
    min_tokens: int = 0
    beams: int = 1  # of the beam search; 1: none
    temperature: float = 0.0  # of the draws; 0: the likeliest token each time
    top_p: float = 1.0  # tokens are drawn from the likeliest that have this probability together
    seed: int = 0  # of the draws, each of which is a function of this, the key of the sample, the caption and the token
    bf16: bool = False  # compute in bfloat16, weights too


@dataclass(frozen=True)
class Caption:
    """A caption that the model wrote."""

    text: str  # without special tokens, on one line
    cut: bool  # whether it had more to say when `max_tokens` were reached


class KeyedSampling(LogitsProcessor):
    """Draw tokens as temperature sampling does, from numbers that depend on the sample alone: by the Gumbel-max trick, with a greedy search after it.

    transformers draws a batch from one generator, so that a caption would depend on its neighbours and on what was captioned before.

    Args:
        sample_ids: (B,) int64.
        number: of the caption, of several for an image.
    """

    def __init__(self, generation: Generation, sample_ids: Tensor, number: int):
        self.seed, self.number, self.sample_ids, self.token = generation.seed, number, sample_ids, 0
        self.warpers = LogitsProcessorList([TemperatureLogitsWarper(generation.temperature)])
        if generation.top_p < 1:
            self.warpers.append(TopPLogitsWarper(generation.top_p))

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        ids = self.sample_ids.to(scores.device)
        key = torch.stack([torch.full_like(ids, self.token), ids, torch.full_like(ids, self.number)], dim=1)
        self.token += 1
        drawn = uniform(self.seed, key, Draw.CAPTION_TOKEN, scores.shape[1])  # (B, V) in (0, 1]
        # An exponential variable of 1 - drawn: float32 resolves it where it is small, and the smallest one wins.
        return self.warpers(input_ids, scores.float()) - torch.log(-torch.log1p(-drawn))


def sample_id(key: str) -> int:
    """64 bits of a sample's key, signed as PyTorch has them."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], signed=True)


@dataclass(frozen=True)
class Captioner:
    """The model of one process."""

    location: EncoderSource  # where it comes from
    generation: Generation
    model_type: str  # as its config.json says
    processor: Any = field(repr=False)
    prompt: str | None
    """Text that goes with each image, with the markers that the model's chat has; None: none does."""
    network: FrozenPart = field(repr=False)  # read when it is first used
    settings_sha256: str  # digest of configuration, tokenizer and image processor, to recognise others
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @classmethod
    def find(cls, location: EncoderSource, generation: Generation) -> Self:
        """Configuration and processor; weights are read when they are first used.

        Raises:
            EncoderError: they cannot be read, or transformers itself has no such model.
        """
        source, revision = location.source, location.revision
        where = describe(source, revision)
        if Path(source).is_dir() and not Path(source, 'config.json').is_file():
            raise EncoderError(f'{where}: there is no config.json; name the folder of a vision-language model, as save_pretrained writes it')
        read_configs(source, revision, '')
        try:
            raw, _ = PretrainedConfig.get_config_dict(source, revision=revision)
        except Exception as error:  # of the Hub, or of a file that is no JSON
            reason = hub_problem_of(source) or first_line(error, with_type=True)
            raise EncoderError(f'{where}: config.json cannot be read: {reason}; name a folder or a Hub id') from error
        model_type = raw.get('model_type')
        if model_type not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
            raise EncoderError(
                f"{where}: its model_type '{model_type}' is none that transformers can describe images with by its own code; "
                f'use one of AutoModelForImageTextToText, such as {", ".join(KNOWN)}'
            )
        try:
            with _quiet():
                config = CONFIG_MAPPING[model_type].from_dict(raw)
                asked = _generation_of(source, revision)
                processor = AutoProcessor.from_pretrained(source, revision=revision, trust_remote_code=False)
                tokenizer, image_processor = processor.tokenizer, processor.image_processor
        except Exception as error:  # each class has its own, for files that are missing too
            raise EncoderError(
                f'{where}: its processor cannot be loaded (tokenizer and processor_config.json or preprocessor_config.json belong there): '
                f'{first_line(error, with_type=True)}'
            ) from error
        tokenizer.padding_side = 'left'  # the answer follows the prompt
        if is_empty(tokenizer):
            raise EncoderError(f'{where}: its tokenizer knows no words; the files of the tokenizer belong there')
        positions = getattr(config.get_text_config(), 'max_position_embeddings', None)
        prompt = generation.prompt
        if getattr(processor, 'chat_template', None):  # as the model was trained to read it, with a place for the image
            content = [{'type': 'image'}, {'type': 'text', 'text': CHAT_PROMPT if prompt is None else prompt}]
            prompt = processor.apply_chat_template([{'role': 'user', 'content': content}], add_generation_prompt=True, tokenize=False)
        used = generation.max_tokens + (0 if prompt is None else len(tokenizer(prompt).input_ids))
        if positions is not None and used > positions:
            raise EncoderError(
                f'{where}: --max-tokens {generation.max_tokens} and the prompt are {used} tokens, the model has {positions} positions; ask for fewer'
            )
        kind = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]
        kind = kind[0] if isinstance(kind, tuple) else kind
        read = {
            'config': {name: value for name, value in raw.items() if name not in VERSIONED},
            'generation': asked,
            'image_processor': image_processor.to_dict(),
            'tokenizer': hashlib.sha256(json.dumps(tokenizer.get_vocab(), sort_keys=True).encode()).hexdigest(),
            'prompt': prompt,
        }
        network = FrozenPart(lambda: load_model(kind, source, revision, ''))
        sha256 = hashlib.sha256(json.dumps(read, sort_keys=True, default=str).encode()).hexdigest()
        captioner = cls(location, generation, model_type, processor, prompt, network, sha256)
        try:
            captioner.prepare([Image.new('RGB', (64, 64))])
        except ValueError as error:  # a prompt without the marker of the image, for example
            raise captioner.prompt_error(error) from error
        return captioner

    def prompt_error(self, error: ValueError) -> EncoderError:
        where = describe(self.location.source, self.location.revision)
        return EncoderError(f'{where}: does not caption with the prompt {self.prompt!r}: {first_line(error)}; give another --prompt')

    def load(self, device: torch.device) -> None:
        """Read the weights to `device`. Raises EncoderError if that fails."""
        self.network.to(device, dtype=torch.bfloat16 if self.generation.bf16 else torch.float32)
        with _quiet():
            module = self.network.module
        own = module.generation_config
        own.do_sample, own.temperature, own.top_p, own.top_k = False, None, None, None  # a published default would not be ours

    def prepare(self, images: Sequence[Image.Image]) -> dict[str, Tensor]:
        """Return what the model reads of images: tensors by name, whose first dimension is the batch in most models."""
        if self.prompt is None:
            return dict(self.processor(images=list(images), return_tensors='pt'))
        begin = self.processor.tokenizer.bos_token
        chat = {'add_special_tokens': False} if begin and self.prompt.startswith(begin) else {}  # a chat's template has them already
        inputs = dict(self.processor(images=list(images), text=[self.prompt] * len(images), padding=True, return_tensors='pt', **chat))
        if self.model_type in OPEN_ENDED:
            inputs |= {name: inputs[name][:, :-1] for name in ('input_ids', 'attention_mask')}
        return inputs

    def captions(self, inputs: dict[str, Tensor], keys: Sequence[str]) -> list[list[Caption]]:
        """`num_captions` captions for each image of a batch, as `prepare` returned it. Of several threads one generates at a time."""
        generation, module, tokenizer = self.generation, self.network.module, self.processor.tokenizer
        dtype = torch.bfloat16 if generation.bf16 else torch.float32
        ids = torch.tensor([sample_id(key) for key in keys])
        captions: list[list[Caption]] = [[] for _ in keys]
        # A tokenizer's own outputs, which its model may not know.
        read = {name: tensor for name, tensor in inputs.items() if name != 'token_type_ids' or name in inspect.signature(module.forward).parameters}
        with self._lock, self.network.computing(), _quiet():
            for number in range(generation.num_captions):
                given = {  # a copy: BLIP writes into what it is given
                    name: tensor.to(self.network.device, dtype if tensor.is_floating_point() else None, copy=True) for name, tensor in read.items()
                }
                sampling = [KeyedSampling(generation, ids, number)] if generation.temperature else []
                try:
                    written = module.generate(
                        **given,
                        max_new_tokens=generation.max_tokens,
                        **({'min_new_tokens': generation.min_tokens} if generation.min_tokens else {}),
                        num_beams=generation.beams,
                        do_sample=False,
                        logits_processor=LogitsProcessorList(sampling),
                    )
                except ValueError as error:  # of a model that looks for it later
                    raise self.prompt_error(error) from error
                tokens = _without_prompt(written.cpu(), read.get('input_ids'))  # (B, L)
                texts = tokenizer.batch_decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=True)
                for of_image, text, row in zip(captions, texts, tokens.tolist(), strict=True):
                    cut = len(row) >= generation.max_tokens and row[-1] not in tokenizer.all_special_ids
                    of_image.append(Caption(' '.join(text.split()), cut))
        return captions

    def __reduce__(self) -> Any:
        return _found, (self.location, self.generation)  # Ray would pickle a class method by value, with the globals that it reads


def _found(location: EncoderSource, generation: Generation) -> Captioner:
    return Captioner.find(location, generation)


def _generation_of(source: str, revision: str | None) -> dict[str, Any]:
    """Content of generation_config.json, for the digest; {} where there is none."""
    try:
        found = GenerationConfig.from_pretrained(source, revision=revision).to_diff_dict()
    except OSError:
        return {}
    return {name: value for name, value in found.items() if name not in VERSIONED}


def _without_prompt(written: Tensor, prompt: Tensor | None) -> Tensor:
    """New tokens (B, L) of what a model returned: some repeat the prompt before them; BLIP without its end, and with another first token."""
    if prompt is None:
        return written
    for length in (prompt.shape[1], prompt.shape[1] - 1):
        if 1 < length <= written.shape[1] and torch.equal(written[:, 1:length], prompt[:, 1:length]):
            return written[:, length:]
    return written


@contextmanager
def _quiet() -> Any:
    """transformers warns of lengths and image processors that were chosen on purpose."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
