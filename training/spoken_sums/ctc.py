"""Trains the audio tower alone: its rows learn to match the words' embeddings.

Connectionist temporal classification; the classes are fixed embeddings, and a row's score for a
class is its squared distance from it. The softmax over distances ignores offsets common to all
classes, so a second term pulls each row to its nearest class.

Source: Graves et al., "Connectionist Temporal Classification", 2006; van den Oord et al., "Neural
Discrete Representation Learning", 2017, for the second term.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import soundfile
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import Qwen2_5OmniThinkerForConditionalGeneration

from training.spoken_sums.held_out import held_out_questions, say_held_out
from training.spoken_sums.log_mel import mel_powers, normalise
from training.spoken_sums.questions import Question, load_questions
from training.spoken_sums.rendering import Renderer
from training.spoken_sums.rooms import LONGEST, Recording, recorded
from training.spoken_sums.thinker import build_thinker, num_rows, silence_row, tower_rows
from training.spoken_sums.training_run import TrainingRun
from training.spoken_sums.workers import Workers


@dataclass(frozen=True, slots=True, kw_only=True)
class CTCSettings:
    """Hyperparameters of this part.

    Attributes:
        steps: number of steps.
        rate: peak learning rate.
        batch: number of sounds, split over all workers.
        commitment: weight of the second term.
        even: share of the steps with an extra loss that expects words at positions by letter
            count: without it, hundreds of steps pass before the tower recognizes anything.
        strength: of the augmentation; mild, so that words are soon recognized.
    """

    steps: int = 520
    rate: float = 2e-3
    batch: int = 64
    commitment: float = 0.5
    even: float = 0.3
    strength: float = 0.35


class WordClasses(nn.Module):
    """Scores rows against words; class 0 is silence, the others are ``heard_ids`` in order."""

    embeds: Tensor

    def __init__(
        self, renderer: Renderer, thinker: Qwen2_5OmniThinkerForConditionalGeneration
    ) -> None:
        super().__init__()
        self.heard_ids = renderer.all_heard_ids
        self._number = {token_id: number + 1 for number, token_id in enumerate(self.heard_ids)}
        words = thinker.model.language_model.embed_tokens.weight.detach()[self.heard_ids]
        self.register_buffer("embeds", torch.cat([silence_row(thinker)[None], words]))
        self.log_scale = nn.Parameter(torch.tensor(-2.5))

    def distances(self, rows: Tensor) -> Tensor:
        """Return squared distances ``(..., classes)``."""
        embeds = self.embeds
        cross = rows @ embeds.T
        return rows.square().sum(-1, keepdim=True) - 2 * cross + embeds.square().sum(-1)

    def forward(self, rows: Tensor) -> Tensor:
        """Return log-probabilities ``(..., classes)``."""
        return (-self.log_scale.exp() * self.distances(rows)).log_softmax(-1)

    def numbers(self, token_ids: Sequence[int]) -> list[int]:
        """Return the classes of words."""
        return [self._number[each] for each in token_ids]

    def heard(self, rows: Tensor) -> list[int]:
        """Return the words along the best path through ``(rows, width)``."""
        best = torch.unique_consecutive(self.distances(rows).argmin(-1)).tolist()
        return [self.heard_ids[number - 1] for number in best if number]


def train_ctc(
    folder: Path, renderer: Renderer, settings: CTCSettings
) -> Qwen2_5OmniThinkerForConditionalGeneration:
    """Train the tower on the folder's questions; its state is ``ctc.pt`` in the folder."""
    workers = Workers()
    torch.manual_seed(0)
    model = build_thinker(renderer.tokenizer)
    tower = model.model.audio_tower
    classes = WordClasses(renderer, model)
    parameters = [*tower.parameters(), classes.log_scale]
    optimizer = torch.optim.AdamW(
        parameters,
        lr=settings.rate,
        betas=(0.9, 0.98),
        weight_decay=0.02,
        fused=True,
    )
    run = TrainingRun(
        folder / "ctc.pt",
        settings.steps,
        tower=tower,
        classes=classes,
        optimizer=optimizer,
    )
    run.saves = workers.rank == 0
    torch.manual_seed(1000 * run.num_steps + workers.rank)
    batches = _batches(folder, settings.batch // workers.count)
    for progress in run.steps():
        chosen = next(batches)
        targets = [classes.numbers(renderer.heard_ids(each.words)) for each in chosen]
        recordings = [recorded(each.powers, settings.strength) for each in chosen]
        with torch.autocast("cpu", torch.bfloat16):
            rows, lengths = tower_rows(model, [each.features for each in recordings])
        rows = rows.float()
        loss, apart = ctc_losses(classes, rows, lengths, targets)
        total = loss + settings.commitment * apart
        if progress < settings.even:
            even = _even_loss(classes, rows, recordings, [each.words for each in chosen], renderer)
            total = total + 2.0 * (1.0 - progress / settings.even) * even
        optimizer.zero_grad()
        total.backward()
        run.update(optimizer, parameters, workers, settings.rate, warmup=150)
        if run.num_steps % 25 == 24 and workers.rank == 0:
            print(
                f"ctc {run.num_steps + 1} {run.elapsed_s:.0f}s loss {loss.item():.4f} "
                f"all {total.item():.3f} apart {apart.item():.3f}",
                flush=True,
            )
        if run.num_steps % 150 == 149 and workers.rank == 0:
            share = whole_questions_heard(model, classes, renderer, folder, every=10)
            print(f"ctc {run.num_steps + 1}: {share:.3f} of held-out questions heard", flush=True)
    return model


def fitting_questions(folder: Path) -> list[Question]:
    """Return the available questions that fit the tower's window even when slowed down."""
    every = load_questions(folder / "questions")
    return [each for each in every if each.powers.shape[1] < 0.9 * LONGEST]


def _batches(folder: Path, size: int) -> Iterator[list[Question]]:
    """Yield batches of questions of similar length, from all that are available so far."""
    while True:
        every = fitting_questions(folder)
        drawn = [every[int(i)] for i in torch.randint(len(every), (size * 64,))]
        drawn.sort(key=lambda question: question.powers.shape[1])
        for number in torch.randperm(64).tolist():
            yield drawn[number * size : (number + 1) * size]


def ctc_losses(
    classes: WordClasses, rows: Tensor, lengths: Tensor, targets: Sequence[Sequence[int]]
) -> tuple[Tensor, Tensor]:
    """Return the CTC loss, and the rows' distance from the nearest class, relative to words'."""
    loss = functional.ctc_loss(
        classes(rows).transpose(0, 1),
        torch.tensor([number for target in targets for number in target]),
        lengths,
        torch.tensor([len(target) for target in targets]),
        zero_infinity=True,
    )
    distances = classes.distances(rows)
    usual = torch.pdist(classes.embeds).square().mean()
    is_row = torch.arange(rows.shape[1]) < lengths.unsqueeze(1)
    return loss, distances.amin(-1)[is_row].mean() / usual


def _even_loss(
    classes: WordClasses,
    rows: Tensor,
    recordings: Sequence[Recording],
    texts: Sequence[str],
    renderer: Renderer,
) -> Tensor:
    """Return the cross entropy with each word at its share of the time, by letter count."""
    wanted = torch.full(rows.shape[:2], -1)
    for number, (recording, text) in enumerate(zip(recordings, texts, strict=True)):
        letters = [
            class_number
            for word in text.split()
            for class_number in classes.numbers(renderer.heard_ids(word)) * (len(word) + 1)
        ]
        frames = 4.0 * torch.arange(num_rows(recording.features.shape[1])) + 2.0
        shares = (frames - recording.begin) / max(1, recording.end - recording.begin)
        places = (shares * len(letters)).long().clamp(0, len(letters) - 1)
        said = torch.tensor(letters)[places]
        said[(shares < 0) | (shares >= 1)] = 0
        wanted[number, : len(said)] = said
    return functional.nll_loss(classes(rows).flatten(0, 1), wanted.flatten(), ignore_index=-1)


@torch.no_grad()
def whole_questions_heard(
    model: Qwen2_5OmniThinkerForConditionalGeneration,
    classes: WordClasses,
    renderer: Renderer,
    folder: Path,
    *,
    every: int = 1,
) -> float:
    """Return the share of every n-th held-out question that the tower recognizes completely."""
    questions = held_out_questions()[::every]
    paths = say_held_out(folder / "held_out")[::every]
    right = 0
    for question, path in zip(questions, paths, strict=True):
        samples = torch.from_numpy(soundfile.read(path, dtype="float32")[0])
        rows, _ = tower_rows(model, [normalise(mel_powers(samples))])
        right += classes.heard(rows[0]) == renderer.heard_ids(question.words)
    return right / len(questions)
