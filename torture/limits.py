"""Exceeds every known limit once, and measures time and memory.

Each case runs in a separate process and must be refused alone, by an error that says how to raise
the limit or names the mistake, while valid requests in the same batch get the same output as
alone. More than 1.5 GB of memory is wrong, a minute without an end hangs.
"""

from __future__ import annotations

import argparse
import logging
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

from torture.outcome_table import Tally

_TIMEOUT_S = 60.0
_MAX_MB = 1500.0
_MILLION = 10**6


def _requests() -> dict[str, Callable[[], tuple[Any, dict[str, Any]]]]:
    """Return functions that create a prompt and its sampling, by name of the case."""
    import torch

    from engine import ChatPrompt, EmbedsPrompt, TextPrompt, TokensPrompt

    def message(content: Any) -> ChatPrompt:
        return ChatPrompt(({"role": "user", "content": content},))

    parts = [{"type": "text", "text": "x"}]
    return {
        "n of a million": lambda: ("x", {"n": _MILLION}),
        "n without a bound": lambda: ("x", {"n": 10**30}),
        "50 MB of text": lambda: ("x " * (25 * _MILLION), {}),
        "50 MB in one word": lambda: ("x" * (50 * _MILLION), {}),
        "50 MB of a chat": lambda: (message("x " * (25 * _MILLION)), {}),
        "a million chat messages": lambda: (
            ChatPrompt(({"role": "user", "content": "x"},) * _MILLION),
            {},
        ),
        "a million parts of a message": lambda: (message(parts * _MILLION), {}),
        "10 million token ids": lambda: (TokensPrompt((1,) * (10 * _MILLION)), {}),
        "token ids without an end": lambda: (TokensPrompt(count()), {}),  # type: ignore[arg-type]
        "a billion rows": lambda: (EmbedsPrompt(torch.zeros(1, 64).expand(10**9, 64)), {}),
        "a million stop strings": lambda: ("x", {"stop": tuple(map(str, range(_MILLION)))}),
        "a stop string of 50 MB": lambda: ("x", {"stop": "x" * (50 * _MILLION)}),
        "a million stop ids": lambda: ("x", {"stop_token_ids": (1,) * _MILLION}),
        "a million suppressed ids": lambda: ("x", {"suppress_token_ids": tuple(range(_MILLION))}),
        "a million biased ids": lambda: (
            "x",
            {"logit_bias": dict.fromkeys(range(_MILLION), 1.0)},
        ),
        "a billion logprobs": lambda: ("x", {"logprobs": 10**9}),
        "10^18 tokens to generate": lambda: ("x" * 400, {"max_tokens": 10**18}),
        "a million images": lambda: (
            TextPrompt("x", multi_modal_data={"image": ["a.png"] * _MILLION}),
            {},
        ),
    }


_TEMPLATES = {
    "a template that loops": "{% for a in range(99999) %}{% for b in range(99999) %}"
    "{% for c in range(99999) %}{% endfor %}{% endfor %}{% endfor %}",
    "a template with a width": "{{ '%999999999d' % 1 }}",
    "a template that doubles": "{% set s = namespace(v='x') %}{% for i in range(99) %}"
    "{% set s.v = s.v ~ s.v %}{% endfor %}",
    "a template that computes": "{{ 7 ** (7 ** 12) }}",
    "a template of 20 MB": "x" * (20 * _MILLION),
}


def _yaml() -> dict[str, str]:
    """Return pipeline files, by name of the case."""
    laughs = ["k0: &k0 [x, x, x, x, x, x, x, x, x]"]
    laughs += [f"k{n}: &k{n} [{', '.join([f'*k{n - 1}'] * 9)}]" for n in range(1, 30)]
    merges = ["k0: &k0 {a: b}"]
    stage, text = "{kind: encoder, model: a,", "transform: text_as_prompt"
    merges += [f"k{n}: &k{n} {{<<: [{', '.join([f'*k{n - 1}'] * 9)}]}}" for n in range(1, 30)]
    return {
        "YAML of 30 levels of aliases": "\n".join(laughs),
        "YAML of 30 levels of merges": "\n".join(merges),
        "YAML that nests 100,000 deep": "[" * 100_000,
        "YAML of 100,000 mappings in a row": "a: " * 100_000,
        "YAML of 50 MB": "name: " + "x" * (50 * _MILLION),
        "YAML with a number of base 60": "a: 1" + ":59" * 80_000,
        "YAML with a million keys": "\n".join(f"k{n}: 1" for n in range(_MILLION)),
        "YAML of 3,000 stages in a row": "name: a\nstages:\n"
        + "".join(f" s{n}: {stage} inputs: {{from: s{n - 1}, {text}}}}}\n" for n in range(1, 3000))
        + f" s0: {stage}}}",
        "YAML with 10,000 unknown keys": "\n".join(f"k{n}: 1" for n in range(10_000)),
        "YAML of 200,000 list items": "a: [" + "x," * 120_000 + "]",
    }


def _lines() -> dict[str, bytes]:
    """Return lines of a request file, by name of the case."""
    return {
        "a line that nests 10 million deep": b'{"prompt": ' + b"[" * (10 * _MILLION),
        "a line of 50 MB": b'{"prompt": "' + b"x" * (50 * _MILLION) + b'"}',
        "a line with 10 million ids": b'{"prompt_token_ids": [' + b"1," * (10 * _MILLION) + b"1]}",
        "a line with a number of a million digits": b'{"priority": ' + b"9" * _MILLION + b"}",
        "a line of 100 MB of empty lists": b'{"prompt": [' + b"[]," * (33 * _MILLION) + b"[]]}",
        "a line with a million wrong ids": b'{"prompt_token_ids": ['
        + b'"x",' * _MILLION
        + b'"x"]}',
        "a line with a million wrong messages": b'{"prompt": [' + b"3," * _MILLION + b"3]}",
        "a line with a million keys": b"{"
        + b",".join(b'"k%d": 1' % n for n in range(_MILLION))
        + b"}",
    }


def names() -> Iterator[str]:
    """Yield the names of all cases."""
    yield from _requests()
    yield from _TEMPLATES
    yield from _yaml()
    yield from _lines()


def run_case(name: str) -> tuple[str, str]:
    """Run one case in this process; return its outcome and message."""
    try:
        if name in _yaml():
            return _run_yaml(_yaml()[name])
        if name in _lines():
            return _run_line(_lines()[name])
        return _run_request(name)
    except Exception as error:
        return "wrong", f"{type(error).__name__}: {str(error)[:200]}"


def _run_yaml(text: str) -> tuple[str, str]:
    from omni.pipelines.config_file import ConfigError
    from omni.pipelines.pipeline_config import PipelineConfig

    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "much.yaml"
        file.write_text(text)
        try:
            PipelineConfig.load(file)
        except ConfigError as error:
            return "failed alone", str(error)
    return "wrong", "it was taken"


def _run_line(line: bytes) -> tuple[str, str]:
    from omni import OmniRequest
    from omni.requests.request_file import read_requests

    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "much.jsonl"
        file.write_bytes(b'{"prompt": "x"}\n' + line + b'\n{"prompt": "y"}\n')
        entries = read_requests(file, {})
    kinds = [isinstance(entry, OmniRequest) for entry in entries]
    if len(kinds) != 3 or not (kinds[0] and kinds[2]):
        return "wrong", f"of three lines these were read: {kinds}"
    return "failed alone" if not kinds[1] else "went on", str(entries[1])[:200]


def _run_request(name: str) -> tuple[str, str]:
    from omni import ChatPrompt, EngineConfig, Omni, OmniRequest, Pipeline, SamplingParams
    from omni.seeded.checkpoints import resolve_model
    from stages import AutoregressiveStage

    logging.disable(logging.ERROR)
    config = EngineConfig(
        model=resolve_model("seeded:qwen2"), block_size=4, num_blocks=128, max_model_len=64
    )
    greedy = SamplingParams(temperature=0.0, max_tokens=6)
    stage = AutoregressiveStage("writer", config, sampling=greedy)
    with Omni(Pipeline([stage])) as omni:
        (alone,) = omni.generate("Once upon")
        if name in _TEMPLATES:
            assert stage.engine.tokenizer is not None
            stage.engine.tokenizer.chat_template = _TEMPLATES[name]
            prompt: Any = ChatPrompt(({"role": "user", "content": "x"},))
            sampling: dict[str, Any] = {}
        else:
            prompt, sampling = _requests()[name]()
        asked = OmniRequest(prompt, sampling={"writer": sampling})
        outputs = omni.generate(["Once upon", asked, "Once upon"])
        with omni.paused() as pipeline:
            pipeline.stages["writer"].check_integrity()
    beside = [output.stages["writer"].token_ids for output in (outputs[0], outputs[2])]
    if beside != [alone.stages["writer"].token_ids] * 2:
        return "wrong", f"a neighbour gave {beside}"
    if outputs[1].error is None:
        # Values that are clamped to the model's limits are harmless.
        return "went on", ""
    return "failed alone", outputs[1].error


def watch(name: str) -> Tally:
    """Run a case in a separate process."""
    process = subprocess.Popen(
        [sys.executable, "-m", "torture.limits", "--case", name], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    timer = threading.Timer(_TIMEOUT_S, process.kill)
    timer.start()
    last = [line for line in process.stdout if line.startswith("outcome\t")]
    timer.cancel()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = status
    tally = Tally(name, peak_mb=usage.ru_maxrss / (1e6 if sys.platform == "darwin" else 1e3))
    if last:
        _, outcome, said = last[-1].rstrip("\n").split("\t", 2)
        tally.add(outcome, said)
        print(f"  {name}: {said[:150]}", file=sys.stderr, flush=True)
    else:
        tally.add("hangs" if status == 9 else "wrong", f"the process ended with status {status}")
    if tally.peak_mb is not None and tally.peak_mb > _MAX_MB:
        tally.add("wrong", f"{tally.peak_mb:.0f} MB")
    return tally


def main() -> int:
    """Run all cases, or one; return 1 if any outcome is not allowed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", help="run this one here, and say what became of it")
    parser.add_argument("--only", default="", help="run the cases whose names have this in them")
    given = parser.parse_args()
    if given.case is not None:
        outcome, said = run_case(given.case)
        print(f"outcome\t{outcome}\t{' '.join(said.split())}")
        return 0
    return Tally.report([watch(name) for name in names() if given.only in name])


if __name__ == "__main__":
    sys.exit(main())
