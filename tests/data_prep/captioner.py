"""Random tiny vision-language models: BLIP, whose captions differ by image, GIT, which continues a prompt, and LLaVA, which answers a chat."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    BertTokenizerFast,
    BlipConfig,
    BlipForConditionalGeneration,
    BlipImageProcessor,
    BlipProcessor,
    CLIPImageProcessor,
    CLIPVisionConfig,
    GitConfig,
    GitForCausalLM,
    GitProcessor,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)

SIDE_PX = 32
SPECIAL = ['[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]', '[DEC]']
WORDS = ['a', 'photo', 'of', *(f'{first}{second}' for first in ('red', 'blue', 'round', 'small') for second in ('cat', 'dog', 'sun', 'sea', 'car'))]
SIZES = {'hidden_size': 32, 'intermediate_size': 32, 'num_hidden_layers': 2, 'num_attention_heads': 2}
CHAT = (
    "{{ '<s>' }}{% for message in messages %} USER: {% for part in message['content'] %}{% if part['type'] == 'image' %}<image> "
    "{% else %}{{ part['text'] }} {% endif %}{% endfor %}{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
LOUDER = {  # factors; or it would say the same of all images
    'patch_embedding': 500,
    'position_embedding': 0.1,
    'class_embedding': 0.1,
    'vision_model': 2,
    'crossattention.self.value': 400,
    'crossattention.output': 400,
}


def write_captioner(folder: Path, seed: int = 5) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / 'vocab.txt').write_text('\n'.join([*SPECIAL, *WORDS]))
    tokenizer = BertTokenizerFast(str(folder / 'vocab.txt'), bos_token='[DEC]')
    sizes = {**SIZES, 'projection_dim': 32}
    text = {'vocab_size': len(tokenizer), 'encoder_hidden_size': 32, 'max_position_embeddings': 128, 'bos_token_id': 5, 'pad_token_id': 0}
    ends = {'sep_token_id': 3, 'eos_token_id': 3}
    torch.manual_seed(seed)
    vision = {**sizes, 'image_size': SIDE_PX, 'patch_size': 8}
    model = BlipForConditionalGeneration(BlipConfig(text_config={**sizes, **text, **ends}, vision_config=vision, projection_dim=32))
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if weights.dim() > 1:
                weights.mul_(next((factor for part, factor in LOUDER.items() if part in name), 8))
    model.save_pretrained(folder)
    BlipProcessor(BlipImageProcessor(size={'height': SIDE_PX, 'width': SIDE_PX}), tokenizer).save_pretrained(folder)
    return folder


def write_git(folder: Path) -> Path:
    folder.mkdir()
    (folder / 'vocab.txt').write_text('\n'.join([*SPECIAL, *WORDS]))
    tokenizer = BertTokenizerFast(str(folder / 'vocab.txt'))
    vision = {**SIZES, 'image_size': SIDE_PX, 'patch_size': 8}
    ends = {'bos_token_id': 2, 'eos_token_id': 3, 'pad_token_id': 0}
    config = GitConfig(vision_config=vision, **SIZES, vocab_size=len(tokenizer), max_position_embeddings=64, **ends)
    _save_loud(GitForCausalLM, config, folder)
    GitProcessor(_square(), tokenizer).save_pretrained(folder)
    return folder


def write_llava(folder: Path) -> Path:
    words = ['<pad>', '<s>', '</s>', '<image>', '<unk>', 'USER:', 'ASSISTANT:', 'Describe', 'this', 'image', 'in', 'detail.', *WORDS]
    by_word = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token='<unk>'))
    by_word.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    by_word.post_processor = processors.TemplateProcessing(single='<s> $A', special_tokens=[('<s>', 1)])
    names = {'bos_token': '<s>', 'eos_token': '</s>', 'pad_token': '<pad>', 'unk_token': '<unk>', 'additional_special_tokens': ['<image>']}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=by_word, **names)
    vision = CLIPVisionConfig(**SIZES, image_size=SIDE_PX, patch_size=8, projection_dim=32)
    text = LlamaConfig(**SIZES, vocab_size=len(words), bos_token_id=1, eos_token_id=2, pad_token_id=0, max_position_embeddings=256)
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=3, image_seq_length=16, vision_feature_layer=-1)
    _save_loud(LlavaForConditionalGeneration, config, folder)
    chat = {'patch_size': 8, 'vision_feature_select_strategy': 'default', 'num_additional_image_tokens': 1, 'chat_template': CHAT}
    LlavaProcessor(_square(), tokenizer, **chat).save_pretrained(folder)
    return folder


def _square() -> CLIPImageProcessor:
    side = {'height': SIDE_PX, 'width': SIDE_PX}
    return CLIPImageProcessor(size=side, crop_size=side)


def _save_loud(kind: type, config: object, folder: Path) -> None:
    torch.manual_seed(0)
    model = kind(config)
    with torch.no_grad():
        for weights in model.parameters():
            weights.mul_(8 if weights.dim() > 1 else 1)
    model.save_pretrained(folder)
