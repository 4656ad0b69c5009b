"""Randomly initialised encoders in the sizes that stand_in.py lists."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from tokenizers import decoders as tokenizer_decoders
from transformers import (
    AutoConfig,
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    PretrainedConfig,
    Qwen2Tokenizer,
    Qwen3ForCausalLM,
    Qwen3Model,
    T5EncoderModel,
    T5Tokenizer,
    UMT5EncoderModel,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode

from diffusion.contracts.errors import EncoderError
from diffusion.encoders.frozen import VAES, vae_class
from diffusion.encoders.pretrained import LONGEST, load_config, model_type, read_configs, save_text_encoder
from diffusion.encoders.sizes import HAS_HEAD, KINDS, PROJECTS

END = '<|endoftext|>'
T5_FAMILY = {'t5': T5EncoderModel, 'umt5': UMT5EncoderModel}
NO_CLIPS = {**T5_FAMILY, 'qwen3': Qwen3Model}  # classes by `model_type`
# Of Qwen3: what the user says, and the beginning of the answer, which thinks first unless told otherwise.
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    '{% if add_generation_prompt %}<|im_start|>assistant\n'
    '{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}'
)
PADS = (END, '!', END)  # of the published tokenizers: the first and the second of Stable Diffusion XL; T5's has its own


def build_vae(block_out_channels: Sequence[int], latent_channels: int = 4, _class_name: str = 'AutoencoderKL', **config: Any) -> Any:
    """An AutoencoderKL, or a VAE of another class, that halves the side once for every level after the first."""
    levels = len(block_out_channels)
    return VAES[_class_name].kind(
        down_block_types=('DownEncoderBlock2D',) * levels,
        up_block_types=('UpDecoderBlock2D',) * levels,
        block_out_channels=tuple(block_out_channels),
        latent_channels=latent_channels,
        **config,
    )


def vae_like(like: str) -> Any:
    """With random weights: one of KINDS, or that of a folder in the diffusers layout, of which only config.json is read."""
    if like in KINDS:
        return build_vae(**KINDS[like]['vae'])
    kind: Any = vae_class(read_configs(like, None, 'vae').get('config.json', {})).kind
    return kind.from_config(kind.load_config(like, subfolder='vae', local_files_only=True))


def build_text_encoder(config: PretrainedConfig) -> Any:
    """A text encoder of the class that the configuration names, with random weights."""
    if config.architectures == HAS_HEAD:
        return Qwen3ForCausalLM(config)
    if config.model_type in NO_CLIPS:
        return NO_CLIPS[config.model_type](config)
    return (CLIPTextModelWithProjection if config.architectures == PROJECTS else CLIPTextModel)(config)


def text_encoders_like(like: str) -> list[Any]:
    """The same for the text encoders, in `text_encoder`, `text_encoder_2` and so on."""
    return [build_text_encoder(config) for config in _text_configs(like).values()]


def text_lengths_like(like: str) -> list[int]:
    """Tokens that each of them takes; those that the tokenizer of a folder gives, where its encoder takes any number."""
    return [_num_tokens(like, name, config) for name, config in _text_configs(like).items()]


def _num_tokens(like: str, name: str, config: PretrainedConfig) -> int:
    if config.model_type not in T5_FAMILY:
        return config.max_position_embeddings
    if like in KINDS:
        return config.n_positions
    folder = name.replace('text_encoder', 'tokenizer')
    length = read_configs(like, None, folder).get('tokenizer_config.json', {}).get('model_max_length')
    if type(length) is not int or not 2 <= length <= LONGEST:
        raise EncoderError(f'{like}/{folder}/tokenizer_config.json: gives no model_max_length of 2 to {LONGEST}; write the tokens of a caption there')
    return length


def _text_configs(like: str) -> dict[str, PretrainedConfig]:
    """Configurations by folder."""
    if like in KINDS:
        return {name: _config(sizes) for name, sizes in KINDS[like].items() if name != 'vae'}
    folders = sorted(folder.name for folder in Path(like).glob('text_encoder*'))
    found = {folder: model_type(like, None, folder) for folder in folders}
    return {folder: load_config(AutoConfig if kind in NO_CLIPS else CLIPTextConfig, like, None, folder) for folder, kind in found.items()}


def _config(sizes: Mapping[str, Any], **more: Any) -> PretrainedConfig:
    """The configuration of an entry of KINDS; CLIP's if it names no `model_type`."""
    return AutoConfig.for_model(**more, **sizes) if 'model_type' in sizes else CLIPTextConfig(**more, **sizes)


def _keep_words_apart(text_encoder: Any) -> None:
    """Give CLIP's embeddings of tokens and positions, and Qwen's of tokens, a standard deviation of 1, as T5's tokens have.

    CLIP starts them at 0.02, so that random layers, which mix all tokens, drown them: for the demo's captions the word for the shape then makes 6 %
    of the variance of its own token's output, that for the place 3 %; with 1 it is 32 and 45 %.
    """
    with torch.no_grad():
        for name, weight in text_encoder.named_parameters():
            if name.endswith(('token_embedding.weight', 'position_embedding.weight', 'embed_tokens.weight')):
                weight.div_(weight.std())


def build_tokenizer(folder: Path, words: Sequence[str], length: int, pad: str = END) -> CLIPTokenizer:
    """A CLIP tokenizer with one token for each of `words` and single bytes for everything else."""
    symbols = list(bytes_to_unicode().values())
    vocabulary = [*symbols, *(symbol + '</w>' for symbol in symbols)]
    merges: list[str] = []
    for word in words:
        pieces = [*word[:-1], word[-1] + '</w>']
        while len(pieces) > 1:  # from the end: merges that hold the end-of-word mark cannot disturb other words
            merge = f'{pieces[-2]} {pieces[-1]}'
            pieces[-2:] = [pieces[-2] + pieces[-1]]
            if merge not in merges:
                merges.append(merge)
                vocabulary.append(pieces[-1])
    vocabulary += ['<|startoftext|>', END]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / 'vocab.json').write_text(json.dumps({token: i for i, token in enumerate(vocabulary)}))
    (folder / 'merges.txt').write_text('\n'.join(['#version: 0.2', *merges]) + '\n')
    tokenizer = CLIPTokenizer(str(folder / 'vocab.json'), str(folder / 'merges.txt'), model_max_length=length, pad_token=pad)
    tokenizer.save_pretrained(folder)
    return tokenizer


def build_t5_tokenizer(folder: Path, words: Sequence[str], length: int) -> T5Tokenizer:
    """A tokenizer of T5's class with one token for each of `words`, single printable letters for everything else, and its end token."""
    pieces = ['\u2581', *('\u2581' + word for word in dict.fromkeys(words)), *(chr(code) for code in range(33, 127))]
    vocabulary = [('<pad>', 0.0), ('</s>', 0.0), ('<unk>', 0.0), *((piece, -1.0 / len(piece)) for piece in dict.fromkeys(pieces))]
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=2))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = tokenizer_decoders.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(single='$A </s>', special_tokens=[('</s>', 1)])
    made = T5Tokenizer(tokenizer_object=tokenizer, extra_ids=0, model_max_length=length)
    made.save_pretrained(folder)
    return made


def build_chat_tokenizer(folder: Path, words: Sequence[str]) -> Qwen2Tokenizer:
    """A tokenizer of Qwen's class, with its chat template, one token for each of `words` after a space, and single bytes for everything else."""
    vocabulary, merges = dict.fromkeys(bytes_to_unicode().values()), dict[tuple[str, str], None]()
    for word in words:
        begun = '\u0120'  # a space: merges that begin with it cannot disturb other words
        for letter in word:
            merges[begun, letter] = None
            begun += letter
            vocabulary[begun] = None
    special = ['<|im_start|>', '<|im_end|>', '<think>', '</think>']
    made = Qwen2Tokenizer({token: i for i, token in enumerate(vocabulary)}, [*merges], extra_special_tokens=special, model_max_length=131072)
    made.chat_template = CHAT_TEMPLATE
    made.save_pretrained(folder)
    return made


def write_stand_in(folder: Path, kind: str = 'tiny', words: Sequence[str] = (), seed: int = 0, vae: AutoencoderKL | None = None) -> None:
    """Write `vae/`, `text_encoder/` and `tokenizer/`, or several of the latter (`_2`, `_3`), that `FrozenEncoders.load` reads.

    Args:
        words: that the tokenizers have a token for.
        vae: takes the random one's place.
    """
    torch.manual_seed(seed)
    text_encoders = {name: sizes for name, sizes in KINDS[kind].items() if name != 'vae'}
    for (name, sizes), pad in zip(text_encoders.items(), PADS, strict=False):
        tokenizer_folder = folder / name.replace('text_encoder', 'tokenizer')
        tokenizer: CLIPTokenizer | T5Tokenizer | Qwen2Tokenizer
        if sizes.get('model_type') == 'qwen3':
            tokenizer = build_chat_tokenizer(tokenizer_folder, words)
        elif 'model_type' in sizes:
            tokenizer = build_t5_tokenizer(tokenizer_folder, words, sizes['n_positions'])
        else:
            tokenizer = build_tokenizer(tokenizer_folder, words, sizes['max_position_embeddings'], pad)
        special = {'bos_token_id': tokenizer.bos_token_id, 'eos_token_id': tokenizer.eos_token_id, 'pad_token_id': tokenizer.pad_token_id}
        text_encoder = build_text_encoder(_config({'vocab_size': len(tokenizer), **sizes}, **special))
        _keep_words_apart(text_encoder)
        save_text_encoder(text_encoder, folder / name)
    (vae or build_vae(**KINDS[kind]['vae'])).save_pretrained(folder / 'vae')
    (folder / 'README.md').write_text(f'Stand-in encoders ({kind}, seed {seed}); text encoders are random. For tests, demos and speed.\n')
