"""One request's line of ``outputs.jsonl``, and the files of tensors and sounds that it names."""

from __future__ import annotations

import errno
import hashlib
import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from engine import TokenLogprobs, Waveform
from omni.requests.output_folder import OutputFolder
from omni.requests.request import OmniOutput
from stages import Completion, StageOutput

__all__ = ["OutputLines", "describe_stage", "file_name", "files_of", "printable"]


class OutputLines:
    """Describes outputs, and writes what is no text into files of a folder.

    Args:
        folder: gets ``tensors/<request>/<stage>.<tensor>.safetensors``, one tensor per file, and
            ``audio/<request>/<stage>.wav``.
        final_output: for each final stage what the user gets of it: ``text``, ``tensors``,
            ``audio``.
    """

    def __init__(self, folder: OutputFolder, final_output: Mapping[str, tuple[str, ...]]) -> None:
        self._folder = folder
        self._final_output = final_output

    def line(self, output: OmniOutput) -> dict[str, Any]:
        """Describe an output; its files are written when this returns.

        An output that has no form on disk, such as a sound with samples that are not finite,
        becomes an error of its request.

        Raises:
            OSError: a file cannot be written.
        """
        line: dict[str, Any] = {
            "request_id": printable(output.request_id),
            "error": None if output.error is None else printable(output.error),
            "stages": {},
        }
        for name, stage in output.stages.items():
            if name in self._final_output:
                try:
                    line["stages"][name] = self._stage(stage, self._final_output[name])
                except ValueError as error:
                    line["error"] = line["error"] or f"stage {name!r} cannot be written: {error}"
        return line

    def _stage(self, output: StageOutput, wanted: tuple[str, ...]) -> dict[str, Any]:
        return describe_stage(
            output, wanted, tensor=partial(self._save, output), sound=partial(self._sound, output)
        )

    def _sound(self, output: StageOutput, sound: Waveform) -> str:
        return self._write("audio", output, ".wav", partial(sound.save, format="wav"))

    def _save(self, output: StageOutput, name: str, tensor: Tensor) -> str:
        rows = {name: tensor.contiguous()}

        def save(file: Path) -> None:
            try:
                save_file(rows, file)
            except SafetensorError as error:  # what it makes of a full disk
                raise OSError(errno.EIO, str(error), str(file)) from error

        return self._write("tensors", output, f".{file_name(name)}.safetensors", save)

    def _write(
        self, kind: str, output: StageOutput, ending: str, write: Callable[[Path], object]
    ) -> str:
        """Write one file of a stage's output; return its path from the output directory."""
        place = f"{kind}/{file_name(output.request_id)}/{file_name(output.stage)}{ending}"
        self._folder.write(place, write)
        return place


def describe_stage(
    output: StageOutput,
    wanted: Collection[str],
    *,
    tensor: Callable[[str, Tensor], str],
    sound: Callable[[Waveform], str],
) -> dict[str, Any]:
    """Describe one stage's output; a field that does not apply is absent.

    Args:
        output: in the end.
        wanted: what the user gets of the stage: ``text``, ``tensors``, ``audio``.
        tensor: tells where a tensor of a name is, or what it is.
        sound: the same of a sound.
    """
    line: dict[str, Any] = {}
    if "text" in wanted and output.text is not None:
        line["text"] = printable(output.text)
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
    if len(output.completions) > 1:
        line["completions"] = [_completion(each) for each in output.completions]
    if "tensors" in wanted and output.tensors:
        line["tensors"] = {name: tensor(name, rows) for name, rows in output.tensors.items()}
    if "audio" in wanted and output.audio is not None:
        line["audio"] = sound(output.audio)
    line["metrics"] = {
        name: round(value, 6) if isinstance(value, float) else value
        for name, value in asdict(output.metrics).items()
        if value is not None
    }
    return line


def files_of(line: Mapping[str, Any]) -> list[str]:
    """The files that a line names, as paths from the output directory."""
    files = []
    for stage in line["stages"].values():
        files += [*stage.get("tensors", {}).values()]
        files += [stage["audio"]] if "audio" in stage else []
    return files


def file_name(text: str) -> str:
    """Turn any text into one safe and short part of a path; different texts stay different.

    Plain lower-case names stay as they are. All others keep what can be kept and end in ``~`` and
    a hash: those with a slash, a dot, upper case (some file systems see no difference), ...
    """
    if re.fullmatch(r"[a-z0-9][a-z0-9_-]{0,63}", text):
        return text
    kept = re.sub(r"[^a-z0-9_-]+", "_", text.lower())[:48].strip("_")
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass"))
    return f"{kept}~{digest.hexdigest()[:16]}"


def printable(text: str) -> str:
    """The same text, with what UTF-8 cannot say escaped: halves of surrogate pairs.

    They stand for the bytes of file names that are no UTF-8.
    """
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _completion(completion: Completion) -> dict[str, Any]:
    line: dict[str, Any] = {
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason and completion.finish_reason.value,
    }
    if completion.logprobs is not None:
        line["logprobs"] = [_logprobs(entry) for entry in completion.logprobs]
    return line


def _logprobs(entry: TokenLogprobs) -> dict[str, Any]:
    return {
        "token_id": entry.token_id,
        "logprob": _number(entry.logprob),
        "top": [[token_id, _number(logprob)] for token_id, logprob in entry.top],
    }


def _number(value: float) -> float | None:
    """Give null for the minus infinity of a token that cannot be: JSON has no such number."""
    return value if math.isfinite(value) else None
