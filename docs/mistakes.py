"""The likeliest mistakes, and what each of them is answered: makes ``docs/mistakes.md``.

    python -m docs.mistakes            # write the page anew
    python -m docs.mistakes --print    # show it

Every mistake is made for real, in a folder of its own. A test makes them again and compares with
the page.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from typer.testing import CliRunner

from omni.commands.cli import app

PAGE = Path(__file__).with_suffix(".md")
_SETTINGS = {"COLUMNS": "100", "NO_COLOR": "1"}

_HEAD = """\
# Mistakes and their error messages

The likeliest mistakes, with the messages that `python -m docs.mistakes` got for them. A mistake in
a pipeline or a flag is refused before a model runs, with exit status 2. A wrong line of requests
fails alone: the others run, its error is printed and is in its own line of `outputs.jsonl`, and the
exit status is 1
(`omni validate --input` finds such lines without a model, with exit status 2). In Python it is a
`ValueError`, or a `TypeError` for an argument that does not exist.
"""

_YAML = """\
name: mine
stages:
  writer:
    kind: autoregressive
    model: seeded:qwen2
    sampling: {max_tokens: 4}
    outputs: [hidden_states]
    final_output: text
  reader:
    kind: autoregressive
    model: seeded:llama
    inputs: {from: writer, transform: hidden_states_as_prompt_embeds}
    sampling: {max_tokens: 4}
    outputs: []
    final_output: text
"""


@dataclass(frozen=True)
class Answer:
    """What came of a mistake.

    Attributes:
        text: what was printed, without the folder's own path.
        status: the exit status.
    """

    text: str
    status: int


@dataclass(frozen=True)
class Mistake:
    """One mistake, and how to make it.

    Attributes:
        what: in a few words.
        wrong: the place, as it was written.
        command: the words behind ``omni``; empty if ``code`` makes the mistake.
        code: a Python program.
        files: by name, what lies in the folder.
    """

    what: str
    wrong: str
    command: tuple[str, ...] = ()
    code: str = ""
    files: Mapping[str, str] = field(default_factory=dict)


def _yaml(what: str, right: str, wrong: str, *, load: bool = False) -> Mistake:
    """A mistake in a pipeline's file; ``load`` if only the run itself can see it."""
    if right not in _YAML:
        raise ValueError(f"the file does not say {right!r}")
    command = ("run", "mine.yaml", "--prompt", "Hello") if load else ("validate", "mine.yaml")
    return Mistake(what, wrong.strip(), command, files={"mine.yaml": _YAML.replace(right, wrong)})


def _line(what: str, line: str) -> Mistake:
    """A mistake in a line of requests."""
    command = ("run", "two_step", "--quiet", "--input", "requests.jsonl")
    return Mistake(what, line.rstrip("\n"), command, files={"requests.jsonl": line})


def _flags(what: str, *command: str) -> Mistake:
    return Mistake(what, " ".join(("omni", *command)), command)


def _python(what: str, line: str) -> Mistake:
    return Mistake(what, line, code=f"from omni import *\n{line}\n")


MISTAKES: Mapping[str, tuple[Mistake, ...]] = {
    "In the YAML file": (
        _yaml("a kind of stage misspelt", "kind: autoregressive", "kind: autoregresive"),
        _yaml("a key that does not exist", "max_tokens: 4", "max_token: 4"),
        _yaml("a source that is not there", "from: writer", "from: writter"),
        _yaml("a transform that is not there", "hidden_states_as_prompt_embeds", "hidden_states"),
        _yaml("stages in a circle", "model: seeded:qwen2", (
            "model: seeded:qwen2\n"
            "    inputs: {from: reader, transform: text_as_prompt}"
        )),
        _yaml("rows that are used but not handed on", "outputs: [hidden_states]", "outputs: []"),
        _yaml("an output that no stage has", "final_output: text", "final_output: texts"),
        _yaml("a word where a number belongs", "{max_tokens: 4}", "{temperature: hot}"),
        _yaml("a tab", "    kind: autoregressive", "\tkind: autoregressive"),
        _yaml("a model that is not there", "seeded:llama", "./my-llama", load=True),
        _yaml("an encoder as a decoder", "seeded:llama", "seeded:bert", load=True),
        _yaml("a type that is not known", "model: seeded:llama", (
            "model: seeded:llama\n    engine: {dtype: fp16}"
        )),
        _yaml("a device that is not there", "model: seeded:llama", (
            "model: seeded:llama\n    engine: {device: cuda}"
        ), load=True),
        _yaml("a runtime misspelt", "name: mine", "name: mine\nruntime: {kind: process}"),
        _yaml("replicas in one process", "model: seeded:llama", (
            "model: seeded:llama\n    placement: {replicas: 2}"
        )),
        _yaml("too little memory", "model: seeded:llama", (
            "model: seeded:llama\n    engine: {num_blocks: 1}"
        ), load=True),
    ),
    "In the file of requests": (
        _line("no prompt", '{"request_id": "a"}\n'),
        _line("two prompts", '{"prompt": "Hello", "prompt_token_ids": [1, 2]}\n'),
        _line("not quite JSON", "{'prompt': 'Hello'}\n"),
        _line("one id twice", '{"request_id": "a", "prompt": "x"}\n' * 2),
        _line("sampling of a stage that is not there", (
            '{"prompt": "Hello", "sampling": {"writter": {"max_tokens": 3}}}\n'
        )),
        _line("a value out of range", (
            '{"prompt": "Hello", "sampling": {"writer": {"max_tokens": -1}}}\n'
        )),
        _line("a field of sampling beside the prompt", (
            '{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5}\n'
        )),
        _line("a file that is not there", '{"prompt": "Hello", "images": ["cat.png"]}\n'),
    ),
    "In the flags": (
        _flags("a pipeline's name misspelt", "run", "two_setp", "--prompt", "Hello"),
        _flags("nothing to run", "run", "two_step"),
        _flags("a place that is not there", "validate", "two_step", "--set",
               "stages.writer.engine.num_block=4"),
        _flags("a voice that is not there", "run", "omni_speech", "--speaker", "Bob",
               "--prompt", "Hello"),
        _flags("an address without a cluster", "run", "two_step", "--address", "head:6379",
               "--prompt", "Hello"),
        _flags("a flag misspelt", "run", "two_step", "--promt", "Hello"),
        _flags("a word where a number belongs, in a flag", "run", "two_step", "--max-tokens", "few",
               "--prompt", "Hello"),
        _flags("a folder that cannot be made", "run", "two_step", "--prompt", "Hello",
               "--output-dir", "/dev/null/out"),
    ),
    "In Python": (
        _python("no pipeline", "Omni(3)"),
        _python("one source for a tuple of them", 'StageInputs("writer", "text_as_prompt")'),
        _python("a parameter misspelt", "SamplingParams(max_token=3)"),
        _python("a parameter out of range", "SamplingParams(temperature=-1)"),
        _python("a prompt that is none", 'Omni("two_step").generate(42)'),
    ),
}  # fmt: skip


def answer_to(mistake: Mistake) -> Answer:
    """Make a mistake, in a folder of its own."""
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(name):
        for file, text in mistake.files.items():
            Path(file).write_text(text)
        if mistake.code:
            return Answer(_raised_by(mistake.code), 1)
        done = CliRunner(env=_SETTINGS).invoke(app, mistake.command, prog_name="omni")
        printed = (done.stderr or done.stdout).strip()
        return Answer(printed.replace(f"{Path(name).resolve()}/", ""), done.exit_code)


def _raised_by(code: str) -> str:
    """The last line of a program's traceback."""
    try:
        exec(code, {})
    except Exception as error:
        return "".join(traceback.format_exception_only(error)).strip()
    return ""


def page() -> str:
    """The page, every mistake made."""
    lines = [_HEAD]
    for title, group in MISTAKES.items():
        lines.append(f"## {title}\n")
        for mistake in group:
            answer = answer_to(mistake)
            status = f", exit status {answer.status}" if mistake.command else ""
            lines.append(f"**{mistake.what}**: `{_inline(mistake.wrong)}`{status}\n")
            lines.append(f"```text\n{answer.text}\n```\n")
    return "\n".join(lines)


def _inline(text: str) -> str:
    return " ⏎ ".join(line.strip() for line in text.splitlines())


def main() -> None:
    """Write the page, or print it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--print", action="store_true", help="show it and leave the file alone")
    if parser.parse_args().print:
        print(page())
    else:
        PAGE.write_text(page(), "utf-8")


if __name__ == "__main__":
    main()
