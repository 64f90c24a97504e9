"""Transforms from a thinker to a talker and to a vocoder, whole or in chunks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engine import FinishReason
from stages import (
    StageOutput,
    TransformContext,
    talker_to_code2wav,
    thinker_to_talker,
)
from stages.transforms.speech import csm_backbone_to_codec, qwen3_talker_to_code2wav

PROMPT, REPLY = 5, 4


def thinker_output(**changes: Tensor) -> StageOutput:
    rows = torch.arange(PROMPT + REPLY)
    tensors = {
        "hidden_states": rows[:, None].float().expand(-1, 3),
        "token_embeds": 100.0 * rows[:, None].float().expand(-1, 3),
        "position_ids": torch.stack([rows, rows // 2, rows // 3], dim=1),
    }
    return StageOutput(
        "r", "thinker", True, num_prompt_tokens=PROMPT, tensors={**tensors, **changes}
    )


def context(source: StageOutput, **more: object) -> TransformContext:
    return replace(TransformContext("r", "prompt", (source,)), **more)  # type: ignore[arg-type]


def test_a_row_is_the_sum_of_embedding_and_hidden_state() -> None:
    prompt = thinker_to_talker(context(thinker_output(), speaker="Ethan"))
    assert prompt.prompt_rows[:, 0].tolist() == [0, 101, 202, 303, 404]
    assert prompt.reply_rows[:, 0].tolist() == [505, 606, 707, 808]
    assert prompt.positions is not None
    assert prompt.positions.tolist() == [[0, 1, 2, 3, 4], [0, 0, 1, 1, 2], [0, 0, 0, 1, 1]]
    assert (prompt.speaker, prompt.is_last) == ("Ethan", True)


def test_positions_equal_to_indices_are_omitted() -> None:
    indices = torch.arange(PROMPT + REPLY)[:, None].expand(-1, 3)
    assert thinker_to_talker(context(thinker_output(position_ids=indices))).positions is None
    of_reply = indices + 3 * (torch.arange(PROMPT + REPLY) >= PROMPT)[:, None]
    prompt = thinker_to_talker(context(thinker_output(position_ids=of_reply)))
    assert prompt.positions is None, "only the prompt's positions matter"


@given(st.sets(st.integers(PROMPT, PROMPT + REPLY)))
def test_chunks_add_up_to_the_whole(cuts: set[int]) -> None:
    """The first chunk has at least the whole prompt; later chunks may be empty."""
    output = thinker_output()
    expected = thinker_to_talker(context(output))
    ends = [*sorted(cuts), PROMPT + REPLY]
    made = [
        thinker_to_talker(
            context(
                replace(output, tensors={name: t[start:end] for name, t in output.tensors.items()}),
                first_row=start,
                is_last=index == len(ends) - 1,
            )
        )
        for index, (start, end) in enumerate(zip([0, *ends], ends, strict=False))
    ]
    assert torch.equal(torch.cat([p.prompt_rows for p in made]), expected.prompt_rows)
    assert torch.equal(torch.cat([p.reply_rows for p in made]), expected.reply_rows)
    assert made[0].positions is not None and expected.positions is not None
    assert torch.equal(made[0].positions, expected.positions)
    assert all(p.positions is None and len(p.prompt_rows) == 0 for p in made[1:])
    assert [p.is_last for p in made] == [False] * (len(made) - 1) + [True]


@pytest.mark.parametrize(
    ("reason", "codes"),
    [
        (FinishReason.STOP, (4, 5)),
        (FinishReason.LENGTH, (4, 5, 6)),
        (None, (4, 5, 6)),
    ],
)
def test_the_stop_token_of_a_talker_is_no_code(
    reason: FinishReason | None, codes: tuple[int, ...]
) -> None:
    output = StageOutput("r", "talker", True, token_ids=(4, 5, 6), finish_reason=reason)
    prompt = talker_to_code2wav(context(output, speaker="Ethan", is_last=reason is not None))
    assert (prompt.codes, prompt.speaker) == (codes, "Ethan")
    assert prompt.is_last is (reason is not None)
    assert prompt.is_cut_off is (reason is FinishReason.LENGTH)


@pytest.mark.parametrize(
    ("reason", "num_rows", "num_left_out"),
    [(FinishReason.STOP, 2, 0), (FinishReason.LENGTH, 3, 1), (None, 3, 0)],
)
def test_codes_at_a_length_limit_are_passed_as_in_transformers(
    reason: FinishReason | None, num_rows: int, num_left_out: int
) -> None:
    codes = torch.tensor([[-1, -1], [4, 1], [5, 2], [6, 3]])[: 1 + num_rows]
    output = StageOutput(
        *("r", "talker", True),
        token_ids=(4, 5, 6),
        tensors={"codes": codes},
        num_prompt_tokens=1,
        finish_reason=reason,
    )
    rows = tuple(map(tuple, codes[1:].tolist()))
    assert csm_backbone_to_codec(context(output)).codes == rows
    assert qwen3_talker_to_code2wav(context(output)).codes == rows[: num_rows - num_left_out]


def test_an_unsuitable_source_is_refused() -> None:
    short = thinker_output(token_embeds=torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"'thinker' handed on \[9, 2, 9\] rows of"):
        thinker_to_talker(context(short))
    without = replace(short, tensors={"hidden_states": torch.zeros(2, 3)})
    with pytest.raises(ValueError, match="no 'token_embeds', 'position_ids' .*to its outputs"):
        thinker_to_talker(context(without))
    for transform in (thinker_to_talker, talker_to_code2wav):
        with pytest.raises(ValueError, match="takes one source, got 2: 'thinker', 'thinker'"):
            transform(TransformContext("r", "prompt", (short, short)))
