"""Reads ``requests.jsonl``: one request a line, in which a bad line fails alone."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from engine import (
    AudioPrompt,
    ChatPrompt,
    DecoderPrompt,
    EmbedsPrompt,
    EncoderPrompt,
    ExplicitEncoderDecoderPrompt,
    ImagePrompt,
    Prompt,
    SamplingParams,
    TextPrompt,
    TokensPrompt,
)
from omni.documents.schema_error import explain_validation_error
from omni.documents.suggestion import suggest
from omni.requests.request import OmniRequest
from omni.requests.request_line import AudioFile, PromptForm, RequestLine

__all__ = ["RequestError", "read_requests"]


@dataclass(frozen=True, slots=True)
class RequestError:
    """A line that is no request.

    Attributes:
        line: its number, from 1.
        request_id: the line's own where it can be read, else one made up.
        message: what is wrong, with file and line.
    """

    line: int
    request_id: str
    message: str


@dataclass(frozen=True, slots=True)
class _Line:
    """A line of the file: a JSON object, or what keeps it from being one, and in which column."""

    number: int
    data: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None
    column: int | None = None

    @property
    def given_id(self) -> str | None:
        request_id = self.data.get("request_id")
        return request_id if isinstance(request_id, str) and request_id else None


def read_requests(
    path: str | Path, sampling: Mapping[str, SamplingParams | None]
) -> list[OmniRequest | RequestError]:
    """Read a file of requests.

    Args:
        path: the file, UTF-8, one JSON object a line; empty lines are skipped.
        sampling: every stage's own sampling parameters, which a line changes field by field; None
            for a stage that does not sample.

    Returns:
        One entry per line, in order; every entry has a request id. A wrong line becomes a
        :class:`RequestError`, and the others are read as if it were not there.

    Raises:
        ValueError: the file cannot be read, or has no request in it.
    """
    path = Path(path)
    lines = list(_read_lines(path))
    if not lines:
        raise ValueError(f"{path}: no request in it")
    entries: list[OmniRequest | RequestError] = []
    first_line: dict[str, int] = {}
    for line, request_id in zip(lines, _request_ids(lines), strict=True):
        first = first_line.setdefault(request_id, line.number)
        try:
            if line.error:
                raise ValueError(line.error)
            if first != line.number:
                raise ValueError(f"request_id: {request_id!r} is already used on line {first}")
            entries.append(_request(line.data, request_id, path.parent, sampling))
        except ValueError as error:
            where = f"{path}:{line.number}" + (f":{line.column}" if line.column else "")
            entries.append(RequestError(line.number, request_id, f"{where}: {error}"))
    return entries


def _read_lines(path: Path) -> Iterator[_Line]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
    # Not splitlines(): a JSON string may hold other line separators than "\n".
    for number, raw in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if raw.strip():
            yield _parse(number, raw)


def _parse(number: int, raw: bytes) -> _Line:
    try:
        data = json.loads(
            raw.decode("utf-8"),
            object_pairs_hook=_without_duplicates,
            parse_constant=_refuse_constant,
        )
        # Half of a surrogate pair is valid JSON, but no text: it could not be written again.
        json.dumps(data, ensure_ascii=False).encode("utf-8")
    except json.JSONDecodeError as error:
        return _Line(number, error=f"not valid JSON: {error.msg}", column=error.colno)
    except UnicodeDecodeError as error:
        return _Line(number, error="not valid UTF-8", column=error.start + 1)
    except UnicodeEncodeError:
        return _Line(number, error="a string in it has half of a surrogate pair")
    except RecursionError:
        return _Line(number, error="not valid JSON: nested too deeply")
    except ValueError as error:
        return _Line(number, error=f"not valid JSON: {error}")
    if not isinstance(data, dict):
        return _Line(number, error="expected a JSON object: {...}")
    return _Line(number, data)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"key {next(key for key in keys if keys.count(key) > 1)!r} stands twice")
    return data


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number that JSON has")


def _request_ids(lines: Sequence[_Line]) -> Iterator[str]:
    """Give each line its own id, or one made up that no line has."""
    given = {line.given_id for line in lines}
    for line in lines:
        made_up = f"line-{line.number}"
        while made_up in given:
            made_up += "-"
        yield line.given_id or made_up


def _request(
    data: Mapping[str, Any],
    request_id: str,
    folder: Path,
    sampling: Mapping[str, SamplingParams | None],
) -> OmniRequest:
    try:
        line = RequestLine.model_validate_json(json.dumps(data), strict=True)
    except ValidationError as error:
        raise ValueError(_in_one_line(error, RequestLine, data)) from error
    return OmniRequest(
        _prompt(line, folder),
        request_id=request_id,
        sampling={
            stage: _sampling(stage, fields, sampling) for stage, fields in line.sampling.items()
        },
        priority=line.priority,
        cache_salt=line.cache_salt,
        speaker=line.speaker,
    )


def _in_one_line(
    error: ValidationError, model: type[BaseModel], data: Any, within: tuple[str, ...] = ()
) -> str:
    return explain_validation_error(error, model, data, within=within).replace("\n", "; ")


def _sampling(
    stage: str, fields: Mapping[str, Any], sampling: Mapping[str, SamplingParams | None]
) -> SamplingParams:
    """Change the named fields of a stage's own sampling parameters."""
    if stage not in sampling:
        raise ValueError(f"sampling.{stage}: unknown stage{suggest(stage, sampling)}")
    own = sampling[stage]
    if own is None:
        raise ValueError(f"sampling.{stage}: this stage does not sample; leave it out")
    changed = own.model_dump(mode="json") | dict(fields)
    try:
        return SamplingParams.model_validate_json(json.dumps(changed), strict=True)
    except ValidationError as error:
        message = _in_one_line(error, SamplingParams, changed, ("sampling", stage))
        raise ValueError(message) from error


def _prompt(line: RequestLine, folder: Path) -> Prompt:
    encoder = _encoder_prompt(line, folder)
    if encoder is None:
        return _with_items(_form(line, folder), line, folder)
    if line.decoder_prompt is None:
        return ExplicitEncoderDecoderPrompt(encoder)
    return ExplicitEncoderDecoderPrompt(encoder, _side(line.decoder_prompt, folder))


def _encoder_prompt(line: RequestLine, folder: Path) -> EncoderPrompt | None:
    """What the line gives for an encoder by name, if anything."""
    if line.encoder_prompt is not None:
        return _side(line.encoder_prompt, folder)
    if line.shows_items:
        return None
    if line.audio is not None:
        (entry,) = _audio_files(line)
        return AudioPrompt(
            _existing("audio", folder / entry.file),
            language=entry.language,
            task=entry.task,
            timestamps=entry.timestamps,
        )
    if line.images is not None:
        (image,) = line.images
        return ImagePrompt(_existing("images", folder / image))
    return None


def _with_items(form: DecoderPrompt, line: RequestLine, folder: Path) -> DecoderPrompt:
    """Let a prompt show the line's images and sound, if it has any."""
    if not isinstance(form, TextPrompt | ChatPrompt | TokensPrompt):
        return form
    shown = {
        "image": [_existing("images", folder / image) for image in line.images or ()],
        "audio": [_existing("audio", folder / entry.file) for entry in _audio_files(line)],
    }
    return replace(form, multi_modal_data={key: files for key, files in shown.items() if files})


def _audio_files(line: RequestLine) -> list[AudioFile]:
    entries = line.audio or ()
    return [AudioFile(file=entry) if isinstance(entry, str) else entry for entry in entries]


def _existing(key: str, file: Path) -> Path:
    """Tell of a missing file now; whether its content will do is the engine's to say."""
    if not file.is_file():
        raise ValueError(f"{key}: {str(file)!r} cannot be read: there is no such file")
    return file


def _side(side: str | PromptForm, folder: Path) -> DecoderPrompt:
    return TextPrompt(side) if isinstance(side, str) else _form(side, folder)


def _form(line: RequestLine | PromptForm, folder: Path) -> DecoderPrompt:
    if isinstance(line.prompt, str):
        return TextPrompt(line.prompt)
    if line.prompt is not None:
        return ChatPrompt(tuple(message.model_dump(exclude_none=True) for message in line.prompt))
    if line.prompt_token_ids is not None:
        return TokensPrompt(line.prompt_token_ids)
    if line.prompt_embeds is None:
        raise ValueError("the line has no prompt")
    return EmbedsPrompt(_load_embeds(folder / line.prompt_embeds))


def _load_embeds(file: Path) -> Tensor:
    """Load the one tensor ``(tokens, hidden)`` of a file; its width is the engine's to check."""
    try:
        tensors = load_file(file)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"prompt_embeds: {str(file)!r} cannot be read: {error}") from error
    if len(tensors) != 1:
        raise ValueError(
            f"prompt_embeds: {str(file)!r} must hold one tensor, got {len(tensors)}: "
            f"{', '.join(sorted(tensors))}"
        )
    (embeds,) = tensors.values()
    if embeds.ndim != 2 or not embeds.shape[0] or not embeds.is_floating_point():
        raise ValueError(
            f"prompt_embeds: {str(file)!r} must hold a floating-point tensor (tokens, hidden), "
            f"got {str(embeds.dtype).removeprefix('torch.')} {tuple(embeds.shape)}"
        )
    return embeds
