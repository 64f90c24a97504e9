"""``python -m training.spoken_sums``: all parts in their order, each by the clock, two at a time.

::

    core A   questions ─► typed ─► ctc ─► end to end ─┐
    core B   answers ─► codes ─► flow ─► waveforms ───┴─► talker ─► checkpoint ─► figures

A part that was cut short goes on from its last saved state; one that is done is done.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import Qwen2_5OmniThinkerForConditionalGeneration

from training.spoken_sums.bigvgan import BigVGANBudget, train_bigvgan
from training.spoken_sums.codes import learn_codebook
from training.spoken_sums.ctc import CTCSettings, train_ctc
from training.spoken_sums.dit import DiTBudget, train_dit
from training.spoken_sums.ears_evaluate import evaluate_ears
from training.spoken_sums.end_to_end import EndToEndSettings, train_end_to_end
from training.spoken_sums.mouth import train_mouth_talker, write_trained
from training.spoken_sums.question_texts import question_texts
from training.spoken_sums.questions import make_questions
from training.spoken_sums.rendering import Renderer
from training.spoken_sums.speech import answers_spoken
from training.spoken_sums.talker import TalkerBudget
from training.spoken_sums.thinker import build_thinker
from training.spoken_sums.tokenizer import build_tokenizer
from training.spoken_sums.typed import TypedSettings, train_typed

__all__ = ["QUICK", "Plan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much of everything.

    Attributes:
        questions: that are said for training.
        typed: seconds for this part; and so on.
        ctc: seconds.
        end_to_end: seconds.
        flow: seconds of the vocoder's flow from codes to mel bands.
        waveforms: seconds of its network from mel bands to samples.
        anti_aliased: seconds of the same, after that, with filters on.
        talker: seconds.
        most_steps: an end before that of the ears' parts, for a trial.
    """

    questions: int = 28_000
    typed: float = 1200.0
    ctc: float = 900.0
    end_to_end: float = 2700.0
    flow: float = 1800.0
    waveforms: float = 2400.0
    anti_aliased: float = 600.0
    talker: float = 900.0
    most_steps: int | None = None


QUICK = Plan(
    questions=300,
    typed=20.0,
    ctc=20.0,
    end_to_end=20.0,
    flow=10.0,
    waveforms=10.0,
    anti_aliased=10.0,
    talker=10.0,
    most_steps=4,
)
"""Every part for a few steps: shows that all runs, and learns nothing."""

_LANES = (
    ("questions", "typed", "ctc", "end_to_end"),
    ("answers", "flow", "waveforms"),
)
_AFTER = ("talker", "checkpoint", "figures")


class Parts:
    """What each part does, by its name.

    Args:
        work: the folder of all states.
        plan: how much of everything.
        target: where the checkpoint is written.
    """

    def __init__(self, work: Path, plan: Plan, target: Path) -> None:
        self._work, self._plan, self._target = work, plan, target
        self._renderer = Renderer(build_tokenizer())

    def run(self, name: str) -> None:
        """Do one part."""
        parts: dict[str, Callable[[], object]] = {
            "questions": self._questions,
            "typed": self._typed,
            "ctc": self._ctc,
            "end_to_end": self._end_to_end,
            "answers": self._answers,
            "flow": self._flow,
            "waveforms": self._waveforms,
            "talker": self._talker,
            "checkpoint": self._checkpoint,
            "figures": self._figures,
        }
        parts[name]()

    def _questions(self) -> None:
        texts = question_texts(self._plan.questions, seed=1)
        make_questions(self._work / "questions", texts, seed=100)

    def _typed(self) -> None:
        settings = TypedSettings(seconds=self._plan.typed, most_steps=self._plan.most_steps)
        train_typed(self._work, self._renderer, settings)

    def _ctc(self) -> None:
        settings = CTCSettings(seconds=self._plan.ctc, most_steps=self._plan.most_steps)
        train_ctc(self._work, self._renderer, settings)

    def _end_to_end(self) -> None:
        settings = EndToEndSettings(seconds=self._plan.end_to_end, most_steps=self._plan.most_steps)
        train_end_to_end(self._work, self._renderer, settings)

    def _answers(self) -> None:
        learn_codebook(
            [each.mel for each in answers_spoken(self._work)], self._work / "codebook.pt"
        )

    def _flow(self) -> None:
        speeches = answers_spoken(self._work)
        codebook = learn_codebook([each.mel for each in speeches], self._work / "codebook.pt")
        train_dit(speeches, codebook, DiTBudget(self._plan.flow), self._work / "dit.pt")

    def _waveforms(self) -> None:
        speeches, file = answers_spoken(self._work), self._work / "bigvgan.pt"
        train_bigvgan(speeches, BigVGANBudget(self._plan.waveforms), file)
        whole = self._plan.waveforms + self._plan.anti_aliased
        train_bigvgan(speeches, BigVGANBudget(whole, rate=3e-4, anti_aliased=True), file)

    def _talker(self) -> None:
        tokenizer = self._renderer.tokenizer
        budget = TalkerBudget(self._plan.talker)
        train_mouth_talker(self._work, self._thinker(), tokenizer, budget)

    def _checkpoint(self) -> None:
        write_trained(self._work, self._target, self._thinker(), self._renderer.tokenizer)

    def _figures(self) -> None:
        print("\n".join(evaluate_ears(self._target, self._work)))

    def _thinker(self) -> Qwen2_5OmniThinkerForConditionalGeneration:
        model = build_thinker(self._renderer.tokenizer)
        state = torch.load(self._work / "end_to_end.pt", weights_only=True)
        model.load_state_dict(state["model"])
        return model


def _run_lane(names: Sequence[str], arguments: Sequence[str]) -> None:
    """Parts one after the other, each in a process of its own with one thread."""
    for name in names:
        command = [sys.executable, "-m", "training.spoken_sums", "--part", name, *arguments]
        subprocess.run(command, check=True)


def main() -> None:
    """Train all, or one part."""
    parser = argparse.ArgumentParser(prog="python -m training.spoken_sums", description=__doc__)
    parser.add_argument("--work", type=Path, default=Path("/tmp/training"))
    parser.add_argument("--target", type=Path, help="the checkpoint; WORK/checkpoint if left out")
    parser.add_argument("--quick", action="store_true", help="a few steps of everything")
    parser.add_argument("--part", choices=[*_LANES[0], *_LANES[1], *_AFTER])
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    target = given.target or given.work / "checkpoint"
    if given.part is not None:
        torch.set_num_threads(1)
        Parts(given.work, QUICK if given.quick else Plan(), target).run(given.part)
        return
    arguments = ["--work", str(given.work), "--target", str(target)]
    arguments += ["--quick"] if given.quick else []
    with ThreadPoolExecutor() as pool:
        for lane in [pool.submit(_run_lane, names, arguments) for names in _LANES]:
            lane.result()
    _run_lane(_AFTER, arguments)


if __name__ == "__main__":
    main()
