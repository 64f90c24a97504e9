"""Trains the decoder alone once more, on typed questions and on rows of the finished tower.

The tower is frozen: its rows of a few thousand recordings are computed once, and a step costs a
fifth. Conversations mix spoken and typed turns more often than in the previous part.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import Qwen2_5OmniThinkerForConditionalGeneration

from training.spoken_sums.ctc import fitting_questions
from training.spoken_sums.end_to_end import (
    STRENGTH,
    TalkShares,
    draw_spoken,
    places_of,
    typed_batches,
)
from training.spoken_sums.questions import Question, noises
from training.spoken_sums.rendering import Rendered, Renderer
from training.spoken_sums.report import Report
from training.spoken_sums.rooms import recorded
from training.spoken_sums.thinker import (
    build_thinker,
    embedding_of,
    mean_loss,
    text_hidden,
    tower_rows,
)
from training.spoken_sums.training_run import TrainingRun
from training.spoken_sums.typed import collate, length_buckets
from training.spoken_sums.workers import Workers

_PIECE = 32
_SPEECH_TO_NOISE = 25
_SHARES = TalkShares(turns=(30, 45, 25), typed=0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolishSettings:
    """Hyperparameters of this part.

    Attributes:
        steps: number of steps.
        rate: peak learning rate.
        recordings: number of recordings that the tower encodes once; separate for each worker.
        tokens: approximate tokens in each half of a batch (conversations with sounds, and typed
            ones), split over all workers.
    """

    steps: int = 2460
    rate: float = 3e-4
    recordings: int = 2500
    tokens: int = 2000


def polish(
    folder: Path, renderer: Renderer, settings: PolishSettings
) -> Qwen2_5OmniThinkerForConditionalGeneration:
    """Train the decoder from ``end_to_end.pt``; the whole thinker's state is ``thinker.pt``."""
    workers = Workers()
    model = build_thinker(renderer.tokenizer)
    before = torch.load(folder / "end_to_end.pt", weights_only=True)
    model.load_state_dict(before["model"])
    model.model.audio_tower.requires_grad_(False)
    decoder = [*model.model.language_model.parameters(), *model.lm_head.parameters()]
    parameters = [each for each in decoder if each.requires_grad]
    optimizer = torch.optim.AdamW(
        parameters, lr=settings.rate, betas=(0.9, 0.98), weight_decay=0.05, fused=True
    )
    run = TrainingRun(
        folder / "thinker.pt",
        settings.steps,
        model=model,
        optimizer=optimizer,
    )
    run.saves = workers.rank == 0
    draw = random.Random(1000 * run.num_steps + 7 + workers.rank)
    torch.manual_seed(draw.randrange(2**32))
    asked = draw.sample(fitting_questions(folder), settings.recordings)
    heard = _hear(model, [*asked, *noises(settings.recordings // _SPEECH_TO_NOISE, draw)])
    tokens = settings.tokens // workers.count
    spoken = _spoken_batches(heard, renderer, tokens, draw)
    typed = typed_batches(renderer, tokens, draw)
    report = Report()
    for _ in run.steps():
        optimizer.zero_grad()
        rows, sounds = next(spoken)
        heard_hits = _learn(model, renderer, rows, sounds)
        typed_hits = _learn(model, renderer, next(typed), [])
        run.update(optimizer, parameters, workers, settings.rate, warmup=20)
        report.add(spoken=heard_hits, typed=typed_hits)
        if run.num_steps % 25 == 24 and workers.rank == 0:
            print(f"polish {run.num_steps + 1} {run.elapsed_s:.0f}s {report.line()}", flush=True)
    return model


@torch.no_grad()
def _hear(
    model: Qwen2_5OmniThinkerForConditionalGeneration, questions: Sequence[Question]
) -> list[tuple[Question, Tensor]]:
    """Return the tower's rows for a recording of each, ``(rows, width)``, half precision."""
    heard: list[tuple[Question, Tensor]] = []
    by_length = sorted(questions, key=lambda each: each.powers.shape[1])
    for start in range(0, len(by_length), _PIECE):
        piece = by_length[start : start + _PIECE]
        features = [recorded(each.powers, STRENGTH).features for each in piece]
        rows, lengths = tower_rows(model, features)
        heard += [
            (question, each[:length].half())
            for question, each, length in zip(piece, rows, lengths.tolist(), strict=True)
        ]
    return heard


def _spoken_batches(
    heard: Sequence[tuple[Question, Tensor]], renderer: Renderer, tokens: int, draw: random.Random
) -> Iterator[tuple[list[Rendered], list[Tensor]]]:
    """Yield rows of similar length, and the tower's rows in them, in order."""
    rows_of = {id(question): rows for question, rows in heard}
    questions = [question for question, _ in heard]
    while True:
        rendered: list[Rendered] = []
        sounds: dict[int, list[Tensor]] = {}
        while len(rendered) < 200:
            talk = draw_spoken(questions, draw, _SHARES)
            if not talk.turns:
                continue
            rows = [None if each is None else rows_of[id(each)] for each in talk.questions]
            one = renderer.render(talk.turns, [None if r is None else len(r) for r in rows])
            rendered.append(one)
            sounds[id(one)] = [each for each in rows if each is not None]
        for batch in length_buckets(rendered, tokens, draw):
            yield batch, [each for one in batch for each in sounds[id(one)]]


def _learn(
    model: Qwen2_5OmniThinkerForConditionalGeneration,
    renderer: Renderer,
    rows: Sequence[Rendered],
    sounds: Sequence[Tensor],
) -> Tensor:
    """Accumulate the gradients of a batch; return which reply tokens were right."""
    ids, learnt = collate(rows)
    embeds = embedding_of(model)[ids]
    if sounds:
        places = (ids == renderer.audio_id).unsqueeze(-1)
        embeds = embeds.masked_scatter(places, torch.cat(list(sounds)).float())
    hidden = text_hidden(model, embeds, places_of(ids))
    loss, hits = mean_loss(model, hidden, ids, learnt)
    loss.backward()
    return hits
