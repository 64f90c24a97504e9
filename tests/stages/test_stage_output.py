"""Deltas add up to the output they were taken from, however it is split."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import FinishReason, RequestMetrics, TokenLogprobs, TranscriptionWindow, Waveform
from engine.interface.outputs import OutputDelta
from stages.stage_output import Completion, OutputAccumulator, StageOutput, delta_since
from tests.support.examples import examples

REASONS = st.sampled_from([FinishReason.STOP, FinishReason.LENGTH, FinishReason.ERROR])


def plain(value: Any) -> Any:
    if isinstance(value, Waveform):
        return value.samples.tolist(), value.sampling_rate
    if isinstance(value, dict):
        return {name: rows.tolist() for name, rows in value.items()}
    return value


def same(ours: StageOutput, theirs: StageOutput) -> bool:
    return all(
        plain(getattr(ours, each.name)) == plain(getattr(theirs, each.name))
        for each in fields(StageOutput)
    )


@st.composite
def progress(draw: st.DrawFn) -> list[StageOutput]:
    """Draw the cumulative outputs of one request, as an external stage kind returns them."""
    has_text, has_logprobs = draw(st.booleans()), draw(st.booleans())
    speaks, adds_up = draw(st.booleans()), draw(st.booleans())
    texts = [""] * draw(st.integers(1, 3))
    ids: list[tuple[int, ...]] = [()] * len(texts)
    reasons: list[FinishReason | None] = [None] * len(texts)
    num_completions = draw(st.sampled_from([0, len(texts)]))
    sound: list[torch.Tensor] = []
    outputs: list[StageOutput] = []
    windows: tuple[TranscriptionWindow, ...] = ()
    count = draw(st.integers(1, 6))
    for turn in range(count):
        finished, before = turn == count - 1, texts[0]
        for index in range(len(texts)):
            if reasons[index] is None:
                texts[index] += draw(st.sampled_from(["", "a", "bcd"])) if has_text else ""
                ids[index] += tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
                if finished or (index and draw(st.booleans())):
                    reasons[index] = draw(REASONS)
        logprobs = [
            tuple(TokenLogprobs(each, -0.5, ((each, -0.5),)) for each in some)
            if has_logprobs
            else None
            for some in ids
        ]
        delta = None
        if speaks and draw(st.booleans()):
            delta = Waveform(torch.rand(draw(st.integers(0, 3))), 8)
            sound.append(delta.samples)
        whole = torch.cat(sound) if sound else torch.zeros(0)
        if draw(st.booleans()):
            windows += (TranscriptionWindow(turn, 1.0),)
        outputs.append(
            StageOutput(
                "r",
                "s",
                finished,
                text=texts[0] if has_text else None,
                delta=texts[0][len(before) :],
                token_ids=ids[0],
                finish_reason=reasons[0],
                error="broken" if reasons[0] is FinishReason.ERROR and finished else None,
                num_prompt_tokens=3,
                num_cached_tokens=turn,
                encoder_prompt_token_ids=(7, 8),
                prompt_token_ids=(4, 5, 6) if finished else (),
                tensors={"rows": torch.ones(2)} if finished else {},
                logprobs=logprobs[0],
                completions=tuple(
                    Completion(*each) for each in zip(texts, ids, reasons, logprobs, strict=True)
                )[:num_completions],
                audio=Waveform(whole if adds_up else whole + 1, 8) if speaks and finished else None,
                audio_delta=delta,
                metrics=RequestMetrics(0.5, None, 2.0 if finished else None, turn),
                windows=windows,
            )
        )
    return outputs


def deltas_of(outputs: list[StageOutput]) -> list[OutputDelta]:
    befores = [None, *outputs[:-1]]
    return [delta_since(now, before) for now, before in zip(outputs, befores, strict=True)]


@settings(max_examples=examples(200))
@given(progress())
def test_deltas_add_up_to_every_output(
    outputs: list[StageOutput],
) -> None:
    accumulator = OutputAccumulator("r", "s")
    for output, delta in zip(outputs, deltas_of(outputs), strict=True):
        accumulator.add(delta)
        assert same(accumulator.output(), output)
        assert accumulator.finished == output.finished


@settings(max_examples=examples(200))
@given(progress(), st.data())
def test_any_split_adds_up_to_the_same_output(outputs: list[StageOutput], data: Any) -> None:
    """Neighbouring deltas may be merged, up to a single delta."""
    expected = OutputAccumulator("r", "s")
    found, piece = OutputAccumulator("r", "s"), OutputAccumulator("r", "s")
    deltas = deltas_of(outputs)
    for place, delta in enumerate(deltas):
        expected.add(delta)
        piece.add(delta)
        if place == len(deltas) - 1 or data.draw(st.booleans()):
            found.add(piece.as_delta())
            piece = OutputAccumulator("r", "s")
    assert same(found.output(), expected.output())


def test_an_aborted_output_has_no_whole_audio() -> None:
    accumulator = OutputAccumulator("r", "s")
    accumulator.add(OutputDelta("r", audio=Waveform(torch.ones(2), 8), num_prompt_tokens=5))
    accumulator.add(OutputDelta("r", True, finish_reason=FinishReason.ABORT))
    last = accumulator.output()
    assert last.finished and last.audio is None and last.num_prompt_tokens == 5


def test_audio_of_two_sampling_rates_is_refused() -> None:
    accumulator = OutputAccumulator("r", "s")
    accumulator.add(OutputDelta("r", audio=Waveform(torch.ones(2), 8)))
    with pytest.raises(ValueError, match="8 samples per second cannot be followed by .* of 16"):
        accumulator.add(OutputDelta("r", audio=Waveform(torch.ones(2), 16)))


@pytest.mark.parametrize("change", [{"text": "he"}, {"text": "bye"}, {"token_ids": (2, 2)}])
def test_an_output_that_retracts_content_is_refused(change: dict[str, Any]) -> None:
    before = StageOutput("r", "s", False, text="hello", token_ids=(1, 2))
    with pytest.raises(ValueError, match=f"its {next(iter(change))} must begin with what its last"):
        delta_since(replace(before, **change), before)
