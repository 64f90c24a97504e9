"""A kind of stage with a Piper voice: speaks an answer by sentences while it is generated."""

from pathlib import Path
from typing import Any, ClassVar, Literal

import torch

from engine import FinishReason, TextChunk, Waveform
from omni import Prompt, Stage, StageConfig, StageOutput
from stages import StageRequest


class PiperVoiceConfig(StageConfig):
    """The stage's YAML keys: the voice's ONNX file, with its JSON next to it."""

    takes_chunks: ClassVar[bool] = True

    kind: Literal["piper_voice"]
    voice: Path

    def build_stage(self, name: str) -> Stage:
        return PiperVoiceStage(name, self.voice, inputs=self.inputs, final_output=self.final_output)


class PiperVoiceStage(Stage):
    """Speaks the new text of one request per step; requests take turns."""

    final_output_kinds = ("audio",)
    has_cache = False
    takes_chunks = True

    def __init__(self, name: str, voice: Path, **graph: Any) -> None:
        super().__init__(name, **graph)
        from piper import PiperVoice

        self._voice = PiperVoice.load(voice)
        self._chunks: dict[str, TextChunk] = {}  # with text to speak; each holds all text so far
        self._num_said: dict[str, int] = {}  # characters, of every live request

    def add_request(self, request: StageRequest) -> None:
        self.extend_request(request.request_id, request.prompt)

    def extend_request(self, request_id: str, prompt: Prompt) -> None:
        if not isinstance(prompt, TextChunk):
            raise ValueError(f"it says a TextChunk, got a {type(prompt).__name__}")
        self._chunks[request_id] = prompt
        self._num_said.setdefault(request_id, 0)

    def needs_input(self, request_id: str) -> bool:
        return request_id in self._num_said and request_id not in self._chunks

    def step(self) -> list[StageOutput]:
        if not self._chunks:
            return []
        self.num_steps += 1
        request_id = next(iter(self._chunks))
        chunk = self._chunks.pop(request_id)
        new, is_last = chunk.text[self._num_said.pop(request_id) :], chunk.is_last
        samples = [torch.from_numpy(p.audio_float_array) for p in self._voice.synthesize(new)]
        sound = Waveform(torch.cat(samples), self._voice.config.sample_rate) if samples else None
        if not is_last:
            self._num_said[request_id] = len(chunk.text)
        end = FinishReason.STOP if is_last else None
        return [StageOutput(request_id, self.name, is_last, finish_reason=end, audio_delta=sound)]

    def abort(self, request_id: str) -> None:
        self._chunks.pop(request_id, None)
        self._num_said.pop(request_id, None)

    @property
    def has_unfinished_requests(self) -> bool:
        return bool(self._num_said)
