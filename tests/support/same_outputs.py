"""Comparison of two runs' outputs for the same requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from omni import Omni, OmniOutput, OmniRequest


def assert_same(found: Sequence[OmniOutput], expected: Sequence[OmniOutput]) -> None:
    """Check that ids and texts are equal, and tensors and sound nearly."""
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.error is None, ours.error
        assert ours.stages.keys() == theirs.stages.keys()
        for name, stage in theirs.stages.items():
            mine = ours.stages[name]
            assert (mine.token_ids, mine.text) == (stage.token_ids, stage.text)
            assert (mine.finish_reason, mine.completions) == (
                stage.finish_reason,
                stage.completions,
            )
            assert mine.tensors.keys() == stage.tensors.keys()
            for tensor, rows in stage.tensors.items():
                torch.testing.assert_close(mine.tensors[tensor], rows, atol=1e-5, rtol=0)
            if stage.audio is not None:
                assert mine.audio is not None
                torch.testing.assert_close(mine.audio.samples, stage.audio.samples)


def last_outputs(
    omni: Omni, prompts: Sequence[str], after: int, act: Callable[[], object]
) -> list[OmniOutput]:
    """Return the last outputs of prompts, and call ``act`` when output ``after`` comes."""
    last: dict[str, OmniOutput] = {}
    for number, output in enumerate(omni.stream([OmniRequest(text, text) for text in prompts])):
        if number == after:
            act()
        if output.finished:
            last[output.request_id] = output
    return [last[text] for text in prompts]


def streamed(
    omni: Omni, prompts: Sequence[str], at_first_sound: Callable[[], object] = lambda: None
) -> list[OmniOutput]:
    """Return the last outputs of spoken prompts; their pieces of sound add up to the whole."""
    heard: dict[str, list[torch.Tensor]] = {}
    last: dict[str, OmniOutput] = {}
    for output in omni.stream([OmniRequest(text, text) for text in prompts]):
        assert output.error is None, output.error
        piece = output.stages.get("code2wav")
        if piece is not None and piece.audio_delta is not None:
            if not heard:
                at_first_sound()
            heard.setdefault(output.request_id, []).append(piece.audio_delta.samples)
        if output.finished:
            last[output.request_id] = output
    for text in prompts:
        audio = last[text].stages["code2wav"].audio
        assert audio is not None and torch.equal(torch.cat(heard[text]), audio.samples)
    return [last[text] for text in prompts]
