"""Program of the processes that run checkpoints' code: chat templates and tokenizers' patterns.

It reads jobs and writes answers, one line of JSON each. It is run by its path, in isolated Python,
and imports jinja2 or the ``tokenizers`` library, but no package of this project: it starts
quickly and exposes little to a template. Templates see what transformers provides: its filter
``tojson``, ``raise_exception``, ``strftime_now``, loop controls and the tag ``generation``, in
jinja2's sandbox.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

# Folders of the packages, which may lie outside the path of an isolated Python.
sys.path.extend(sys.argv[1:])

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace


class _GenerationTag(Extension):
    """``{% generation %}``, which marks an assistant's text; handled as an ordinary block."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _PlainNamespace(Namespace):
    """A namespace without names that could expose Python's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *given = args
        values = dict(*given, **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        Namespace.__setitem__(self, name, value)


class _PlainDict:
    """A callable replacement for ``dict`` that does not expose the class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _render(job: Mapping[str, Any]) -> dict[str, Any]:
    pieces, num_chars = [], 0
    try:
        for piece in _compile(job["template"]).generate(**job["values"]):
            num_chars += len(piece)
            if num_chars > job["chars"]:
                return {"beyond": "characters"}
            pieces.append(piece)
        return {"text": "".join(pieces)}
    except MemoryError:
        return {"beyond": "memory"}
    except Exception as error:  # a template is a program by the checkpoint's author
        message = str(error) or type(error).__name__
        return {"error": message[:2000], "refused": isinstance(error, TemplateError)}


def main() -> None:
    """Answer jobs until the input ends."""
    # The requesting process handles the terminal's interrupt.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    tokenizer: Any = None
    for line in sys.stdin.buffer:
        job = json.loads(line)
        if "tokenizer" in job:  # the first line; all others are texts to tokenize
            from tokenizers import Tokenizer

            tokenizer = Tokenizer.from_str(job["tokenizer"])
            tokenizer.encode_special_tokens = job["splits_special_tokens"]
            continue
        if "bytes" in job:
            _limit_memory(job["bytes"])
        started = time.process_time()
        # Its signal kills this process at any point; the requesting process detects that.
        _limit_time(job["seconds"])
        answer = _render(job) if tokenizer is None else _tokenize(tokenizer, job)
        _limit_time(0.0)
        answer["seconds"] = time.process_time() - started
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()


def _tokenize(tokenizer: Any, job: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return {"ids": tokenizer.encode(job["text"], add_special_tokens=job["adds_special"]).ids}
    except BaseException as error:  # the library's panics are not Exceptions
        return {"error": (str(error) or type(error).__name__)[:2000]}


def _limit_memory(num_bytes: int) -> None:
    try:
        import resource
    except ImportError:  # on Windows
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard != resource.RLIM_INFINITY:
        num_bytes = min(num_bytes, hard)
    resource.setrlimit(resource.RLIMIT_AS, (num_bytes, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _limit_time(seconds: float) -> None:
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)


@lru_cache(maxsize=8)
def _compile(template: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "dict": _PlainDict(),
        "namespace": _PlainNamespace,
    }
    return environment.from_string(template)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace must not have the name {name!r}: it begins with '_'")


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


if __name__ == "__main__":
    main()
