"""``omni demo``: two_step on prompts that share a prefix, and what its caches save."""

from __future__ import annotations

import textwrap

import typer

from engine import TextPrompt
from omni.requests.request import OmniOutput, OmniRequest
from omni.runtime.omni import Omni
from omni.verification.verify import verify
from omni.verification.verify_report import VerifyReport

__all__ = ["run_demo"]

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


def run_demo() -> bool:
    """Run the waves, print texts and hits, then compare with caching off.

    Returns:
        Whether every request came through, and caching changed nothing.

    Raises:
        ValueError: the pipeline cannot be built.
    """
    typer.echo("Building small models with random weights (once), and the pipeline two_step.")
    typer.echo("What they write makes no sense, but depends on every token of the input.\n")
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
