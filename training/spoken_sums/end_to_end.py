"""Trains tower and decoder together, on sounds and typed questions."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import Qwen2_5OmniThinkerForConditionalGeneration

from training.spoken_sums.conversations import Turn, draw_conversation, draw_turn
from training.spoken_sums.ctc import WordClasses, ctc_losses, fitting_questions
from training.spoken_sums.questions import Question
from training.spoken_sums.rendering import Rendered, Renderer
from training.spoken_sums.report import Report
from training.spoken_sums.rooms import recorded
from training.spoken_sums.sums import is_held_out
from training.spoken_sums.thinker import (
    build_thinker,
    embedding_of,
    mean_loss,
    num_rows,
    text_hidden,
    tower_rows,
)
from training.spoken_sums.training_run import TrainingRun
from training.spoken_sums.typed import collate, length_buckets
from training.spoken_sums.understanding import right_reply, understood
from training.spoken_sums.workers import Workers

STRENGTH = 0.6
"""Strength of the augmentation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndToEndSettings:
    """Hyperparameters of this part.

    Attributes:
        steps: number of steps.
        rate: peak learning rate.
        spoken: conversations with spoken turns per batch, split over all workers.
        tokens: approximate tokens in the typed half of a batch, split likewise.
        ctc_weight: weight of the tower's CTC loss relative to that of the replies.
    """

    steps: int = 1740
    rate: float = 8e-4
    spoken: int = 20
    tokens: int = 3600
    ctc_weight: float = 0.5


@dataclass(frozen=True, slots=True)
class SpokenConversation:
    """A conversation with spoken turns.

    Attributes:
        turns: all turns.
        questions: the sound of each; None if it is typed.
    """

    turns: list[Turn]
    questions: list[Question | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class TalkShares:
    """The composition of spoken conversations.

    Attributes:
        turns: weights of one, two and three turns.
        typed: share of later turns that are typed; the first one is always spoken.
    """

    turns: tuple[int, int, int] = (52, 34, 14)
    typed: float = 0.3


def draw_spoken(
    questions: Sequence[Question], draw: random.Random, shares: TalkShares = TalkShares()
) -> SpokenConversation:
    """Draw one to three turns, some of them typed."""
    talk = SpokenConversation([], [])
    last: int | None = None
    for _ in range(draw.choices((1, 2, 3), shares.turns)[0]):
        if talk.turns and draw.random() < shares.typed:
            turn, last = draw_turn(draw, last, is_first=False)
            talk.turns.append(turn)
            talk.questions.append(None)
            continue
        question = draw.choice(questions)
        one = understood(question.words, last)
        if one is not None and is_held_out(one):
            continue
        reply, last = right_reply(question.words, last)
        talk.turns.append(Turn(question.words, question.words, reply))
        talk.questions.append(question)
    return talk


def _spoken_batches(
    folder: Path, renderer: Renderer, size: int, draw: random.Random
) -> Iterator[tuple[list[Rendered], list[Question], list[Tensor]]]:
    """Yield rows of similar length, and their sounds in order, as questions and as features."""
    every = fitting_questions(folder)
    while True:
        rows: list[Rendered] = []
        sounds: dict[int, list[tuple[Question, Tensor]]] = {}
        for _ in range(16 * size):
            talk = draw_spoken(every, draw)
            if not talk.turns:
                continue
            heard = [
                None if each is None else recorded(each.powers, STRENGTH).features
                for each in talk.questions
            ]
            lengths = [None if each is None else num_rows(each.shape[1]) for each in heard]
            row = renderer.render(talk.turns, lengths)
            rows.append(row)
            pairs = zip(talk.questions, heard, strict=True)
            sounds[id(row)] = [(q, f) for q, f in pairs if q is not None and f is not None]
        rows.sort(key=lambda row: len(row.token_ids))
        batches = [rows[start : start + size] for start in range(0, len(rows), size)]
        draw.shuffle(batches)
        for batch in batches:
            pairs_of_batch = [pair for row in batch for pair in sounds[id(row)]]
            yield batch, [pair[0] for pair in pairs_of_batch], [pair[1] for pair in pairs_of_batch]


def typed_batches(renderer: Renderer, tokens: int, draw: random.Random) -> Iterator[list[Rendered]]:
    """Yield batches of typed conversations forever, of about ``tokens`` tokens each."""
    while True:
        talks = [draw_conversation(draw) for _ in range(400)]
        rows = [renderer.render(talk, [None] * len(talk)) for talk in talks]
        yield from length_buckets(rows, tokens, draw)


def train_end_to_end(
    folder: Path, renderer: Renderer, settings: EndToEndSettings
) -> Qwen2_5OmniThinkerForConditionalGeneration:
    """Train tower and decoder from ``ctc.pt`` and ``typed.pt``; the state is ``end_to_end.pt``."""
    workers = Workers()
    model = build_thinker(renderer.tokenizer)
    classes = WordClasses(renderer, model)
    parameters = [
        *model.model.audio_tower.parameters(),
        *(each for each in model.model.language_model.parameters() if each.requires_grad),
        *model.lm_head.parameters(),
        classes.log_scale,
    ]
    optimizer = torch.optim.AdamW(
        parameters, lr=settings.rate, betas=(0.9, 0.98), weight_decay=0.05, fused=True
    )
    if not (folder / "end_to_end.pt").exists():
        read = torch.load(folder / "typed.pt", weights_only=True)
        model.model.language_model.load_state_dict(read["decoder"])
        model.lm_head.load_state_dict(read["head"])
        heard = torch.load(folder / "ctc.pt", weights_only=True)
        model.model.audio_tower.load_state_dict(heard["tower"])
        classes.load_state_dict(heard["classes"])
    run = TrainingRun(
        folder / "end_to_end.pt",
        settings.steps,
        model=model,
        classes=classes,
        optimizer=optimizer,
    )
    run.saves = workers.rank == 0
    draw = random.Random(1000 * run.num_steps + workers.rank)
    torch.manual_seed(draw.randrange(2**32))
    spoken = _spoken_batches(folder, renderer, settings.spoken // workers.count, draw)
    typed = typed_batches(renderer, settings.tokens // workers.count, draw)
    report = Report()
    for _ in run.steps():
        optimizer.zero_grad()
        rows, questions, features = next(spoken)
        heard_loss, hits = _spoken_loss(
            model, classes, renderer, settings.ctc_weight, (rows, questions, features)
        )
        heard_loss.backward()
        ids, learnt = collate(next(typed))
        hidden = text_hidden(model, embedding_of(model)[ids], places_of(ids))
        typed_loss, typed_hits = mean_loss(model, hidden, ids, learnt)
        typed_loss.backward()
        run.update(optimizer, parameters, workers, settings.rate, warmup=20)
        report.add(spoken=hits, typed=typed_hits)
        if run.num_steps % 50 == 49 and workers.rank == 0:
            print(
                f"end to end {run.num_steps + 1} {run.elapsed_s:.0f}s {report.line()}", flush=True
            )
    return model


def places_of(ids: Tensor) -> Tensor:
    """Return positions of tokens without gaps, ``(rows, tokens)``."""
    return torch.arange(ids.shape[1]).expand(*ids.shape)


def _spoken_loss(
    model: Qwen2_5OmniThinkerForConditionalGeneration,
    classes: WordClasses,
    renderer: Renderer,
    ctc_weight: float,
    spoken: tuple[Sequence[Rendered], Sequence[Question], Sequence[Tensor]],
) -> tuple[Tensor, Tensor]:
    batch, questions, features = spoken
    with torch.autocast("cpu", torch.bfloat16):
        sound_rows, lengths = tower_rows(model, features)
    sound_rows = sound_rows.float()
    targets = [classes.numbers(renderer.heard_ids(each.words)) for each in questions]
    ctc, apart = ctc_losses(classes, sound_rows, lengths, targets)
    ids, learnt = collate(batch)
    is_row = torch.arange(sound_rows.shape[1]) < lengths.unsqueeze(1)
    places = ids == renderer.audio_id
    embeds = embedding_of(model)[ids].masked_scatter(places.unsqueeze(-1), sound_rows[is_row])
    hidden = text_hidden(model, embeds, places_of(ids))
    loss, hits = mean_loss(model, hidden, ids, learnt)
    return loss + ctc_weight * (ctc + 0.5 * apart), hits
