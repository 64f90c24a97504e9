"""A stage hands on the tensors that were asked for, or fails the request."""

from __future__ import annotations

from dataclasses import replace

import torch

from engine import FinishReason
from stages import StageOutput
from stages.engine_stage import select_tensors

OUTPUT = StageOutput(
    "r",
    "s",
    finished=True,
    finish_reason=FinishReason.STOP,
    tensors={"hidden_states": torch.zeros(2, 3), "codes": torch.ones(2)},
)


def test_only_the_tensors_asked_for_are_kept() -> None:
    assert set(select_tensors(OUTPUT, None).tensors) == {"hidden_states", "codes"}
    assert set(select_tensors(OUTPUT, ["codes"]).tensors) == {"codes"}
    assert select_tensors(OUTPUT, ()).tensors == {}


def test_a_tensor_that_was_asked_for_and_never_made_fails_the_request() -> None:
    failed = select_tensors(OUTPUT, ["codes", "mel"])
    assert failed.finish_reason is FinishReason.ERROR
    assert failed.tensors == {}
    assert "no tensor named 'mel'" in str(failed.error)
    assert "['codes', 'hidden_states']" in str(failed.error)


def test_an_output_that_is_not_done_or_failed_lacks_tensors_rightly() -> None:
    for output in (
        replace(OUTPUT, finished=False, tensors={}),
        replace(OUTPUT, error="out of luck", tensors={}),
        replace(OUTPUT, finish_reason=FinishReason.ABORT, tensors={}),
    ):
        assert select_tensors(output, ["codes"]) is output
