"""Answers in OpenAI's shapes; only the fields that are set are sent.

Structs of msgspec, since one is made and written for every token that is streamed: they take a
tenth of the time of models that check their values, and all values here come from our own code.
"""

from __future__ import annotations

import math
import re
import time
from codecs import getincrementaldecoder
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

from msgspec import UNSET, Struct, UnsetType
from msgspec.json import Encoder
from starlette.requests import Request

from engine import TokenLogprobs
from engine.interface.outputs import CompletionDelta, OutputDelta
from omni.server.openai.chat_request import (
    ChatRequest,
    CompletionRequest,
    StreamOptions,
    merge_sampling,
)
from omni.server.openai.tools import ToolCall
from omni.server.serving.api_error import ApiError
from omni.server.serving.pipeline_server import ServedPipeline
from omni.server.serving.response_stream import PipelineResponse, event
from stages import Completion, StageOutput

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from omni.pipelines.pipeline import Pipeline

Usage: TypeAlias = dict[str, Any]
"""Tokens of a prompt, of them those that the cache saved computing, and of all its completions."""

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenTexts:
    """Finds the text and the bytes of each token, as it stands within a text.

    ``left_out`` are special tokens, which are in no text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        # Only here: a server answers before transformers is imported.
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        from engine.text.stop_checker import ids_without_text

        self._tokenizer: Any = tokenizer
        self.left_out = ids_without_text(tokenizer)
        self._names = self.left_out.union(tokenizer.added_tokens_decoder)
        self._byte_of = {character: byte for byte, character in bytes_to_unicode().items()}
        self._known: dict[int, tuple[str, bytes | None]] = {}

    def text(self, token_id: int) -> str:
        """Return its text, with U+FFFD for bytes that are no whole character."""
        return self._of(token_id)[0]

    def bytes_of(self, token_id: int) -> bytes | None:
        """Return its own bytes, be they a part of a character; None if they are not known."""
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
    """Finds where in a completion's text its tokens begin, token by token.

    The text is decoded along with the tokens, so that the places are those in the text of the
    answer. Where that waits for the rest of a character, the bytes tell how far it is. A token that
    is not in the text, such as a special one, has the place of what follows; behind a stop string,
    which cuts the text, tokens have the places that they would have had.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, texts: TokenTexts) -> None:
        from engine.text.stop_checker import IncrementalDetokenizer  # as above

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
        if own and own[0] & 0b1100_0000 != 0b1000_0000:  # not within a character
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


_LEAST = -9999.0
"""In the place of minus infinity, which JSON does not have; as OpenAI's own answers have it."""


def text_stage(pipeline: Pipeline) -> str:
    """Find the stage whose text answers: the last one that the user gets text of."""
    writing = [name for name, stage in pipeline.stages.items() if "text" in stage.final_output]
    if not writing:
        raise ApiError.bad_request(
            "this model writes no text; /v1/pipelines/{name} gives all that it makes", param="model"
        )
    return writing[-1]


CompletionPart: TypeAlias = StageOutput | Completion | OutputDelta | CompletionDelta
"""All of a completion, or what is new of it."""


def parts_of(output: StageOutput | OutputDelta) -> list[tuple[int, CompletionPart]]:
    """List the completions of an output, or those of a delta that have anything new, by index.

    Of a kind of stage that gives no completions, the output is the only one.
    """
    if isinstance(output, StageOutput):
        return list(enumerate(output.completions or (output,)))
    return [(0, output), *((other.index, other) for other in output.others)]


class TokenCount:
    """Counts the tokens of a prompt, and of its completions, as they come or at once."""

    def __init__(self, output: StageOutput | None = None) -> None:
        self.prompt = self.cached = 0
        self.written: dict[int, int] = {}
        if output is not None:
            self.add(output)

    def add(self, output: StageOutput | OutputDelta) -> None:
        """Count all, or what is new, of one request."""
        self.prompt = output.num_prompt_tokens or self.prompt
        self.cached = output.num_cached_tokens or self.cached
        for index, part in parts_of(output):
            self.written[index] = self.written.get(index, 0) + len(part.token_ids)

    def usage_of(self, index: int | None) -> Usage:
        """Count the tokens of the prompt beside those of one completion, or of none."""
        written = 0 if index is None else self.written.get(index, 0)
        return _usage(self.prompt, self.cached, written)


def usage_of(counts: Sequence[TokenCount]) -> Usage:
    """Count the tokens of prompts, and of all their completions."""
    prompt, cached = sum(each.prompt for each in counts), sum(each.cached for each in counts)
    return _usage(prompt, cached, sum(sum(each.written.values()) for each in counts))


def _usage(prompt: int, cached: int, written: int) -> Usage:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": written,
        "total_tokens": prompt + written,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


class LogprobWriter:
    """Writes log-probabilities, with the text of each token by itself."""

    def __init__(self, pipeline: ServedPipeline, stage: str) -> None:
        tokenizer = pipeline.tokenizer(stage)
        if tokenizer is None:
            raise ApiError.bad_field(
                "logprobs", f"the stage {stage!r} has no tokenizer to name tokens by"
            )
        self._texts = texts = TokenTexts(tokenizer)
        self._places = defaultdict[int, TokenPlaces](lambda: TokenPlaces(tokenizer, texts))

    def chat(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """Write in the shape of chats."""
        return {
            "content": [
                self._token(entry.token_id, entry.logprob)
                | {"top_logprobs": [self._token(*each) for each in entry.top]}
                for entry in entries
            ]
        }

    def completion(self, entries: Sequence[TokenLogprobs], index: int) -> dict[str, list[Any]]:
        """Write in the shape of completions what follows in that one, token after token."""
        places = self._places[index]
        return {
            "tokens": [self._texts.text(entry.token_id) for entry in entries],
            "token_logprobs": [_number(entry.logprob) for entry in entries],
            "top_logprobs": [self._by_text(entry) for entry in entries],
            "text_offset": [places.append(entry.token_id) for entry in entries],
        }

    def _by_text(self, entry: TokenLogprobs) -> dict[str, float]:
        """Map the likeliest tokens, and the chosen one; of several with one text, the likeliest."""
        by_text: dict[str, float] = {}
        for token_id, logprob in entry.top:
            by_text.setdefault(self._texts.text(token_id), _number(logprob))
        # Clients look it up by the text that they got of it.
        by_text[self._texts.text(entry.token_id)] = _number(entry.logprob)
        return by_text

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        own = self._texts.bytes_of(token_id)
        return {
            "token": self._texts.text(token_id),
            "logprob": _number(logprob),
            "bytes": None if own is None else list(own),
        }


def _number(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _LEAST


_ENCODER = Encoder()


class ChatAudio(Struct, kw_only=True):
    """The sound of an answer, or what is new of it.

    ``data`` is written as base64: a file, or in a stream samples of 16 bits. ``sampling_rate`` is
    ours: it is the checkpoint's, and not always 24,000. Until ``expires_at`` a later request may
    name the answer by the ``id``.
    """

    id: str
    data: bytes | UnsetType = UNSET
    transcript: str | UnsetType = UNSET
    expires_at: int | UnsetType = UNSET
    sampling_rate: int | UnsetType = UNSET


class AssistantMessage(Struct, kw_only=True):
    """The assistant's message, or new parts of it."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET
    audio: ChatAudio | UnsetType = UNSET


class Choice(Struct, kw_only=True):
    """One completion: of a chat its message, or in a stream the delta of it; else its text."""

    index: int
    message: AssistantMessage | UnsetType = UNSET
    delta: AssistantMessage | UnsetType = UNSET
    text: str | UnsetType = UNSET
    logprobs: dict[str, Any] | None = None
    finish_reason: str | None = None


class Answer(Struct, kw_only=True):
    """Completions of a chat or of prompts, or new parts of them."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Choice]
    usage: Usage | UnsetType | None = UNSET


class TextResponse(PipelineResponse):
    """A response of completions: what chats and plain completions have in common."""

    id_prefix: ClassVar[str]
    chunk_kind: ClassVar[str]
    """What a part of a stream calls itself."""
    param_names: ClassVar[Mapping[str, str]] = {}
    """Names by which clients know fields, where these are not those of the body."""

    def __init__(self, request: Request, body: ChatRequest | CompletionRequest) -> None:
        super().__init__(request, body.model, is_streamed=body.stream)
        self.server.check_room(self.client, body.model)  # before files are decoded and fetched
        stage = self._stage = text_stage(self.stages)
        fields, names = body.stage_fields()
        names = {key: self.param_names.get(name, name) for key, name in names.items()}
        self._sampling = merge_sampling(self.stages, stage, fields, body.stages, names)
        params = self._sampling.get(stage, self.stages.stages[stage].sampling)
        self._n = params.n if params is not None else 1  # completions of each prompt
        self._logprobs = LogprobWriter(self.pipeline, stage) if "logprobs" in fields else None
        self._options = body.stream_options or StreamOptions()
        self._id = f"{self.id_prefix}-{self.client.request_id}"
        self._created = int(time.time())

    def _answer(self, kind: str, choices: list[Choice]) -> Answer:
        return Answer(
            id=self._id,
            object=kind,
            created=self._created,
            model=self.pipeline.name,
            choices=choices,
        )

    def _event_of(self, choices: list[Choice], usage: Usage | None) -> bytes:
        """The event of new parts; the usage is null where it is not counted."""
        chunk = self._answer(self.chunk_kind, choices)
        if self._options.include_usage:
            chunk.usage = usage
        return as_event(chunk)


def as_json(answer: Any) -> bytes:
    """Write an answer."""
    return _ENCODER.encode(answer)


def as_event(answer: Any) -> bytes:
    """Write an answer as a server-sent event."""
    return event(_ENCODER.encode(answer))
