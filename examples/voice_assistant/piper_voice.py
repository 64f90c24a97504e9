"""A Piper voice as a kind of stage: it says an answer by sentences, while it is written."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch

from engine import FinishReason, TextChunk, Waveform
from omni import Prompt, Stage, StageConfig, StageOutput
from stages import StageRequest
from stages.stage import OneOrMore


class PiperVoiceConfig(StageConfig):
    """What YAML may say of it: the voice's ONNX file, with its JSON beside it."""

    takes_chunks: ClassVar[bool] = True

    kind: Literal["piper_voice"]
    voice: Path
    final_output: Annotated[tuple[Literal["audio"], ...], OneOrMore] = ("audio",)

    def build_stage(self, name: str) -> Stage:
        return PiperVoiceStage(name, self.voice, inputs=self.inputs, final_output=self.final_output)


@dataclass
class Speech:
    """One request: what is to be said, and how much of it was said."""

    chunk: TextChunk
    num_said: int = 0


class PiperVoiceStage(Stage):
    """Says what is new of one request in a step; requests take turns."""

    final_output_kinds = ("audio",)
    has_cache = False
    takes_chunks = True

    def __init__(self, name: str, voice: Path, **graph: Any) -> None:
        super().__init__(name, **graph)
        from piper import PiperVoice

        self._voice = PiperVoice.load(voice)
        self._speeches: dict[str, Speech] = {}
        self._turns: deque[str] = deque()

    def add_request(self, request: StageRequest) -> None:
        self._take(request.request_id, request.prompt)

    def extend_request(self, request_id: str, prompt: Prompt) -> None:
        self._take(request_id, prompt)

    def needs_input(self, request_id: str) -> bool:
        speech = self._speeches.get(request_id)
        return speech is not None and not speech.chunk.is_last and request_id not in self._turns

    def _take(self, request_id: str, prompt: Prompt) -> None:
        if not isinstance(prompt, TextChunk):
            raise ValueError(f"it says a TextChunk, got a {type(prompt).__name__}")
        speech = self._speeches.setdefault(request_id, Speech(prompt))
        speech.chunk = prompt
        if prompt.is_last or prompt.text[speech.num_said :].strip():
            self._turns.append(request_id)

    def step(self) -> list[StageOutput]:
        if not self._turns:
            return []
        self.num_steps += 1
        request_id = self._turns.popleft()
        speech = self._speeches[request_id]
        new, speech.num_said = speech.chunk.text[speech.num_said :], len(speech.chunk.text)
        pieces = self._voice.synthesize(new) if new.strip() else ()
        made = [torch.from_numpy(piece.audio_float_array) for piece in pieces]
        sound = Waveform(torch.cat(made), self._voice.config.sample_rate) if made else None
        if not speech.chunk.is_last:
            return [StageOutput(request_id, self.name, False, audio_delta=sound)]
        del self._speeches[request_id]
        reason = FinishReason.STOP
        return [StageOutput(request_id, self.name, True, finish_reason=reason, audio_delta=sound)]

    def abort(self, request_id: str) -> None:
        self._speeches.pop(request_id, None)
        self._turns = deque(each for each in self._turns if each != request_id)

    @property
    def has_unfinished_requests(self) -> bool:
        return bool(self._speeches)

    def describe(self) -> Mapping[str, Any]:
        return {"sampling_rate": self._voice.config.sample_rate}
