"""A random tiny BLIP, whose captions differ by image."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import BertTokenizerFast, BlipConfig, BlipForConditionalGeneration, BlipImageProcessor, BlipProcessor

SIDE_PX = 32
SPECIAL = ['[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]', '[DEC]']
WORDS = ['a', 'photo', 'of', *(f'{first}{second}' for first in ('red', 'blue', 'round', 'small') for second in ('cat', 'dog', 'sun', 'sea', 'car'))]

LOUDER = {  # factors; or it would say the same of all images
    'patch_embedding': 500,
    'position_embedding': 0.1,
    'class_embedding': 0.1,
    'vision_model': 2,
    'crossattention.self.value': 400,
    'crossattention.output': 400,
}


def write_captioner(folder: Path, seed: int = 4) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / 'vocab.txt').write_text('\n'.join([*SPECIAL, *WORDS]))
    tokenizer = BertTokenizerFast(str(folder / 'vocab.txt'), bos_token='[DEC]')
    sizes = {'hidden_size': 32, 'intermediate_size': 32, 'num_hidden_layers': 2, 'num_attention_heads': 2, 'projection_dim': 32}
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
