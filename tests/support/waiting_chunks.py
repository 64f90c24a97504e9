"""How many chunks wait in front of a stage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from engine import Prompt
from stages import TransformContext, chunkable
from tests.support.fake_speech import FakeSpeechStage

__all__ = ["WaitingChunks"]


class WaitingChunks:
    """Counts the chunks that come to a stage, and those that it takes. ::

        waiting = WaitingChunks(talker_to_code2wav)
        stages = speech_stages((1, 2), code2wav={"transform": waiting.transform})
        waiting.stage = stages[2]

    It counts where the stage runs, in the thread that drives it.
    """

    stage: FakeSpeechStage

    def __init__(self, transform: Callable[[TransformContext], Prompt]) -> None:
        self._came: Counter[str] = Counter()
        self.most: Counter[str] = Counter()

        @chunkable
        def counted(context: TransformContext) -> Prompt:
            request_id = context.request_id
            self._came[request_id] += 1
            self.most[request_id] = max(self.most[request_id], self.now(request_id))
            return transform(context)

        self.transform = counted

    def now(self, request_id: str) -> int:
        """How many of a request's wait; the request enters with its first one, which does not."""
        taken = len(self.stage.received.get(request_id, ()))
        return max(0, self._came[request_id] - max(1, taken))
