"""Writes ``outputs.jsonl``, and tensors and sounds beside it."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Self

from safetensors.torch import save_file
from torch import Tensor

from engine import TokenLogprobs
from engine.media.wav_file import write_wav
from omni.requests.request import OmniOutput
from stages import StageOutput

__all__ = ["OutputWriter", "file_name"]


class OutputWriter:
    """Writes each request's output as soon as it and all before it are there.

    ::

        directory/outputs.jsonl                                    one line per request, in order
        directory/tensors/<request>/<stage>.<tensor>.safetensors   one tensor per file
        directory/audio/<request>/<stage>.wav                      one sound per file

    A line is written whole and flushed, after the files that it names: however a run ends, every
    line of ``outputs.jsonl`` is complete and true. An ``outputs.jsonl`` of an earlier run is
    replaced.

    Args:
        directory: made if missing.
        final_output: for each final stage what the user gets of it: ``text``, ``tensors``,
            ``audio``.

    Raises:
        OSError: the directory cannot be made or written to.
    """

    def __init__(self, directory: str | Path, final_output: Mapping[str, tuple[str, ...]]) -> None:
        self._directory = Path(directory)
        self._final_output = final_output
        self._directory.mkdir(parents=True, exist_ok=True)
        self._file = open(self._directory / "outputs.jsonl", "w", encoding="utf-8")  # noqa: SIM115
        self._next = 0
        self._waiting: dict[int, str] = {}

    def write(self, position: int, output: OmniOutput) -> None:
        """Take a finished request's output.

        Its tensors and sounds are written now, its line when those of all earlier positions are.

        Args:
            position: of the request among all, from 0.
            output: what became of it.

        Raises:
            ValueError: this position has been written.
            OSError: the disk is full or the like.
        """
        if position < self._next or position in self._waiting:
            raise ValueError(f"the output at position {position} has been written already")
        line = self._line(output)
        self._waiting[position] = json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n"
        while self._next in self._waiting:
            self._file.write(self._waiting.pop(self._next))
            self._next += 1
        self._file.flush()

    def close(self) -> None:
        """Write what still waits for an earlier request that never came, and close the file."""
        for position in sorted(self._waiting):
            self._file.write(self._waiting.pop(position))
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _line(self, output: OmniOutput) -> dict[str, Any]:
        return {
            "request_id": output.request_id,
            "error": output.error,
            "stages": {
                name: self._stage(stage, self._final_output[name])
                for name, stage in output.stages.items()
                if name in self._final_output
            },
        }

    def _stage(self, output: StageOutput, wanted: tuple[str, ...]) -> dict[str, Any]:
        """Describe one stage's output; a field that does not apply is absent."""
        line: dict[str, Any] = {}
        if "text" in wanted and output.text is not None:
            line["text"] = output.text
        if output.text is not None or output.token_ids:
            line["token_ids"] = list(output.token_ids)
        if output.finish_reason is not None:
            line["finish_reason"] = output.finish_reason.value
        if output.encoder_prompt_token_ids is not None:
            line["encoder_prompt_token_ids"] = list(output.encoder_prompt_token_ids)
        line["num_prompt_tokens"] = output.num_prompt_tokens
        line["num_cached_tokens"] = output.num_cached_tokens
        if output.logprobs is not None:
            line["logprobs"] = [_logprobs(entry) for entry in output.logprobs]
        if output.completions:
            line["completions"] = [
                {"text": text, "token_ids": list(ids), "finish_reason": reason and reason.value}
                for text, ids, reason in output.completions
            ]
        if "tensors" in wanted and output.tensors:
            line["tensors"] = {
                name: self._save(output, name, tensor) for name, tensor in output.tensors.items()
            }
        if "audio" in wanted and (sound := output.audio) is not None:
            write = partial(write_wav, waveform=sound)
            line["audio"] = self._write("audio", output, ".wav", write)
        line["metrics"] = {
            name: round(value, 6)
            for name, value in asdict(output.metrics).items()
            if value is not None
        }
        return line

    def _save(self, output: StageOutput, name: str, tensor: Tensor) -> str:
        rows = {name: tensor.contiguous()}
        ending = f".{file_name(name)}.safetensors"
        return self._write("tensors", output, ending, lambda file: save_file(rows, file))

    def _write(
        self, folder: str, output: StageOutput, ending: str, write: Callable[[Path], None]
    ) -> str:
        """Write one file of a stage's output; return its path from the output directory."""
        relative = Path(folder, file_name(output.request_id), file_name(output.stage) + ending)
        target = self._directory / relative
        target.parent.mkdir(parents=True, exist_ok=True)
        # Written aside and renamed, so that no half-written file ever has the name.
        aside = target.with_suffix(".partial")
        write(aside)
        os.replace(aside, target)
        return relative.as_posix()


def file_name(text: str) -> str:
    """Turn any text into one safe and short part of a path; different texts stay different.

    Plain lower-case names stay as they are. All others keep what can be kept and end in ``~`` and
    a hash: those with a slash, a dot, upper case (some file systems see no difference), ...
    """
    if re.fullmatch(r"[a-z0-9][a-z0-9_-]{0,63}", text):
        return text
    kept = re.sub(r"[^a-z0-9_-]+", "_", text.lower())[:48].strip("_")
    return f"{kept}~{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _logprobs(entry: TokenLogprobs) -> dict[str, Any]:
    return {
        "token_id": entry.token_id,
        "logprob": _number(entry.logprob),
        "top": [[token_id, _number(logprob)] for token_id, logprob in entry.top],
    }


def _number(value: float) -> float | None:
    """Give null for the minus infinity of a token that cannot be: JSON has no such number."""
    return value if math.isfinite(value) else None
