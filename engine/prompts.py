"""The forms in which a prompt may come."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ChatPrompt", "EmbedsPrompt", "Prompt", "TextPrompt", "TokensPrompt"]


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Text that the checkpoint's tokenizer turns into ids, special tokens added.

    Attributes:
        prompt: the text.
        add_special_tokens: whether the tokenizer adds its BOS and the like; False for text that
            a chat template has already dressed.
    """

    prompt: str
    add_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Chat messages that the checkpoint's chat template turns into text.

    Attributes:
        messages: each with ``role`` and ``content``, oldest first.
    """

    messages: tuple[Mapping[str, str], ...]


@dataclass(frozen=True, slots=True)
class TokensPrompt:
    """Token ids, used as they are."""

    prompt_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class EmbedsPrompt:
    """Embeddings in the place of token ids.

    Attributes:
        prompt_embeds: ``(num_tokens, hidden_size)`` floating point. It must not be changed until
            the request has finished; its content is what the prefix cache knows it by.
    """

    prompt_embeds: Tensor


Prompt: TypeAlias = str | TextPrompt | ChatPrompt | TokensPrompt | EmbedsPrompt
"""A plain string means :class:`TextPrompt`."""
