"""``omni demo --random``: a text and a voice pipeline on random models, and what caches save."""

from __future__ import annotations

import textwrap

import typer

from engine import ChatPrompt, TextPrompt
from omni.commands.demo_lines import SpokenAnswer, builds_told, show_next, summed_up
from omni.requests.request import OmniOutput, OmniRequest
from omni.runtime.omni import Omni
from omni.verification.verify import verify

__all__ = ["RANDOM_NEXT", "run_random_demo"]

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
RANDOM_NEXT = (
    'run two_step --prompt "Once upon a time" --prompt "Once upon a hill"',
    'run omni_speech --chat "What was that?" --output-dir spoken',
    'verify two_step --prompt "Once upon a time, in a house by the sea, a clock told all the time"',
    "explain omni_speech --no-load",
)
"""Commands for whoever has seen the demo."""


def run_random_demo() -> bool:
    """Run the waves and a conversation, print texts and hits; compare with caching off.

    Returns:
        Whether every request came through, and caching changed nothing.

    Raises:
        ValueError: a pipeline cannot be built.
    """
    typer.echo("The models are small and random, and offline: what they write makes no sense, but")
    typer.echo("depends on every token of the input.\n")
    with builds_told():
        is_right = _show_text() & _show_voice()
    show_next(RANDOM_NEXT)
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
    typer.echo(summed_up(report))
    return report.equal and not any(output.error for output in outputs)


def _show_voice() -> bool:
    """A conversation of two turns with a pipeline that speaks while it thinks."""
    typer.echo("\nomni_speech: a thinker writes, a talker and a vocoder say it meanwhile\n")
    messages: list[dict[str, str]] = []
    with Omni("omni_speech") as omni:
        for question in _QUESTIONS:
            messages.append({"role": "user", "content": question})
            answer = SpokenAnswer.streamed(omni, OmniRequest(ChatPrompt(tuple(messages))))
            typer.echo(f"  ... {question}")
            typer.echo("\n".join(f"      {line}" for line in answer.lines("thinker", "code2wav")))
            if answer.sound("code2wav") is None:
                return False
            messages.append(
                {"role": "assistant", "content": answer.output.stages["thinker"].text or ""}
            )
    return True


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
