"""What holding answers to a form costs a decode step.

    python benchmarks/structured_output.py [--rounds 5] [--generate 64]

The model is that of ``engine_cpu.py``, 0.1 B parameters, with a tokenizer of 32,000 words. Every
round runs, in turns, the same requests free and held to each form, of which none can end before
``--generate`` tokens: ``text``, an object with one long string, where most tokens are allowed, and
``records``, an array of objects with numbers and choices, where few are. Times are those of decode
alone: those of a run with ``--generate`` tokens less those of one with a single token, which pays
for the prompt and for compiling the form.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.word_checkpoint import word_checkpoint
from engine import EngineConfig, LLMEngine, SamplingParams, StructuredOutput, TokensPrompt

_RECORD = {
    "type": "object",
    "properties": {"kind": {"enum": ["one", "two", "three"]}, "count": {"type": "integer"}},
    "required": ["kind", "count"],
    "additionalProperties": False,
}
FORMS: dict[str, dict[str, object] | None] = {
    "free": None,
    "text": {
        "type": "object",
        "properties": {"text": {"type": "string", "minLength": 10_000}},
        "required": ["text"],
    },
    "records": {"type": "array", "items": _RECORD, "minItems": 1_000},
}


def seconds_of(engine: LLMEngine, form: str, count: int, num_tokens: int) -> float:
    """Seconds of a run without hits."""
    schema = FORMS[form]
    params = SamplingParams(
        temperature=0.0,
        max_tokens=num_tokens,
        ignore_eos=schema is None,
        structured_output=None
        if schema is None
        else StructuredOutput(json_schema=json.dumps(schema)),
    )
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(1000, 31_000, (count, 64), generator=generator).tolist()
    engine.reset_prefix_cache()
    started = time.perf_counter()
    outputs = engine.generate([TokensPrompt(tuple(each)) for each in prompts], params)
    seconds = time.perf_counter() - started
    for output in outputs:
        completion = output.outputs[0]
        if len(completion.token_ids) != num_tokens:
            raise RuntimeError(f"{form}: {len(completion.token_ids)} of {num_tokens} tokens")
        if schema is not None and num_tokens > 1 and completion.text[:1] not in "[{":
            raise RuntimeError(f"{form}: got {json.dumps(completion.text[:80])}")
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--generate", type=int, default=64)
    args = parser.parse_args()
    table = Table(title="milliseconds per decode step, medians of all rounds")
    for column in ("requests", "form", "ms a step", "form / free, median (min to max)"):
        table.add_column(column, justify="left" if column == "form" else "right")
    with tempfile.TemporaryDirectory() as folder:
        config = EngineConfig(
            model=str(word_checkpoint(Path(folder))), dtype="float32", device="cpu", max_num_seqs=16
        )
        engine = LLMEngine(config)
        for count in (1, 4, 16):
            for form in FORMS:
                seconds_of(engine, form, count, 2)
            steps: dict[str, list[float]] = {form: [] for form in FORMS}
            for _ in range(args.rounds):
                for form, values in steps.items():
                    whole = seconds_of(engine, form, count, args.generate)
                    values.append(
                        (whole - seconds_of(engine, form, count, 1)) / (args.generate - 1)
                    )
            for form, values in steps.items():
                ratios = [a / b for a, b in zip(values, steps["free"], strict=True)]
                spread = f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
                table.add_row(str(count), form, f"{1000 * statistics.median(values):.2f}", spread)
            table.add_section()
    Console().print(table)


if __name__ == "__main__":
    main()
