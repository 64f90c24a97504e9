"""``python -m training.spoken_sums``: runs all parts in order, two at a time.

::

    core A   questions ─► typed ─► ctc ─► end to end ─► polish ─┐
    core B   answers ─► codes ─► flow ─► waveforms ─────────────┴─► talker ─► checkpoint ─► figures

An interrupted part continues from its last saved state; a finished part is skipped.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import Qwen2_5OmniThinkerForConditionalGeneration

from training.spoken_sums.bigvgan import BigVGANBudget, train_bigvgan
from training.spoken_sums.codes import learn_codebook
from training.spoken_sums.ctc import CTCSettings, train_ctc
from training.spoken_sums.dit import DiTBudget, train_dit
from training.spoken_sums.ears_evaluate import evaluate_ears
from training.spoken_sums.end_to_end import EndToEndSettings, train_end_to_end
from training.spoken_sums.lanes import needed_programs, run_lanes
from training.spoken_sums.mouth import train_mouth_talker, write_trained
from training.spoken_sums.mouth_evaluate import evaluate_mouth
from training.spoken_sums.pipeline_evaluate import STAGES, evaluate_pipeline
from training.spoken_sums.polish import PolishSettings, polish
from training.spoken_sums.question_texts import question_texts
from training.spoken_sums.questions import make_questions
from training.spoken_sums.rendering import Renderer
from training.spoken_sums.speech import answers_spoken
from training.spoken_sums.talker import TalkerBudget
from training.spoken_sums.thinker import build_thinker
from training.spoken_sums.tokenizer import build_tokenizer
from training.spoken_sums.typed import TypedSettings, train_typed
from training.spoken_sums.work_folder import QUICK_WORK, WORK, claim


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Amounts of data and steps; the defaults are those of the shipped checkpoint.

    Attributes:
        questions: number of spoken training questions.
        typed: steps of this part.
        ctc: steps.
        end_to_end: steps.
        recordings: number of recordings for the last part, encoded by the finished tower.
        polish: steps.
        flow: steps of the vocoder's flow from codes to mel bands.
        waveforms: steps of its network from mel bands to samples.
        anti_aliased: further steps of the same network, with filters.
        talker: steps.
        replies: number of the thinker's replies that the talker is trained on.
        every: evaluate on every n-th held-out question.
    """

    questions: int = 30_000
    typed: int = 620
    ctc: int = 520
    end_to_end: int = 1740
    recordings: int = 2500
    polish: int = 2460
    flow: int = 920
    waveforms: int = 1200
    anti_aliased: int = 810
    talker: int = 4720
    replies: int = 2400
    every: int = 1


QUICK = Plan(
    questions=120,
    typed=3,
    ctc=2,
    end_to_end=2,
    recordings=24,
    polish=2,
    flow=2,
    waveforms=2,
    anti_aliased=1,
    talker=2,
    replies=48,
    every=30,
)
"""Runs every part for a few steps, as a smoke test."""

_LANES = (
    ("questions", "typed", "ctc", "end_to_end", "polish"),
    ("answers", "flow", "waveforms"),
)
_AFTER = ("talker", "checkpoint", "figures")


class Parts:
    """The parts of the training, by name.

    Args:
        work: the folder of all states.
        plan: amounts of data and steps.
        target: output folder of the checkpoint.
    """

    def __init__(self, work: Path, plan: Plan, target: Path) -> None:
        self._work, self._plan, self._target = work, plan, target
        self._renderer = Renderer(build_tokenizer())

    def run(self, name: str) -> None:
        """Run one part."""
        parts: dict[str, Callable[[], object]] = {
            "questions": self._questions,
            "typed": self._typed,
            "ctc": self._ctc,
            "end_to_end": self._end_to_end,
            "polish": self._polish,
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
        train_typed(self._work, self._renderer, TypedSettings(steps=self._plan.typed))

    def _ctc(self) -> None:
        train_ctc(self._work, self._renderer, CTCSettings(steps=self._plan.ctc))

    def _end_to_end(self) -> None:
        settings = EndToEndSettings(steps=self._plan.end_to_end)
        train_end_to_end(self._work, self._renderer, settings)

    def _polish(self) -> None:
        settings = PolishSettings(steps=self._plan.polish, recordings=self._plan.recordings)
        polish(self._work, self._renderer, settings)

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
        train_bigvgan(speeches, BigVGANBudget(whole, anti_aliased=True), file)

    def _talker(self) -> None:
        tokenizer = self._renderer.tokenizer
        budget = TalkerBudget(self._plan.talker, replies=self._plan.replies)
        train_mouth_talker(self._work, self._thinker(), tokenizer, budget)

    def _checkpoint(self) -> None:
        write_trained(self._work, self._target, self._thinker(), self._renderer.tokenizer)

    def _figures(self) -> None:
        every = self._plan.every
        ears = evaluate_ears(self._target, self._work, every=every)
        mouth = evaluate_mouth(self._work, every=every)
        said = evaluate_pipeline("spoken_sums", checkpoint=self._target, every=every)
        print("\n".join([*ears, *mouth, *said]))

    def _thinker(self) -> Qwen2_5OmniThinkerForConditionalGeneration:
        model = build_thinker(self._renderer.tokenizer)
        state = torch.load(self._work / "thinker.pt", weights_only=True)
        model.load_state_dict(state["model"])
        return model


def main() -> None:
    """Run all parts, or one."""
    parser = argparse.ArgumentParser(prog="python -m training.spoken_sums", description=__doc__)
    parser.add_argument("--work", type=Path, help=f"{WORK}, or {QUICK_WORK}, if left out")
    parser.add_argument("--target", type=Path, help="the checkpoint; WORK/checkpoint if left out")
    parser.add_argument("--quick", action="store_true", help="a few steps of everything")
    parser.add_argument("--part", choices=[*_LANES[0], *_LANES[1], *_AFTER])
    given = parser.parse_args()
    plan = QUICK if given.quick else Plan()
    work: Path = given.work or (QUICK_WORK if given.quick else WORK)
    target = given.target or work / "checkpoint"
    try:
        needed_programs()
        claim(work, asdict(plan))
    except ValueError as error:
        parser.error(str(error))
    if given.part is not None:
        torch.set_num_threads(1)
        Parts(work, plan, target).run(given.part)
        return
    command = [sys.executable, "-m", "training.spoken_sums"]
    command += ["--work", str(work), "--target", str(target)]
    command += ["--quick", "--part"] if given.quick else ["--part"]
    run_lanes(_LANES, command)
    run_lanes((_AFTER,), command)
    print(f"\nThe checkpoint is in {target}. To run it: omni run spoken_sums --chat '12 + 30' \\")
    print(" ".join(f"--set stages.{stage}.model={target}" for stage in STAGES))


if __name__ == "__main__":
    main()
