"""A pipeline in this process as what the load is put on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from engine.interface.schema_error import explain_validation_error
from omni.commands.bench.load_source import Send
from omni.commands.bench.measured_request import RequestFailure
from omni.commands.bench.request_timer import RequestTimer
from omni.pipelines.pipeline_config import PipelineConfig
from omni.requests.request import OmniOutput, OmniRequest
from omni.requests.request_files import FolderFiles
from omni.requests.request_line import RequestLine
from omni.requests.request_prompt import prompt_of
from omni.requests.request_sampling import sampling_of
from omni.runtime.omni import Omni
from stages import StageOutput

__all__ = ["PipelineTarget"]


class PipelineTarget:
    """A pipeline in this process: no server, and nothing between.

    Args:
        omni: runs the pipeline; stays open.
        config: of the pipeline.
    """

    def __init__(self, omni: Omni, config: PipelineConfig) -> None:
        self._omni = omni
        self._own_sampling = {name: stage.own_sampling for name, stage in config.stages.items()}
        finals = {name: stage.final_output for name, stage in config.stages.items()}
        self._text_stage = next((name for name in reversed(finals) if "text" in finals[name]), None)
        self._sound_stage = next(
            (name for name in reversed(finals) if "audio" in finals[name]), None
        )

    @property
    def answering_stage(self) -> str | None:
        """The last stage whose text the user gets: the one that answers on a server too."""
        return self._text_stage

    def prepare(self, line: Mapping[str, Any], folder: Path) -> Send:
        """Read a line; see :class:`~omni.commands.bench.load_source.LoadTarget`."""
        data = dict(line)
        if self._text_stage is None and not data.get("sampling", {}):
            data.pop("sampling", None)
        try:
            parsed = RequestLine.model_validate_json(json.dumps(data), strict=True)
        except ValidationError as error:
            told = explain_validation_error(error, RequestLine, data)
            raise ValueError(told.replace("\n", "; ")) from error
        request = OmniRequest(
            prompt_of(parsed, FolderFiles(folder)),
            sampling=sampling_of(parsed.sampling, self._own_sampling),
            priority=parsed.priority,
            cache_salt=parsed.cache_salt,
            speaker=parsed.speaker,
        )
        return self.send_of(request)

    def send_of(self, request: OmniRequest) -> Send:
        """What sends a request that is made already, under an id of its own every time."""
        return partial(self._send, replace(request, request_id=None))

    async def reset_caches(self) -> None:
        """Forget what was computed, so that every level begins alike."""
        await asyncio.to_thread(self._reset_caches)

    def _reset_caches(self) -> None:
        with self._omni.paused() as pipeline:
            for stage in pipeline.stages.values():
                stage.reset_prefix_cache()

    async def _send(self, request: OmniRequest, timer: RequestTimer) -> str:
        last: OmniOutput | None = None
        num_tokens = 0
        timer.send()
        try:
            async with aclosing(self._omni.astream(request)) as outputs:
                async for last in outputs:
                    num_tokens = self._note(last, num_tokens, timer)
        except RuntimeError as error:  # the pipeline itself is over
            raise RequestFailure("pipeline", f"{error}: {error.__cause__!r}") from error
        assert last is not None
        if last.error is not None:
            raise RequestFailure("refused" if last.refused else "request failed", last.error)
        answer = self._answer(last)
        if answer is None:
            return ""
        # Of one that writes no tokens, such as an encoder, there is nothing to count.
        written = sum(len(each.token_ids) for each in answer.completions)
        timer.usage(answer.num_prompt_tokens, answer.num_cached_tokens, written)
        return answer.text or ""

    def _answer(self, output: OmniOutput) -> StageOutput | None:
        """The output of the stage that answers; without one, of the first that the user gets."""
        if self._text_stage is not None:
            return output.stages.get(self._text_stage)
        return next(iter(output.stages.values()), None)

    def _note(self, output: OmniOutput, num_tokens: int, timer: RequestTimer) -> int:
        """Time what is new; returns how many tokens the answer has now."""
        written = output.stages.get(self._text_stage or "")
        if written is not None:
            before, num_tokens = num_tokens, len(written.token_ids)
            # Without a tokenizer there are ids alone; with one, a token may not end a letter yet.
            if written.delta or (written.text is None and num_tokens > before):
                timer.text()
        sound = output.stages.get(self._sound_stage or "")
        if sound is not None and sound.audio_delta is not None:
            timer.audio(sound.audio_delta.duration_s)
        return num_tokens
