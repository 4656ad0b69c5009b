"""Text encoders of T5's family, and the choice among all that a network reads with a mask."""

from collections.abc import Callable
from typing import Any, ClassVar, Self

from transformers import T5Config, T5EncoderModel, T5Tokenizer, UMT5Config, UMT5EncoderModel

from diffusion.contracts.errors import EncoderError
from diffusion.encoders.configs import describe
from diffusion.encoders.pretrained import model_type
from diffusion.encoders.text import MaskedClip, OneEncoder, find_encoder


class MaskedT5(OneEncoder):
    """T5's encoder (v1.1 and its kin), with the tokenizer's mask. It has no longest caption of its own: the tokenizer's `model_max_length` decides,
    which PRXPipeline reads too."""

    masked = True
    kinds: ClassVar[tuple[type, type]] = (T5EncoderModel, T5Config)

    def num_tokens(self, config: Any, tokenizer: Any) -> int:
        return tokenizer.model_max_length

    @classmethod
    def find(cls, source: str, revision: str | None) -> Self:
        return cls(*find_encoder(*cls.kinds, T5Tokenizer, source, revision))


class MaskedUmt5(MaskedT5):
    """The multilingual one, each of whose layers has position biases of its own."""

    kinds = (UMT5EncoderModel, UMT5Config)


MASKED: dict[str, Callable[[str, str | None], OneEncoder]] = {
    'clip_text_model': MaskedClip.find,
    't5': MaskedT5.find,
    'umt5': MaskedUmt5.find,
}
"""By `model_type` of text_encoder/config.json. A new one is a line here, and its class above."""


def find_masked(source: str, revision: str | None) -> OneEncoder:
    """Find the text encoder in a local folder in the diffusers layout or on the Hub, of the class that its config.json names.

    Raises:
        EncoderError: with the location and the remedy; or it is of another class.
    """
    kind = model_type(source, revision, 'text_encoder') or 'clip_text_model'
    if kind not in MASKED:
        raise EncoderError(
            f'{describe(f"{source}/text_encoder", revision)}: config.json says model_type {kind}; known are {", ".join(MASKED)}: '
            'take one of them, or add its class to diffusion/encoders/text_t5.py'
        )
    return MASKED[kind](source, revision)
