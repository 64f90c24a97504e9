"""``omni demo``: asks a pipeline that hears and speaks, and writes its answers as sound."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import typer

import stage_configs
from engine import ChatPrompt
from omni.commands.demo_lines import SpokenAnswer, builds_told, show_next, summed_up
from omni.requests.request import OmniRequest
from omni.runtime.omni import Omni
from omni.verification.verify import verify

__all__ = ["NEXT", "run_demo"]

_PIPELINE, _THINKER, _VOICE = "spoken_sums", "thinker", "code2wav"
_QUESTIONS = Path(stage_configs.__file__).parent / _PIPELINE / "questions"


@dataclass(frozen=True, slots=True)
class _Question:
    """A sound file of the demo.

    Attributes:
        file: its name without the suffix.
        words: what is said there, for people.
        goes_on: whether it is the next turn of the conversation before it.
    """

    file: str
    words: str
    goes_on: bool = False

    @property
    def path(self) -> Path:
        """Where it is."""
        return _QUESTIONS / f"{self.file}.flac"


_ASKED = (
    _Question("twelve_plus_thirty", "twelve plus thirty"),
    _Question("and_times_two", "and times two", goes_on=True),
    _Question("what_is_ninety_one_minus_thirty_eight", "what is ninety one minus thirty eight"),
)
NEXT = (
    'run spoken_sums --chat "seventeen plus five" --speaker Ben --output-dir spoken',
    'run spoken_sums --chat "8 * 4" --chat "hello"',
    'verify spoken_sums --chat "what is eighty minus twenty five?"',
    "explain spoken_sums --no-load",
    "demo --random",
)
"""Commands for whoever has seen the demo."""


def run_demo(folder: Path) -> bool:
    """Ask three spoken questions, print what was heard and answered; compare with caching off.

    Args:
        folder: the answers are written there as WAV files; created if missing.

    Returns:
        Whether every request came through, and caching changed nothing.

    Raises:
        ValueError: the pipeline cannot be built.
        OSError: the folder cannot be written.
    """
    typer.echo("spoken_sums: it hears plus, minus or times of two numbers to 99, writes it and")
    typer.echo("says the result. A small checkpoint, trained for this; all runs on this CPU.\n")
    folder.mkdir(parents=True, exist_ok=True)
    with builds_told(), Omni(_PIPELINE) as omni:
        requests: list[OmniRequest] = []
        messages: list[dict[str, object]] = []
        sounds: list[Path] = []
        for number, question in enumerate(_ASKED, start=1):
            if not question.goes_on:
                messages, sounds = [], []
            messages.append({"role": "user", "content": [{"type": "audio"}]})
            sounds.append(question.path)
            prompt = ChatPrompt(tuple(messages), {"audio": list(sounds)})
            requests.append(OmniRequest(prompt, request_id=f"question {number}"))
            text = _ask(omni, requests[-1], question, folder / f"answer_{number}.wav")
            if text is None:
                return False
            messages.append({"role": "assistant", "content": text})
        typer.echo("All questions again: caches off, caches empty, caches warm.")
        report = verify(omni, requests)
    typer.echo("\n".join(report.lines()))
    typer.echo(summed_up(report))
    show_next(NEXT)
    return report.equal and not report.failures


def _ask(omni: Omni, request: OmniRequest, question: _Question, path: Path) -> str | None:
    """Stream an answer, write its sound, print both; the text, or None if it failed."""
    follows = ", in the same conversation" if question.goes_on else ""
    typer.echo(f"  asked   {question.words!r}, by voice{follows} ({question.path.name})")
    answer = SpokenAnswer.streamed(omni, request)
    sound = answer.sound(_VOICE)
    if sound is not None:
        text = answer.output.stages[_THINKER].text or ""
        heard, _, said = text.rpartition(" = ")
        sound.save(path)
        typer.echo(f"  heard   {heard or 'no sum'}")
        typer.echo(f"  said    {said!r}, in {path}")
    for line in answer.lines(_THINKER, _VOICE):
        typer.echo(f"          {line}")
    typer.echo("")
    return None if sound is None else text
