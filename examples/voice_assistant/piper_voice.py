"""A Piper voice as a kind of stage: it says an answer by sentences, while it is written."""

from __future__ import annotations

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

    @property
    def new(self) -> str:
        return self.chunk.text[self.num_said :]

    @property
    def is_ready(self) -> bool:
        return self.chunk.is_last or bool(self.new.strip())


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

    def add_request(self, request: StageRequest) -> None:
        self.extend_request(request.request_id, request.prompt)

    def extend_request(self, request_id: str, prompt: Prompt) -> None:
        if not isinstance(prompt, TextChunk):
            raise ValueError(f"it says a TextChunk, got a {type(prompt).__name__}")
        self._speeches.setdefault(request_id, Speech(prompt)).chunk = prompt

    def needs_input(self, request_id: str) -> bool:
        return request_id in self._speeches and not self._speeches[request_id].is_ready

    def step(self) -> list[StageOutput]:
        ready = [each for each, speech in self._speeches.items() if speech.is_ready]
        if not ready:
            return []
        self.num_steps += 1
        speech = self._speeches.pop(ready[0])
        pieces = self._voice.synthesize(speech.new) if speech.new.strip() else ()
        samples = [torch.from_numpy(piece.audio_float_array) for piece in pieces]
        sound = Waveform(torch.cat(samples), self._voice.config.sample_rate) if samples else None
        if not (is_last := speech.chunk.is_last):
            speech.num_said = len(speech.chunk.text)
            self._speeches[ready[0]] = speech  # behind the others
        reason = FinishReason.STOP if is_last else None
        return [StageOutput(ready[0], self.name, is_last, finish_reason=reason, audio_delta=sound)]

    def abort(self, request_id: str) -> None:
        self._speeches.pop(request_id, None)

    @property
    def has_unfinished_requests(self) -> bool:
        return bool(self._speeches)
