"""What tokens are by themselves, and where in a text they stand."""

from __future__ import annotations

import re
from codecs import getincrementaldecoder
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["TokenPlaces", "TokenTexts"]

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenTexts:
    """The text and the bytes of each token, as it stands within a text.

    Args:
        tokenizer: of the checkpoint.

    Attributes:
        left_out: special tokens, which are in no text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        # Only here: a server answers before transformers is imported.
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        self._tokenizer: Any = tokenizer
        added = tokenizer.added_tokens_decoder
        # Texts leave out whatever is marked special, named in the special tokens map or not.
        marked = (token_id for token_id, token in added.items() if token.special)
        self.left_out = frozenset((*tokenizer.all_special_ids, *marked))
        self._names = self.left_out.union(added)
        self._byte_of = {character: byte for byte, character in bytes_to_unicode().items()}
        self._known: dict[int, tuple[str, bytes | None]] = {}

    def text(self, token_id: int) -> str:
        """Its text, with U+FFFD for bytes that are no whole character."""
        return self._of(token_id)[0]

    def bytes_of(self, token_id: int) -> bytes | None:
        """Its own bytes, be they a part of a character; None if they cannot be told."""
        return self._of(token_id)[1]

    def _of(self, token_id: int) -> tuple[str, bytes | None]:
        known = self._known.get(token_id)
        if known is None:
            known = self._known[token_id] = self._look(token_id)
        return known

    def _look(self, token_id: int) -> tuple[str, bytes | None]:
        piece: str | None = self._tokenizer.convert_ids_to_tokens(token_id)
        alone = self._decode(token_id)
        if piece is None:  # models often have more ids than their tokenizers
            return alone, None
        if token_id in self._names:
            return alone, alone.encode()
        if _REPLACEMENT in alone:
            return alone, self._bytes_behind(piece, alone)
        # Many decoders take the space from the first token, which is none of a token elsewhere.
        twice = self._decode(token_id, token_id)
        text = twice.removeprefix(alone) if twice.startswith(alone) else alone
        return text, text.encode()

    def _bytes_behind(self, piece: str, text: str) -> bytes | None:
        """What was decoded to a text that says of some bytes only that they are no character."""
        # Byte-level tokenizers write every byte as a character of its own. Whether this is one
        # shows: no other makes the same text of these bytes.
        if all(character in self._byte_of for character in piece):
            own = bytes(self._byte_of[character] for character in piece)
            if own.decode(errors="replace") == text:
                return own
        byte = _BYTE_PIECE.fullmatch(piece)
        if byte is not None:
            return bytes.fromhex(byte[1])
        return text.encode() if _REPLACEMENT in piece else None

    def _decode(self, *token_ids: int) -> str:
        return str(self._tokenizer.decode(list(token_ids), clean_up_tokenization_spaces=False))


class TokenPlaces:
    """Where in a completion's text its tokens begin, told token by token.

    The text is decoded along with the tokens, so that the places are those in the text that was
    answered with. Where that waits for the rest of a character, the bytes tell how far it is. A
    token that is not in the text, such as a special one, has the place of what follows; behind a
    stop string, which cuts the text, tokens have the places that they would have had.

    Args:
        tokenizer: of the checkpoint.
        texts: its tokens'.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, texts: TokenTexts) -> None:
        from engine.text.detokenizer import IncrementalDetokenizer  # as above

        self._texts = texts
        self._written = IncrementalDetokenizer(tokenizer)
        self._num_written = 0
        self._characters = getincrementaldecoder("utf-8")("replace")
        self._num_characters = 0  # of the tokens' bytes, from the last place that was certain

    def append(self, token_id: int) -> int:
        """Take the next token and return the number of characters before it.

        Parts of a character have the place of the character.
        """
        own = self._texts.bytes_of(token_id)
        if token_id in self._texts.left_out or own is None:
            self._num_written += len(self._written.append(token_id))
            return self._num_characters
        if own and not _goes_on(own):
            # Bytes that nothing completes are a character that says so.
            self._num_characters += len(self._characters.decode(b"", final=True))
        begin = self._num_characters
        characters = self._characters.decode(own)
        self._num_characters += len(characters)
        delta = self._written.append(token_id)
        self._num_written += len(delta)
        waits = self._characters.getstate()[0]
        if delta and not waits and not characters.endswith(_REPLACEMENT):
            # All is written, and it may be other than the bytes: spaces before the first word are
            # left out, and runs of bytes that are no text.
            self._num_characters = self._num_written
            text = self._texts.text(token_id)
            if delta.endswith(text):
                begin = self._num_written - len(text)
        return begin


def _goes_on(own: bytes) -> bool:
    """Whether bytes begin within a character."""
    return own[0] & 0b1100_0000 == 0b1000_0000
