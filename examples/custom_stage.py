"""A custom kind of stage that counts the words of a text, in a YAML pipeline.

Run it with ``python examples/custom_stage.py``. A package registers its kinds in every process,
including ``omni run``, with an entry point of the group ``omni_pipeline.stage_kinds``.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from engine import FinishReason, TextPrompt
from omni import Omni, PipelineConfig, Stage, StageConfig, StageOutput, register_stage_kind
from stages import StageRequest

YAML = """\
name: counted
stages:
  writer:
    kind: autoregressive
    model: seeded:qwen2
    sampling: {max_tokens: 8}
    final_output: text
  counter:
    kind: word_count
    inputs: {from: writer, transform: text_as_prompt}
    final_output: text
"""


@register_stage_kind
class WordCountConfig(StageConfig):
    """The stage's YAML keys; an unknown key is an error that names the nearest one."""

    kind: Literal["word_count"]

    def build_stage(self, name: str) -> Stage:
        """Build the stage; called once, after the whole file is validated."""
        return WordCountStage(name, inputs=self.inputs, final_output=self.final_output)


class WordCountStage(Stage):
    """Answers all waiting requests in one step; it has no cache."""

    final_output_kinds = ("text",)
    has_cache = False

    def __init__(self, name: str, **graph: Any) -> None:
        super().__init__(name, **graph)
        self._waiting: dict[str, StageRequest] = {}

    def add_request(self, request: StageRequest) -> None:
        if not isinstance(request.prompt, TextPrompt):
            raise ValueError(f"words are counted in text, got {type(request.prompt).__name__}")
        self._waiting[request.request_id] = request

    def step(self) -> list[StageOutput]:
        done, self._waiting = self._waiting, {}
        self.num_steps += bool(done)
        return [
            StageOutput(
                request_id,
                self.name,
                finished=True,
                text=f"{len(request.prompt.prompt.split())} words",
                finish_reason=FinishReason.STOP,
            )
            for request_id, request in done.items()
            if isinstance(request.prompt, TextPrompt)
        ]

    def abort(self, request_id: str) -> None:
        self._waiting.pop(request_id, None)

    @property
    def has_unfinished_requests(self) -> bool:
        return bool(self._waiting)

    def describe(self) -> Mapping[str, Any]:
        return {"counts": "words"}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "counted.yaml"
        path.write_text(YAML)
        config = PipelineConfig.load(path)
    with Omni(config) as omni:
        for output in omni.generate(["Once upon a time", "Twice upon a hill"]):
            print(repr(output.stages["writer"].text), "has", output.stages["counter"].text)


if __name__ == "__main__":
    main()
