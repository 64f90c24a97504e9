"""The talker's input: a trained thinker's rows of typed and spoken conversations."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen2_5OmniThinkerForConditionalGeneration

from training.spoken_sums.conversations import (
    Turn,
    draw_conversation,
    follow_up_words,
    spoken_form,
    typed_form,
)
from training.spoken_sums.number_words import LARGEST
from training.spoken_sums.questions import Question
from training.spoken_sums.rendering import Rendered, Renderer
from training.spoken_sums.rooms import recorded
from training.spoken_sums.sums import LARGEST_ASKED, Sum
from training.spoken_sums.talker import Reply
from training.spoken_sums.thinker import embedding_of, num_rows, text_hidden, tower_rows
from training.spoken_sums.typed import collate
from training.spoken_sums.understanding import right_reply

_EQUALS = " = "
_PIECE = 48

Talk = tuple[list[Turn], list[Tensor | None]]
"""Turns, and for each the features of its question, or None if it is typed."""


def draw_typed(count: int, draw: random.Random) -> Iterator[Talk]:
    """Yield typed conversations whose last replies cover all answers uniformly."""
    for number in range(count):
        if draw.random() < 0.25:
            turns = draw_conversation(draw)
        else:
            turns = _ending_in(number % (LARGEST + 1), draw)
        yield turns, [None] * len(turns)


def draw_with_sound(questions: Sequence[Question], draw: random.Random) -> Iterator[Talk]:
    """Yield spoken questions after zero to two typed turns, forever."""
    while True:
        question = draw.choice(questions)
        reply, _ = right_reply(question.words)
        turns = [Turn(question.words, question.words, reply)]
        before = draw_conversation(draw)[:2] if draw.random() < 0.4 else []
        # A follow-up would continue from the earlier result: only whole questions follow others.
        if len(reply.split(_EQUALS)) == 1:
            before = []
        recording = recorded(question.powers)
        yield [*before, *turns], [*[None] * len(before), recording.features]


@torch.no_grad()
def replies_of(
    thinker: Qwen2_5OmniThinkerForConditionalGeneration,
    tokenizer: PreTrainedTokenizerFast,
    talks: Sequence[Talk],
) -> list[Reply]:
    """Return the last reply of each conversation, with the correct text forced on the thinker."""
    renderer = Renderer(tokenizer)
    replies: list[Reply] = []
    for start in range(0, len(talks), _PIECE):
        replies += _piece(thinker, renderer, talks[start : start + _PIECE])
    return replies


def _piece(
    thinker: Qwen2_5OmniThinkerForConditionalGeneration, renderer: Renderer, talks: Sequence[Talk]
) -> list[Reply]:
    rows = [
        renderer.render(
            turns, [None if each is None else num_rows(each.shape[1]) for each in heard]
        )
        for turns, heard in talks
    ]
    ids, _ = collate(rows)
    embeds = embedding_of(thinker)[ids]
    features = [each for _, heard in talks for each in heard if each is not None]
    is_sound = ids == renderer.audio_id
    if features:
        sounds, lengths = tower_rows(thinker, features)
        is_row = torch.arange(sounds.shape[1]) < lengths[:, None]
        embeds = embeds.masked_scatter(is_sound[..., None], sounds[is_row].float())
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    hidden = text_hidden(thinker, embeds, positions).float()
    # The talker reads the thinker's hidden states of sounds, never the tower's rows.
    both = hidden + embeds.masked_fill(is_sound[..., None], 0)
    return [
        _last_reply(turns[-1], row, rows_of, embeds_of)
        for (turns, _), row, rows_of, embeds_of in zip(talks, rows, both, embeds, strict=True)
    ]


def _last_reply(turn: Turn, row: Rendered, rows: Tensor, embeds: Tensor) -> Reply:
    stop = max(place for place, learnt in enumerate(row.learnt) if learnt)
    start = stop
    while row.learnt[start - 1]:
        start -= 1
    answer = turn.reply.split(_EQUALS)[-1]
    return Reply(answer, rows[:start].clone(), rows[start:stop].clone(), embeds[start:stop].clone())


def _ending_in(result: int, draw: random.Random) -> list[Turn]:
    """Return a sum with this result, or a sum and a follow-up that ends in it."""
    if draw.random() < 0.3 and result <= LARGEST_ASKED:
        right = draw.randint(0, LARGEST_ASKED - result)
        return [_typed(Sum(result + right, "-", right), draw)]
    left = draw.randint(max(0, result - LARGEST_ASKED), min(result, 2 * LARGEST_ASKED))
    last = Sum(left, "+", result - left)
    if left <= LARGEST_ASKED and draw.random() < 0.7:
        return [_typed(last, draw)]
    first = draw.randint(max(0, left - LARGEST_ASKED), min(left, LARGEST_ASKED))
    words = follow_up_words(last, draw)
    return [_typed(Sum(first, "+", left - first), draw), Turn(words, words, last.reply)]


def _typed(one: Sum, draw: random.Random) -> Turn:
    return Turn(spoken_form(one, draw), typed_form(one, draw), one.reply)
