"""Cost of structured output per decode step.

    python benchmarks/structured_output.py [--rounds 5] [--generate 64]

The model is that of ``engine_cpu.py``, 0.1 B parameters, with a tokenizer of 32,000 words. Every
round runs, alternating, the same requests unconstrained and constrained to each form. No answer
ends before ``--generate`` tokens::

    text       an object with one string, where most tokens are allowed; all sides, including the
               free one, have a bias against the token that would close it
    counted    the same with a minimum length: its length is part of the grammar's state
    records    an array of objects with numbers and choices, where few tokens are allowed

Times are those of decode alone: of a run with ``--generate`` tokens minus one with a single token,
which includes the prefill and compiling the grammar. In addition, the table shows the time within a
step spent on the grammar, masks and state transitions together, and its share of the step, which
is smaller than the noise between rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.word_checkpoint import word_checkpoint, word_id
from engine import EngineConfig, LLMEngine, SamplingParams, StructuredOutput, TokensPrompt
from engine.sampling import sampler
from engine.sampling.token_grammar import TokenGrammar, apply_grammars

_RECORD = {
    "type": "object",
    "properties": {"kind": {"enum": ["one", "two", "three"]}, "count": {"type": "integer"}},
    "required": ["kind", "count"],
    "additionalProperties": False,
}


def _text(**limits: int) -> dict[str, object]:
    properties = {"text": {"type": "string", **limits}}
    return {"type": "object", "properties": properties, "required": ["text"]}


FORMS: dict[str, dict[str, object] | None] = {
    "free": None,
    "text": _text(),
    "counted": _text(minLength=10_000),
    "records": {"type": "array", "items": _RECORD, "minItems": 1_000},
}
_QUOTE = word_id('"')


class Clock:
    """Accumulates the seconds spent inside functions."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def time(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function to time it."""

        def timed(*args: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*args)
            finally:
                self.seconds += time.perf_counter() - started

        return timed


COLUMNS = (
    *("requests", "form", "ms a step", "form / free, median (min to max)"),
    *("following the form, ms", "share of the step"),
)
FOLLOWING = Clock()
# The names by which the sampler calls them.
sampler.apply_grammars = FOLLOWING.time(apply_grammars)  # type: ignore[attr-defined]
TokenGrammar.accept = FOLLOWING.time(TokenGrammar.accept)  # type: ignore[method-assign]


@dataclass(frozen=True)
class Timed:
    """Seconds of a run without hits, and the part of them inside the grammar's functions."""

    whole: float
    following: float

    def step(self, shorter: Timed, num_steps: int) -> Timed:
        """Return the times per step, given a shorter run with ``num_steps`` fewer steps."""
        return Timed(
            (self.whole - shorter.whole) / num_steps,
            (self.following - shorter.following) / num_steps,
        )


def run(engine: LLMEngine, form: str, count: int, num_tokens: int) -> Timed:
    """Time a run without hits."""
    schema = FORMS[form]
    params = SamplingParams(
        temperature=0.0,
        max_tokens=num_tokens,
        ignore_eos=schema is None,
        logit_bias={_QUOTE: -100.0},
        structured_output=None
        if schema is None
        else StructuredOutput(json_schema=json.dumps(schema)),
    )
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(1000, 31_000, (count, 64), generator=generator).tolist()
    engine.reset_prefix_cache()
    started, before = time.perf_counter(), FOLLOWING.seconds
    outputs = engine.generate([TokensPrompt(tuple(each)) for each in prompts], params)
    timed = Timed(time.perf_counter() - started, FOLLOWING.seconds - before)
    for output in outputs:
        completion = output.outputs[0]
        if len(completion.token_ids) != num_tokens:
            raise RuntimeError(f"{form}: {len(completion.token_ids)} of {num_tokens} tokens")
        if schema is not None and num_tokens > 1 and completion.text[:1] not in "[{":
            raise RuntimeError(f"{form}: got {json.dumps(completion.text[:80])}")
    return timed


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--generate", type=int, default=64)
    args = parser.parse_args()
    table = Table(title="milliseconds per decode step, medians of all rounds")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "form" else "right")
    with tempfile.TemporaryDirectory() as folder:
        config = EngineConfig(
            model=str(word_checkpoint(Path(folder))), dtype="float32", device="cpu", max_num_seqs=16
        )
        engine = LLMEngine(config)
        for count in (1, 4, 16):
            for form in FORMS:
                run(engine, form, count, 2)
            steps: dict[str, list[Timed]] = {form: [] for form in FORMS}
            for _ in range(args.rounds):
                for form, values in steps.items():
                    whole = run(engine, form, count, args.generate)
                    values.append(whole.step(run(engine, form, count, 1), args.generate - 1))
            for form, values in steps.items():
                ratios = [a.whole / b.whole for a, b in zip(values, steps["free"], strict=True)]
                whole_s = statistics.median(each.whole for each in values)
                following_s = statistics.median(each.following for each in values)
                table.add_row(
                    *(str(count), form, f"{1000 * whole_s:.2f}"),
                    f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})",
                    *(f"{1000 * following_s:.2f}", f"{following_s / whole_s:.1%}"),
                )
            table.add_section()
    Console().print(table)


if __name__ == "__main__":
    main()
