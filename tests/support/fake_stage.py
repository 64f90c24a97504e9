"""A stage without a model that echoes its prompt slowly, and fails on demand."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from engine import EmbedsPrompt, FinishReason, SamplingParams, TextPrompt, TokensPrompt
from stages import Stage, StageInputs, StageOutput, StageRequest, StageStats


class FakeStage(Stage):
    """Puts out ``name(prompt)`` in ``steps`` pieces.

    Args:
        name: of the stage.
        sources: the stages that feed it, by ``transform``; none for a root.
        transform: of its inputs.
        steps: number of steps per request.
        refuse: ids whose ``add_request`` raises ``ValueError``.
        fail: ids that end with an error.
        lose: ids that it forgets.
        explode: ids during whose presence ``step`` raises.
        endless: ids that never end by themselves.
        stuck: if true, ``abort`` raises after an explosion.
        final: if true, the user gets its text.
        hidden_size: value of the stage's property.
        outputs: value of the stage's property.
        sampling: value of the stage's property.
    """

    enable_prefix_caching = True

    def __init__(
        self,
        name: str,
        sources: tuple[str, ...] = (),
        *,
        transform: Any = "text_as_prompt",
        steps: int = 2,
        refuse: Collection[str] = (),
        fail: Collection[str] = (),
        lose: Collection[str] = (),
        explode: Collection[str] = (),
        endless: Collection[str] = (),
        stuck: bool = False,
        final: bool = True,
        hidden_size: int | None = None,
        outputs: Collection[str] | None = None,
        sampling: SamplingParams | None = None,
    ) -> None:
        super().__init__(
            name,
            inputs=StageInputs(sources, transform) if sources else None,
            outputs=outputs,
            final_output=("text",) if final else (),
        )
        self.steps = steps
        self.refuse, self.fail, self.lose, self.explode = refuse, fail, lose, explode
        self.endless, self.stuck = endless, stuck
        self.held: dict[str, tuple[StageRequest, int]] = {}
        self.seen: dict[str, StageRequest] = {}
        self.resets = 0
        self.closed = False
        self._hidden_size = hidden_size
        self._sampling = sampling
        self._exploded = False

    @property
    def hidden_size(self) -> int | None:
        return self._hidden_size

    @property
    def sampling(self) -> SamplingParams | None:
        return self._sampling

    def add_request(self, request: StageRequest) -> None:
        if request.request_id in self.refuse:
            raise ValueError("refused")
        assert request.request_id not in self.held
        self.held[request.request_id] = (request, 0)
        self.seen[request.request_id] = request

    def step(self) -> list[StageOutput]:
        if any(request_id in self.explode for request_id in self.held):
            self._exploded = True
            raise ArithmeticError("boom")
        return [
            output
            for request_id in tuple(self.held)
            if (output := self._advance(request_id)) is not None
        ]

    def _advance(self, request_id: str) -> StageOutput | None:
        request, done = self.held[request_id]
        if request_id in self.endless:
            return None
        done += 1
        self.held[request_id] = (request, done)
        if request_id in self.lose:
            del self.held[request_id]
            return None
        full = self.expected(request)
        shown, before = (full[: len(full) * at // self.steps] for at in (done, done - 1))
        finished = done == self.steps
        if finished:
            del self.held[request_id]
        failed = finished and request_id in self.fail
        reason = FinishReason.ERROR if failed else FinishReason.STOP
        return StageOutput(
            request_id=request_id,
            stage=self.name,
            finished=finished,
            text=shown,
            delta=shown[len(before) :],
            token_ids=tuple(shown.encode()),
            finish_reason=reason if finished else None,
            error="told to fail" if failed else None,
            tensors={"hidden_states": torch.zeros(len(full), 2)} if finished else {},
        )

    def expected(self, request: StageRequest) -> str:
        """Return its output text for a request."""
        return f"{self.name}({_as_text(request.prompt)})"

    def abort(self, request_id: str) -> None:
        if self.stuck and self._exploded:
            raise ArithmeticError("stuck")
        self.held.pop(request_id, None)

    @property
    def has_unfinished_requests(self) -> bool:
        return bool(self.held)

    def reset_prefix_cache(self) -> None:
        assert not self.held, "a stage is reset only while it is idle"
        self.resets += 1

    def stats(self) -> StageStats:
        return StageStats()

    def describe(self) -> Mapping[str, Any]:
        return {}

    def check_integrity(self) -> None:
        assert not self.held, f"{self.name} still holds {list(self.held)}"

    def close(self) -> None:
        self.closed = True


def _as_text(prompt: object) -> str:
    match prompt:
        case str():
            return prompt
        case TextPrompt():
            return prompt.prompt
        case TokensPrompt():
            return bytes(prompt.prompt_token_ids).decode()
        case EmbedsPrompt():
            return f"{len(prompt.prompt_embeds)} rows"
    raise AssertionError(prompt)
