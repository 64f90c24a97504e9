"""Which of an engine's tensors a stage hands on."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from engine import FinishReason
from stages.stage import StageOutput

__all__ = ["select_tensors"]


def select_tensors(output: StageOutput, names: Collection[str] | None) -> StageOutput:
    """Keep the tensors that were asked for; fail the request if one of them is not there.

    A tensor that was asked for and is missing must not pass silently: a stage behind this one
    would run on less than it was promised.

    Args:
        output: with all tensors that the engine handed over.
        names: those to keep; None keeps all.
    """
    if names is None or not output.finished or output.error is not None:
        return output
    if output.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
        return output
    missing = [name for name in names if name not in output.tensors]
    if missing:
        return replace(
            output,
            tensors={},
            finish_reason=FinishReason.ERROR,
            error=(
                f"the model made no tensor named {', '.join(map(repr, missing))}, which the "
                f"stage's outputs ask for; it made {sorted(output.tensors)}"
            ),
        )
    return replace(output, tensors={name: output.tensors[name] for name in names})
