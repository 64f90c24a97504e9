"""What the demos print alike: what is built, how long things took, and what to try next."""

from __future__ import annotations

import logging
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import typer

from engine import Waveform
from omni.requests.request import OmniOutput, OmniRequest
from omni.runtime.omni import Omni
from omni.verification.verify_report import VerifyReport

__all__ = ["SpokenAnswer", "builds_told", "show_next", "summed_up"]


@dataclass(frozen=True, slots=True)
class SpokenAnswer:
    """An answer that was streamed, and when it came.

    Attributes:
        output: the last one.
        first_text_s: seconds until there was text; None if there was none.
        first_sound_s: the same of sound.
        all_s: until the end.
    """

    output: OmniOutput
    first_text_s: float | None
    first_sound_s: float | None
    all_s: float

    @classmethod
    def streamed(cls, omni: Omni, request: OmniRequest) -> SpokenAnswer:
        """Run a request of a pipeline whose last stage makes sound."""
        begun = time.perf_counter()
        first_text: float | None = None
        first_sound: float | None = None
        for output in omni.stream(request):
            for stage in output.stages.values():
                if first_text is None and stage.delta:
                    first_text = time.perf_counter() - begun
                if first_sound is None and stage.audio_delta is not None:
                    first_sound = time.perf_counter() - begun
        return cls(output, first_text, first_sound, time.perf_counter() - begun)

    def sound(self, voice: str) -> Waveform | None:
        """What a stage said; None if the request failed."""
        stage = self.output.stages.get(voice)
        return None if self.output.error is not None or stage is None else stage.audio

    def lines(self, reader: str, voice: str) -> Iterator[str]:
        """For people: what was hit and when things came, or what went wrong.

        Args:
            reader: name of the stage that read the question.
            voice: name of the stage that made the sound.
        """
        sound = self.sound(voice)
        if sound is None:
            yield f"error: {self.output.error or 'it made no sound'}"
            return
        read = self.output.stages[reader]
        yield (
            f"{reader}: {read.num_cached_tokens} of {read.num_prompt_tokens} input tokens from "
            "the cache"
        )
        yield (
            f"first text after {self.first_text_s or self.all_s:.2f} s, first sound after "
            f"{self.first_sound_s or self.all_s:.2f} s, all {sound.duration_s:.2f} s of sound "
            f"after {self.all_s:.2f} s"
        )


def show_next(commands: Sequence[str]) -> None:
    """Print commands to try, as they are called from here."""
    typer.echo("\nWhat to try next:\n")
    for command in commands:
        typer.echo(f"    {_program()} {command}")


def summed_up(report: VerifyReport) -> str:
    """What warm caches saved, in a sentence."""
    hits = sum(stage.warm_hit_tokens for stage in report.stages)
    inputs = sum(stage.prompt_tokens for stage in report.stages)
    cached = [stage for stage in report.stages if stage.has_cache and stage.is_cached]
    saved = sum(stage.saved_s for stage in cached)
    told = f"\nWarm caches hit {hits} of {inputs} input tokens"
    if saved <= 0:  # prompts are short, and runs of equal work differ by more
        return f"{told}; what that saved is less than such short runs differ by."
    uncached = sum(stage.uncached_s for stage in cached)
    names = " and ".join(stage.stage for stage in cached)
    return f"{told} and saved {saved:.2f} of {uncached:.2f} seconds of {names}."


@contextmanager
def builds_told() -> Iterator[None]:
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
