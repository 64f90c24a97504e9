"""Answers in OpenAI's format; only fields that are set are sent.

They are msgspec structs, since one is created and encoded for every streamed token. These take a
tenth of the time of validating models, and all values here come from trusted code.
"""

from __future__ import annotations

import math
import re
import time
from collections import defaultdict
from collections.abc import Sequence
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
"""Token counts of a prompt, of its cached tokens, and of all its completions."""

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenTexts:
    """Text and bytes of each token, as they appear within a text.

    ``left_out`` are special tokens, which do not appear in texts.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        # Imported lazily: the server must respond before transformers is imported.
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        from engine.text.stop_checker import ids_without_text

        self._tokenizer: Any = tokenizer
        self.left_out = ids_without_text(tokenizer)
        self._names = self.left_out.union(tokenizer.added_tokens_decoder)
        self._byte_of = {character: byte for byte, character in bytes_to_unicode().items()}
        self._known: dict[int, tuple[str, bytes | None]] = {}

    def text(self, token_id: int) -> str:
        """Return a token's text, with U+FFFD for bytes of an incomplete character."""
        return self._lookup(token_id)[0]

    def bytes_of(self, token_id: int) -> bytes | None:
        """Return a token's bytes, which may be part of a character; None if unknown."""
        return self._lookup(token_id)[1]

    def _lookup(self, token_id: int) -> tuple[str, bytes | None]:
        known = self._known.get(token_id)
        if known is None:
            known = self._known[token_id] = self._compute(token_id)
        return known

    def _compute(self, token_id: int) -> tuple[str, bytes | None]:
        piece: str | None = self._tokenizer.convert_ids_to_tokens(token_id)
        alone = self._decode(token_id)
        if piece is None:  # models often have more ids than their tokenizers have tokens
            return alone, None
        if token_id in self._names:
            return alone, alone.encode()
        if _REPLACEMENT in alone:
            return alone, self._bytes_of_piece(piece, alone)
        # Many decoders strip the space of a first token, but not of later ones.
        twice = self._decode(token_id, token_id)
        text = twice.removeprefix(alone) if twice.startswith(alone) else alone
        return text, text.encode()

    def _bytes_of_piece(self, piece: str, text: str) -> bytes | None:
        # Byte-level tokenizers map every byte to a separate character. For other tokenizers, the
        # mapped bytes do not decode to the same text.
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


class TokenOffsets:
    """Computes the offset of each token in a completion's text, token by token.

    Parts of a character have the offset of the character, and a run of byte pieces, which the
    tokenizer decodes as a whole, that of the run. A token without text, such as a special one, has
    the offset of what follows. After a stop string, which truncates the text, tokens have the
    offsets that they would have had without it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, texts: TokenTexts) -> None:
        from engine.text.stop_checker import IncrementalDetokenizer  # as above

        self._texts = texts
        self._written = IncrementalDetokenizer(tokenizer)
        self._num_written = 0

    def append(self, token_id: int) -> int:
        """Append a token, and return the number of characters before it."""
        before, delta = self._num_written, self._written.append(token_id)
        self._num_written += len(delta)
        text = self._texts.text(token_id)
        # More than the token's own text comes if earlier text was held back.
        return self._num_written - len(text) if text and delta.endswith(text) else before


_MIN_LOGPROB = -9999.0
"""Replacement for minus infinity, which JSON lacks; the same as in OpenAI's own answers."""


def text_stage(pipeline: Pipeline) -> str:
    """Return the last stage that outputs text to the user."""
    writing = [name for name, stage in pipeline.stages.items() if "text" in stage.final_output]
    if not writing:
        raise ApiError.bad_request(
            "this model writes no text; /v1/pipelines/{name} gives all that it makes", param="model"
        )
    return writing[-1]


CompletionPart: TypeAlias = StageOutput | Completion | OutputDelta | CompletionDelta
"""A completion, or the delta of one."""


def parts_of(output: StageOutput | OutputDelta) -> list[tuple[int, CompletionPart]]:
    """List the completions of an output, or those with new output in a delta, by index.

    For a stage kind without completions, the output itself is the only one.
    """
    if isinstance(output, StageOutput):
        return list(enumerate(output.completions or (output,)))
    return [(0, output), *((other.index, other) for other in output.others)]


class TokenCount:
    """Counter of the tokens of a prompt and its completions, incremental or all at once."""

    def __init__(self, output: StageOutput | None = None) -> None:
        self.prompt = self.cached = 0
        self.written: dict[int, int] = {}
        if output is not None:
            self.add(output)

    def add(self, output: StageOutput | OutputDelta) -> None:
        """Count a request's output or delta."""
        self.prompt = output.num_prompt_tokens or self.prompt
        self.cached = output.num_cached_tokens or self.cached
        for index, part in parts_of(output):
            self.written[index] = self.written.get(index, 0) + len(part.token_ids)

    def usage_of(self, index: int | None) -> Usage:
        """Return the usage of the prompt with one completion, or with none."""
        written = 0 if index is None else self.written.get(index, 0)
        return _usage(self.prompt, self.cached, written)


def usage_of(counts: Sequence[TokenCount]) -> Usage:
    """Return the total usage of prompts and all their completions."""
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
    """Formats log-probabilities, with the text of each token."""

    def __init__(self, pipeline: ServedPipeline, stage: str) -> None:
        tokenizer = pipeline.tokenizers[stage]
        if tokenizer is None:
            raise ApiError.bad_field(
                "logprobs", f"the stage {stage!r} has no tokenizer to name tokens by"
            )
        self._texts = texts = TokenTexts(tokenizer)
        self._offsets = defaultdict[int, TokenOffsets](lambda: TokenOffsets(tokenizer, texts))

    def chat(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """Return entries in the format of chats."""
        return {
            "content": [
                self._token(entry.token_id, entry.logprob)
                | {"top_logprobs": [self._token(*each) for each in entry.top]}
                for entry in entries
            ]
        }

    def completion(self, entries: Sequence[TokenLogprobs], index: int) -> dict[str, list[Any]]:
        """Return the next entries of a completion in the format of completions."""
        offsets = self._offsets[index]
        return {
            "tokens": [self._texts.text(entry.token_id) for entry in entries],
            "token_logprobs": [_finite(entry.logprob) for entry in entries],
            "top_logprobs": [self._by_text(entry) for entry in entries],
            "text_offset": [offsets.append(entry.token_id) for entry in entries],
        }

    def _by_text(self, entry: TokenLogprobs) -> dict[str, float]:
        """Map texts of the top and sampled tokens to logprobs, by text that of the likeliest."""
        by_text: dict[str, float] = {}
        for token_id, logprob in entry.top:
            by_text.setdefault(self._texts.text(token_id), _finite(logprob))
        # Clients look the sampled token up by its text.
        by_text[self._texts.text(entry.token_id)] = _finite(entry.logprob)
        return by_text

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        own = self._texts.bytes_of(token_id)
        return {
            "token": self._texts.text(token_id),
            "logprob": _finite(logprob),
            "bytes": None if own is None else list(own),
        }


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _MIN_LOGPROB


_ENCODER = Encoder()


class ChatAudio(Struct, kw_only=True):
    """The audio of an answer, or a delta of it.

    ``data`` is encoded as base64: a file, or 16-bit samples in a stream. ``sampling_rate``, an
    extension of OpenAI's format, is the checkpoint's, and not always 24,000. Until ``expires_at``
    later requests may refer to the answer by the ``id``.
    """

    id: str
    data: bytes | UnsetType = UNSET
    transcript: str | UnsetType = UNSET
    expires_at: int | UnsetType = UNSET
    sampling_rate: int | UnsetType = UNSET


class AssistantMessage(Struct, kw_only=True):
    """The assistant's message, or a delta of it."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET
    audio: ChatAudio | UnsetType = UNSET


class Choice(Struct, kw_only=True):
    """One completion: the message of a chat, or its delta in a stream; otherwise the text.

    ``token_ids``, and for a text the ``prompt_token_ids``, are set if requested.
    """

    index: int
    message: AssistantMessage | UnsetType = UNSET
    delta: AssistantMessage | UnsetType = UNSET
    text: str | UnsetType = UNSET
    logprobs: dict[str, Any] | None = None
    finish_reason: str | None = None
    token_ids: Sequence[int] | UnsetType = UNSET
    prompt_token_ids: Sequence[int] | UnsetType = UNSET


class Answer(Struct, kw_only=True):
    """Completions of a chat or of prompts, or deltas of them."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Choice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: Sequence[int] | UnsetType = UNSET


class TextResponse(PipelineResponse):
    """Base class of the responses to chat and completion requests."""

    id_prefix: ClassVar[str]
    chunk_kind: ClassVar[str]
    """The ``object`` field of a stream's chunks."""

    def __init__(self, request: Request, body: ChatRequest | CompletionRequest) -> None:
        super().__init__(request, body.model, is_streamed=body.stream)
        self.server.check_room(self.client, body.model)  # before decoding and fetching files
        stage = self._stage = text_stage(self.stages)
        fields, names = body.stage_fields()
        self._sampling = merge_sampling(self.stages, stage, fields, body.stages, names)
        params = self._sampling.get(stage, self.stages.stages[stage].sampling)
        self._n = params.n if params is not None else 1  # completions per prompt
        self._logprobs = LogprobWriter(self.pipeline, stage) if "logprobs" in fields else None
        self._options = body.stream_options or StreamOptions()
        self._returns_ids = body.return_token_ids
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
        """Encode a chunk as an event; its usage is null if not counted."""
        chunk = self._answer(self.chunk_kind, choices)
        if self._options.include_usage:
            chunk.usage = usage
        return as_event(chunk)


def as_json(answer: Any) -> bytes:
    """Encode an answer as JSON."""
    return _ENCODER.encode(answer)


def as_event(answer: Any) -> bytes:
    """Encode an answer as a server-sent event."""
    return event(_ENCODER.encode(answer))
