"""Trains the decoder on typed conversations, later also on simulated tower output.

In the first steps all questions are typed. Later, words of some become rows with repetitions,
pauses and noise, gradually longer: introduced all at once, nothing is learnt. Random gaps between
positions keep the model from counting them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import Qwen2_5OmniThinkerForConditionalGeneration

from training.spoken_sums.conversations import draw_conversation
from training.spoken_sums.rendering import Rendered, Renderer
from training.spoken_sums.stutter import noisy_rows, stutter
from training.spoken_sums.thinker import build_thinker, mean_loss, silence_row, text_hidden
from training.spoken_sums.training_run import TrainingRun
from training.spoken_sums.workers import Workers


@dataclass(frozen=True, slots=True, kw_only=True)
class TypedSettings:
    """Hyperparameters of this part.

    Attributes:
        steps: number of steps.
        rate: peak learning rate.
        tokens: approximate tokens per batch, including padding, split over all workers.
        stutter_from: share of the steps after which sounds start.
        stutter_full: share of the steps after which they are as long as speech.
        spoken: share of conversations with sounds, from then on. They have many rows, and sums are
            learnt equally well from typed ones.
        noise: maximum noise on rows, in standard deviations of embeddings.
    """

    steps: int = 620
    rate: float = 1.5e-3
    tokens: int = 7500
    stutter_from: float = 0.4
    stutter_full: float = 0.8
    spoken: float = 0.2
    noise: float = 0.5


def length_buckets(
    rows: Sequence[Rendered], tokens: int, draw: random.Random
) -> list[list[Rendered]]:
    """Return batches of rows of similar length, in random order."""
    batches: list[list[Rendered]] = [[]]
    for row in sorted(rows, key=lambda each: len(each.token_ids)):
        if (len(batches[-1]) + 1) * len(row.token_ids) > tokens and batches[-1]:
            batches.append([])
        batches[-1].append(row)
    draw.shuffle(batches)
    return batches


def gapped_positions(rows: int, tokens: int) -> Tensor:
    """Return positions ``(rows, tokens)``; half of the rows have occasional gaps."""
    steps = torch.ones(rows, tokens, dtype=torch.long)
    jumps = (torch.rand(rows, tokens) < 0.08) & (torch.rand(rows, 1) < 0.5)
    steps[jumps] += torch.randint(0, 30, (int(jumps.sum()),))
    return steps.cumsum(1) - 1


def _batches(
    renderer: Renderer,
    settings: TypedSettings,
    tokens: int,
    run: TrainingRun,
    draw: random.Random,
) -> Iterator[tuple[list[Rendered], dict[int, list[list[int]]]]]:
    """Yield the rows of a batch, and the paths of their sounds by the row's ``id()``."""
    while True:
        span = settings.stutter_full - settings.stutter_from
        strength = min(1.0, max(0.0, (run.progress - settings.stutter_from) / span))
        rows: list[Rendered] = []
        paths: dict[int, list[list[int]]] = {}
        for _ in range(1200):
            turns = draw_conversation(draw)
            is_spoken = run.progress >= settings.stutter_from and draw.random() < settings.spoken
            heard = [
                stutter(renderer.heard_ids(turn.words), strength, draw)
                if is_spoken and draw.random() < 0.7
                else None
                for turn in turns
            ]
            row = renderer.render(turns, [None if path is None else len(path) for path in heard])
            rows.append(row)
            paths[id(row)] = [path for path in heard if path is not None]
        for batch in length_buckets(rows, tokens, draw):
            yield batch, paths


def collate(rows: Sequence[Rendered]) -> tuple[Tensor, Tensor]:
    """Return token ids and the mask of learnt tokens, ``(rows, tokens)``, padded at the end."""
    ids = pad_sequence([torch.tensor(row.token_ids) for row in rows], batch_first=True)
    learnt = pad_sequence([torch.tensor(row.learnt) for row in rows], batch_first=True)
    return ids, learnt


def train_typed(
    folder: Path, renderer: Renderer, settings: TypedSettings
) -> Qwen2_5OmniThinkerForConditionalGeneration:
    """Train the thinker's decoder; its state is ``typed.pt`` in the folder."""
    workers = Workers()
    torch.manual_seed(0)
    model = build_thinker(renderer.tokenizer)
    embedding = model.model.language_model.embed_tokens.weight
    parts = [model.model.language_model, model.lm_head]
    parameters = [each for part in parts for each in part.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(
        parameters, lr=settings.rate, betas=(0.9, 0.98), weight_decay=0.05, fused=True
    )
    run = TrainingRun(
        folder / "typed.pt",
        settings.steps,
        decoder=model.model.language_model,
        head=model.lm_head,
        optimizer=optimizer,
    )
    run.saves = workers.rank == 0
    draw = random.Random(1000 * run.num_steps + workers.rank)
    torch.manual_seed(draw.randrange(2**32))
    silence = silence_row(model)
    tokens = settings.tokens // workers.count
    batches = _batches(renderer, settings, tokens, run, draw)
    right: list[float] = []
    for _ in run.steps():
        rows, paths = next(batches)
        ids, learnt = collate(rows)
        embeds = embedding[ids]
        _put_sounds(embeds, rows, paths, settings.noise, silence, embedding)
        hidden = text_hidden(model, embeds, gapped_positions(*ids.shape))
        loss, hits = mean_loss(model, hidden, ids, learnt)
        optimizer.zero_grad()
        loss.backward()
        run.update(optimizer, parameters, workers, settings.rate)
        right.append(float(hits.float().mean()))
        if run.num_steps % 25 == 24 and workers.rank == 0:
            print(
                f"typed {run.num_steps + 1} {run.elapsed_s:.0f}s loss {loss.item():.4f} "
                f"tokens right {sum(right) / len(right):.4f}",
                flush=True,
            )
            right.clear()
    return model


def _put_sounds(
    embeds: Tensor,
    rows: Sequence[Rendered],
    paths: dict[int, list[list[int]]],
    noise: float,
    silence: Tensor,
    embedding: Tensor,
) -> None:
    for number, row in enumerate(rows):
        for (start, length), path in zip(row.sounds, paths[id(row)], strict=True):
            sound = noisy_rows(path, embedding, silence, noise * random.random())
            embeds[number, start : start + length] = sound
