"""The ``omni demo`` command: spoken questions and answers, compared with caching off."""

from __future__ import annotations

import logging
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer

import stage_configs
from engine import ChatPrompt, Waveform
from omni.requests.request import OmniOutput, OmniRequest
from omni.runtime.omni import Omni
from omni.verification.verify import VerifyReport, verify

NEXT = (
    'run spoken_sums --chat "seventeen plus five" --speaker Ben --output-dir spoken',
    'run spoken_sums --chat "8 * 4" --chat "hello"',
    'verify spoken_sums --chat "what is eighty minus twenty five?"',
    "explain spoken_sums --no-load",
    'run two_step --prompt "Once upon a time" --prompt "Once upon a hill"',
)
"""Commands to try after the demo."""


_FOLDER = Path(stage_configs.__file__).parent / "spoken_sums" / "questions"
_QUESTIONS = ("twelve_plus_thirty", "and_times_two", "what_is_ninety_one_minus_thirty_eight")
"""Sound files, named by their words. One that begins with "and" continues a conversation."""

_THINKER, _VOCODER = "thinker", "code2wav"


def run_demo(folder: Path) -> bool:
    """Ask three spoken questions, print what was heard and answered; compare with caching off.

    Returns:
        True if every request succeeded and caching changed nothing.

    Raises:
        ValueError: the pipeline cannot be built.
        OSError: the folder cannot be written.
    """
    typer.echo("spoken_sums: it hears plus, minus or times of two numbers to 99, writes it and")
    typer.echo("says the result. A small checkpoint, trained for this; all runs on this CPU.\n")
    folder.mkdir(parents=True, exist_ok=True)
    with _show_builds(), Omni("spoken_sums") as omni:
        requests: list[OmniRequest] = []
        messages: list[dict[str, object]] = []
        sounds: list[Path] = []
        for number, question in enumerate(_QUESTIONS, start=1):
            if not _is_follow_up(question):
                messages, sounds = [], []
            messages.append({"role": "user", "content": [{"type": "audio"}]})
            sounds.append(_FOLDER / f"{question}.flac")
            prompt = ChatPrompt(tuple(messages), {"audio": list(sounds)})
            requests.append(OmniRequest(prompt, request_id=f"question {number}"))
            text = _ask(omni, requests[-1], question, folder / f"answer_{number}.wav")
            if text is None:
                return False
            messages.append({"role": "assistant", "content": text})
        typer.echo("All questions again: caches off, caches empty, caches warm.")
        report = verify(omni, requests)
    typer.echo("\n".join((*report.lines(), summarize(report), "\nWhat to try next:\n")))
    for command in NEXT:
        typer.echo(f"    {_program()} {command}")
    return report.equal and not report.failures


def summarize(report: VerifyReport) -> str:
    """Summarize in a sentence what warm caches saved."""
    hits = sum(stage.warm_hit_tokens for stage in report.stages)
    inputs = sum(stage.prompt_tokens for stage in report.stages)
    cached = [stage for stage in report.stages if stage.has_cache and stage.is_cached]
    saved = sum(stage.saved_s for stage in cached)
    begin = f"\nWarm caches hit {hits} of {inputs} input tokens"
    if saved <= 0:  # prompts are short: the noise between equal runs is larger
        return f"{begin}; what that saved is less than such short runs differ by."
    uncached = sum(stage.uncached_s for stage in cached)
    names = " and ".join(stage.stage for stage in cached)
    return f"{begin} and saved {saved:.2f} of {uncached:.2f} seconds of {names}."


def _is_follow_up(question: str) -> bool:
    return question.startswith("and_")


def _ask(omni: Omni, request: OmniRequest, question: str, path: Path) -> str | None:
    """Stream an answer, save its audio, print both; return the text, or None if it failed."""
    follows = ", in the same conversation" if _is_follow_up(question) else ""
    words = question.replace("_", " ")
    typer.echo(f"  asked   {words!r}, by voice{follows} ({question}.flac)")
    output, lines = _run_streaming(omni, request)
    text = None
    if (sound := _sound_of(output)) is not None:
        text = output.stages[_THINKER].text or ""
        heard, _, said = text.rpartition(" = ")
        sound.save(path)
        typer.echo(f"  heard   {heard or 'no sum'}")
        typer.echo(f"  said    {said!r}, in {path}")
    typer.echo("\n".join(f"          {line}" for line in lines) + "\n")
    return text


def _run_streaming(omni: Omni, request: OmniRequest) -> tuple[OmniOutput, list[str]]:
    """Run a request; return its last output, and lines on its cache hits and latencies."""
    begun = time.perf_counter()
    times: dict[str, float] = {}
    for output in omni.stream(request):
        for stage in output.stages.values():
            new = {"text": stage.delta, "sound": stage.audio_delta}
            for kind in (kind for kind, delta in new.items() if delta):
                times.setdefault(kind, time.perf_counter() - begun)
    all_s = time.perf_counter() - begun
    sound = _sound_of(output)
    if sound is None:
        return output, [f"error: {output.error or 'it made no sound'}"]
    read = output.stages[_THINKER]
    return output, [
        f"{_THINKER}: {read.num_cached_tokens} of {read.num_prompt_tokens} input tokens from the "
        "cache",
        f"first text after {times.get('text', all_s):.2f} s, first sound after "
        f"{times.get('sound', all_s):.2f} s, all {sound.duration_s:.2f} s of sound after "
        f"{all_s:.2f} s",
    ]


def _sound_of(output: OmniOutput) -> Waveform | None:
    """Return the audio of the vocoder stage; None if the request failed."""
    voice = output.stages.get(_VOCODER)
    return None if output.error is not None or voice is None else voice.audio


def _program() -> str:
    """Return the command that runs this program: ``omni`` if it is on PATH, else its path."""
    called = Path(sys.argv[0])
    found = shutil.which("omni")
    if found is not None and Path(found).resolve() == called.resolve():
        return "omni"
    return str(called) if called.name == "omni" else f"{sys.executable} -m omni"


@contextmanager
def _show_builds() -> Iterator[None]:
    """Print the log messages about files built on the first start."""
    logger = logging.getLogger("omni.engine.files.disk_cache")
    handler, level = logging.Handler(), logger.level
    handler.emit = lambda record: typer.echo(f"  {record.getMessage()}")  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False  # else the command line would print them again
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = True
