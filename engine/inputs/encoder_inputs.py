"""What turns a prompt into the input of an encoder, for one kind of input."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from engine.interface.prompts import (
    AudioPrompt,
    ChatPrompt,
    EmbedsPrompt,
    EncoderPrompt,
    ExplicitEncoderDecoderPrompt,
    ImagePrompt,
    TextPrompt,
    TokensPrompt,
)
from engine.requests.encoder_input import EncoderInput, EncoderView
from prefix_cache import BlockHash, ContentSpan, content_hash, whole_input_hash

__all__ = ["EncoderInputMaker", "EncoderSide", "describe_prompt", "features_hash"]


class EncoderSide(Protocol):
    """What has to be known of a model's encoder before it runs."""

    @property
    def max_encoder_len(self) -> int:
        """Most rows that the encoder gives for one request."""

    @property
    def input_vocab_size(self) -> int:
        """Ids of prompts are below this; the head may choose from fewer."""

    def encoder_view(self, entry: EncoderInput | None, decoder_ids: Sequence[int]) -> EncoderView:
        """Say which rows the decoder sees; ``ValueError`` if the two do not go together."""


class EncoderInputMaker(ABC):
    """Turns prompts of one kind into encoder inputs.

    Args:
        encoder: of the model.

    Attributes:
        takes: the kind of input, in words.
    """

    takes: str

    def __init__(self, encoder: EncoderSide) -> None:
        self._encoder = encoder

    @abstractmethod
    def make(self, prompt: EncoderPrompt | None, *, cache_salt: str | None) -> EncoderInput:
        """Make the input of one request.

        Args:
            prompt: what the user gave for the encoder; None is refused like any other kind.
            cache_salt: part of the hash, as requests share cached blocks only within one salt.

        Raises:
            ValueError: the prompt is of another kind, empty, too long, or cannot be read.
        """

    def _refuse(self, prompt: object) -> ValueError:
        return ValueError(
            f"this model's encoder takes {self.takes}, but the encoder prompt is "
            f"{describe_prompt(prompt)}"
        )

    def _of_features(self, features: Mapping[str, Tensor], cache_salt: str | None) -> EncoderInput:
        """Sound and images are padded to a window of fixed size, and all its rows are attended."""
        num_tokens = self._encoder.max_encoder_len
        return EncoderInput(
            num_tokens, features_hash(features, num_tokens, cache_salt), features=features
        )


def features_hash(
    features: Mapping[str, Tensor], num_tokens: int, cache_salt: str | None
) -> BlockHash:
    """Hash features as content that lies over as many placeholder tokens as they will give rows."""
    spans = [
        ContentSpan(kind=name, offset=0, length=num_tokens, content_hash=content_hash(tensor))
        for name, tensor in features.items()
    ]
    return whole_input_hash([0] * num_tokens, spans=spans, salt=cache_salt)


def describe_prompt(prompt: object) -> str:
    """Say in a word or two what kind of prompt this is."""
    match prompt:
        case str() | TextPrompt() | ChatPrompt():
            return "text"
        case TokensPrompt():
            return "token ids"
        case EmbedsPrompt():
            return "embeddings"
        case AudioPrompt():
            return "audio"
        case ImagePrompt():
            return "an image"
        case ExplicitEncoderDecoderPrompt():
            return "itself a pair of prompts"
        case None:
            return "missing"
        case _:
            return f"a {type(prompt).__name__}"
