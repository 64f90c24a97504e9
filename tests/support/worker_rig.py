"""Pipelines whose workers run in threads and build their own stages, to be killed and broken."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from omni.pipelines.pipeline import Pipeline
from omni.requests.request import OmniOutput, OmniRequest
from omni.runtime.orchestrator import streamed_edges
from stages import Stage
from stages.remote.messages import StageSpec
from stages.remote.remote_stage import RemoteStage
from stages.remote.supervisor import start_workers
from tests.support.fake_stage import FakeStage
from tests.support.remote_stages import several_stages
from tests.support.thread_workers import ThreadWorkers
from tests.support.whole_orchestrator import WholeOrchestrator

Make = Callable[[], list[Any]]


class Rig:
    """A pipeline whose workers build their own stages each time they are started."""

    def __init__(
        self,
        make: Make,
        max_retries: int = 1,
        stall_timeout_s: float = 120.0,
        *,
        shared: bool = False,
    ) -> None:
        self.shared = shared
        shapes: list[Stage] = make()
        plain = Pipeline(shapes)
        edges = streamed_edges(plain.stages)
        self.transforms = plain.transforms
        self.make = make
        self.built: list[Any] = []
        self.workers = ThreadWorkers(self._build)
        of_each = [(name, edges[name]) for name in plain.order]
        together = {"all": of_each} if shared else {name: [(name, e)] for name, e in of_each}
        specs = [several_stages(*each) for each in together.items()]
        workers = start_workers(specs, self.workers.connect, stall_timeout_s)
        self.stages = [
            RemoteStage(
                shape.name,
                shape,
                [worker for worker in workers if shape.name in worker.inboxes],
                max_retries,
            )
            for shape in shapes
        ]
        self.orchestrator = WholeOrchestrator(Pipeline(self.stages))

    def _build(self, spec: StageSpec) -> tuple[Stage, Any]:
        (stage,) = (each for each in self.make() if each.name == spec.name)
        self.built.append(stage)
        return stage, self.transforms.get(spec.name)

    def kill(self, name: str) -> None:
        """Kill the worker of a stage."""
        self.workers.kill("all" if self.shared else name)

    def let_raise(self, name: str) -> None:
        """Make the next step of a stage's current worker raise an unexpected error."""
        stage = [each for each in self.built if each.name == name][-1]

        def step() -> Any:
            del stage.step
            raise ArithmeticError("boom")

        stage.step = step

    def spoil(self, name: str) -> None:
        """Make it raise likewise, and release no request from then on: it is unusable."""
        self.let_raise(name)
        stage = [each for each in self.built if each.name == name][-1]

        def abort(request_id: str) -> None:
            raise KeyError("gone")

        stage.abort = abort

    def add(self, prompts: Mapping[str, str]) -> None:
        for request_id, prompt in prompts.items():
            self.orchestrator.add_request(OmniRequest(prompt, request_id))


@contextmanager
def rig(make: Make, **options: Any) -> Iterator[Rig]:
    made = Rig(make, **options)
    try:
        yield made
    finally:
        for stage in made.stages:
            stage.close()
        made.workers.join()


def assert_told_once(outputs: list[OmniOutput]) -> None:
    """Check that the streamed deltas add up to the request's final output."""
    last = outputs[-1]
    for name, stage in last.stages.items():
        pieces = [each.stages[name] for each in outputs if name in each.stages]
        if stage.text is not None:
            assert "".join(piece.delta for piece in pieces) == stage.text
        if stage.audio is not None:
            heard = [each.audio_delta.samples for each in pieces if each.audio_delta is not None]
            assert torch.equal(torch.cat(heard), stage.audio.samples)


def chain(**options: Any) -> Make:
    def make() -> list[Any]:
        return [FakeStage("a", steps=3), FakeStage("b", ("a",), **{"steps": 4, **options})]

    return make


def holds(pipeline: Rig, name: str, run: int) -> bool:
    """Return True if the n-th worker of a stage has a request."""
    built = [stage for stage in pipeline.built if stage.name == name]
    return len(built) == run and built[-1].has_unfinished_requests
