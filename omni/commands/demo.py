"""``omni demo``: a text and a voice pipeline, what their caches save, and what to try next."""

from __future__ import annotations

import logging
import shutil
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer

from engine import ChatPrompt, TextPrompt
from omni.requests.request import OmniOutput, OmniRequest
from omni.runtime.omni import Omni
from omni.verification.verify import verify
from omni.verification.verify_report import VerifyReport

__all__ = ["NEXT", "run_demo"]

_MODELS = {
    "stages.writer.model": "seeded:qwen2-medium",
    "stages.reader.model": "seeded:llama-medium",
}
_RULES = (
    "first collect what is known, then read it again, and check that nothing is missing",
    "the library has three floors: history below, music in the middle, and poetry at the top",
    "the train leaves at seven in the morning and returns with letters, bread, and news",
    "every clock keeps its own time, and somebody has to remind them of each other",
)
_SYSTEM = "You are a helpful assistant, and these are the rules of the house.\n" + "".join(
    f"{number}. In the evening, {_RULES[number % len(_RULES)]}.\n" for number in range(1, 25)
)
_INDENT = " " * 8
_WAVES = (
    (
        "What is the capital of the country?",
        "How many rivers cross the plain?",
        "Why is the sky blue?",
    ),
    (
        "What is the capital of the country? And of the next one?",
        "Who repaired the clocks?",
        "Why is the sky blue?",
    ),
)


_QUESTIONS = ("What was that?", "And what was it before?")
NEXT = (
    'run two_step --prompt "Once upon a time" --prompt "Once upon a hill"',
    'run omni_speech --chat "What was that?" --output-dir spoken',
    'verify two_step --prompt "Once upon a time, in a house by the sea, a clock told all the time"',
    "explain omni_speech --no-load",
)
"""Commands for whoever has seen the demo."""


def run_demo() -> bool:
    """Run the waves and a conversation, print texts and hits; compare with caching off.

    Returns:
        Whether every request came through, and caching changed nothing.

    Raises:
        ValueError: a pipeline cannot be built.
    """
    typer.echo("The models are small and random, and offline: what they write makes no sense, but")
    typer.echo("depends on every token of the input.\n")
    with _builds_told():
        is_right = _show_text() & _show_voice()
    typer.echo("\nWhat to try next:\n")
    for command in NEXT:
        typer.echo(f"    {_program()} {command}")
    return is_right


def _show_text() -> bool:
    """Waves of requests that share a prefix through two stages, and the comparison."""
    typer.echo("two_step: a writer, and a reader of the writer's hidden states\n")
    requests: list[OmniRequest] = []
    outputs: list[OmniOutput] = []
    with Omni("two_step", overrides=_MODELS) as omni:
        for wave, questions in enumerate(_WAVES, start=1):
            typer.echo(f"Wave {wave}: {len(questions)} requests that begin with the same text")
            together = [
                OmniRequest(TextPrompt(_SYSTEM + question), request_id=f"{wave}.{number}")
                for number, question in enumerate(questions, start=1)
            ]
            done = omni.generate(together)
            requests += together
            outputs += done
            for question, output in zip(questions, done, strict=True):
                typer.echo(_describe(question, output))
        typer.echo("All requests again: caches off, caches empty, caches warm.")
        report = verify(omni, requests)
    typer.echo("\n".join(report.lines()))
    typer.echo(_sum_up(report))
    return report.equal and not any(output.error for output in outputs)


def _show_voice() -> bool:
    """A conversation of two turns with a pipeline that speaks while it thinks."""
    typer.echo("\nomni_speech: a thinker writes, a talker and a vocoder say it meanwhile\n")
    messages: list[dict[str, str]] = []
    with Omni("omni_speech") as omni:
        for question in _QUESTIONS:
            messages.append({"role": "user", "content": question})
            text = _speak(omni, OmniRequest(ChatPrompt(tuple(messages))), question)
            if text is None:
                return False
            messages.append({"role": "assistant", "content": text})
    return True


def _speak(omni: Omni, request: OmniRequest, question: str) -> str | None:
    """Stream an answer and tell when text and sound came; its text, or None if it failed."""
    begun = time.perf_counter()
    first_text: float | None = None
    first_sound: float | None = None
    for output in omni.stream(request):
        thinker, voice = (output.stages.get(name) for name in ("thinker", "code2wav"))
        if first_text is None and thinker is not None and thinker.delta:
            first_text = time.perf_counter() - begun
        if first_sound is None and voice is not None and voice.audio_delta is not None:
            first_sound = time.perf_counter() - begun
    spent = time.perf_counter() - begun
    typer.echo(f"  ... {question}")
    if output.error is not None or voice is None or voice.audio is None or thinker is None:
        typer.echo(f"      error: {output.error or 'it made no sound'}")
        return None
    typer.echo(
        f"      thinker: {thinker.num_cached_tokens} of {thinker.num_prompt_tokens} input tokens "
        f"from the cache\n"
        f"      first text after {first_text or spent:.2f} s, first sound after "
        f"{first_sound or spent:.2f} s, all {voice.audio.duration_s:.2f} s of sound after "
        f"{spent:.2f} s"
    )
    return thinker.text or ""


@contextmanager
def _builds_told() -> Iterator[None]:
    """Say what is built on a first start, and nothing on later ones."""
    logger = logging.getLogger("omni.engine.files.disk_cache")
    handler, level = _Told(), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False  # else the command line would say the same once more
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = True


class _Told(logging.Handler):
    """Prints what a logger says, for people."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a line."""
        typer.echo(f"  {record.getMessage()}")


def _program() -> str:
    """How this program is called from here: ``omni`` if that finds it, else its path."""
    called = Path(sys.argv[0])
    found = shutil.which("omni")
    if found is not None and Path(found).resolve() == called.resolve():
        return "omni"
    return str(called) if called.name == "omni" else f"{sys.executable} -m omni"


def _sum_up(report: VerifyReport) -> str:
    hits = sum(stage.warm_hit_tokens for stage in report.stages)
    inputs = sum(stage.prompt_tokens for stage in report.stages)
    uncached = sum(stage.uncached_s for stage in report.stages)
    saved = sum(stage.saved_s for stage in report.stages)
    return (
        f"\nWarm caches hit {hits} of {inputs} input tokens and saved {saved:.2f} of "
        f"{uncached:.2f} seconds."
    )


def _describe(question: str, output: OmniOutput) -> str:
    lines = [f"  ... {question}"]
    if output.error is not None:
        lines.append(f"      error: {output.error}")
    for name, stage in output.stages.items():
        lines.append(
            f"      {name}: {stage.num_cached_tokens} of {stage.num_prompt_tokens} input tokens "
            "from the cache"
        )
        text = " ".join((stage.text or "").split())
        lines += textwrap.wrap(text, 80, initial_indent=_INDENT, subsequent_indent=_INDENT)
    return "\n".join(lines) + "\n"
