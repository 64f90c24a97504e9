"""A kind of stage that passes on tensors of a fake GPU, and reports where its inputs lie."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

import torch

from engine import TextPrompt
from stages import Stage, StageConfig, StageOutput, TransformContext, register_stage_kind
from stages.stage import OneOrMore
from tests.support.fake_stage import FakeStage
from tests.support.made_up_gpu import GpuTensor


class _GpuStage(FakeStage):
    def _advance(self, request_id: str) -> StageOutput | None:
        output = super()._advance(request_id)
        if output is None or not output.finished:
            return output
        on_gpu = {"rows": GpuTensor(_ROWS + 1), "one": GpuTensor(torch.ones(1))}
        return replace(output, tensors={**on_gpu, "on_host": _ROWS, "little": torch.zeros(2)})


_ROWS = torch.arange(40_000.0).view(-1, 4)


@register_stage_kind
class GpuKindConfig(StageConfig):
    """Outputs ``rows`` and ``one`` on the GPU, and ``on_host`` and ``little`` on the host."""

    kind: Literal["made_up_gpu"]
    final_output: Annotated[tuple[Literal["text", "tensors"], ...], OneOrMore] = ()

    def build_stage(self, name: str) -> Stage:
        inputs = self.inputs
        stage = _GpuStage(
            name,
            () if inputs is None else inputs.sources,
            transform=None if inputs is None else inputs.transform,
        )
        stage.final_output = self.final_output
        return stage


def where_it_lies(context: TransformContext) -> TextPrompt:
    """Return the kind of device and the sum of each of the source's tensors."""
    (source,) = context.sources
    reported = (
        f"{name}: {tensor.device.type} {tensor.cpu().double().sum():.0f}"
        for name, tensor in source.tensors.items()
    )
    return TextPrompt(", ".join(reported))
