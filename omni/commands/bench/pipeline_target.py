"""A pipeline in this process as a load target."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any

from omni.commands.bench.load import MeasuredRequest, RequestFailure, Send
from omni.pipelines.pipeline_config import PipelineConfig
from omni.requests.request import OmniOutput, OmniRequest
from omni.requests.request_file import make_request
from omni.runtime.omni import Omni
from stages import StageOutput


class PipelineTarget:
    """A pipeline in this process, without a server in between."""

    def __init__(self, omni: Omni, config: PipelineConfig) -> None:
        self._omni = omni
        self._own_sampling = {name: stage.own_sampling for name, stage in config.stages.items()}
        # For each kind of output the last stage that has it as final output, as on a server.
        last = {kind: name for name, each in config.stages.items() for kind in each.final_output}
        self.answering_stage, self._sound_stage = last.get("text"), last.get("audio")

    def prepare(self, line: Mapping[str, Any], folder: Path) -> Send:
        """Prepare a request; see :class:`~omni.commands.bench.load.LoadTarget`."""
        request = make_request(line, None, folder, self._own_sampling)
        return partial(self._send, request)

    async def reset_caches(self) -> None:
        """Empty the prefix caches of all stages, so that every level starts with the same state."""
        await asyncio.to_thread(self._reset_caches)

    def _reset_caches(self) -> None:
        with self._omni.paused() as pipeline:
            for stage in pipeline.stages.values():
                stage.reset_prefix_cache()

    async def _send(self, request: OmniRequest, record: MeasuredRequest) -> str:
        last: OmniOutput | None = None
        num_tokens = 0
        record.send()
        try:
            async with aclosing(self._omni.astream(request)) as outputs:
                async for last in outputs:
                    num_tokens = self._note(last, num_tokens, record)
        except RuntimeError as error:  # the pipeline itself has failed
            raise RequestFailure("pipeline", f"{error}: {error.__cause__!r}") from error
        assert last is not None
        if last.error is not None:
            raise RequestFailure("refused" if last.refused else "request failed", last.error)
        answer = self._answer(last)
        if answer is None:
            return ""
        # A stage that generates no tokens, such as an encoder, has no completions.
        written = sum(len(each.token_ids) for each in answer.completions)
        record.usage(answer.num_prompt_tokens, answer.num_cached_tokens, written)
        return answer.text or ""

    def _answer(self, output: OmniOutput) -> StageOutput | None:
        """Return the output of the answering stage; without one, that of the first final stage."""
        if self.answering_stage is not None:
            return output.stages.get(self.answering_stage)
        return next(iter(output.stages.values()), None)

    def _note(self, output: OmniOutput, num_tokens: int, record: MeasuredRequest) -> int:
        """Record what is new; return the number of tokens of the answer so far."""
        for each in output.timeline:
            record.enter(each.stage, time.monotonic() - each.entered_s)
        written = output.stages.get(self.answering_stage or "")
        if written is not None:
            before, num_tokens = num_tokens, len(written.token_ids)
            # Without a tokenizer there are only ids; with one, a token may be a partial character.
            if written.delta or (written.text is None and num_tokens > before):
                record.text()
        sound = output.stages.get(self._sound_stage or "")
        if sound is not None and sound.audio_delta is not None:
            record.audio(sound.audio_delta.duration_s)
        return num_tokens
