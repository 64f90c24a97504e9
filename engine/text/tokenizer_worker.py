"""The program of a process that tokenizes by patterns that need not end: texts in, ids out.

It is run by its path, with Python isolated, and imports the ``tokenizers`` library and no package
of this project. The first line that it reads is the tokenizer, each further one a job.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Mapping
from typing import Any

# Where the library is, if not where an isolated Python looks.
sys.path.extend(sys.argv[1:])

from tokenizers import Tokenizer

__all__ = ["main"]


def main() -> None:
    """Answer jobs until there are no more."""
    if hasattr(signal, "SIGINT"):
        # The terminal's interrupt is for the process that asks.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    lines = iter(sys.stdin.buffer)
    first = json.loads(next(lines))
    tokenizer = Tokenizer.from_str(first["tokenizer"])
    tokenizer.encode_special_tokens = first["splits_special_tokens"]
    for line in lines:
        job = json.loads(line)
        # Its signal ends this process, wherever it is; the one that asks takes note.
        _limit_time(job["seconds"])
        answer = _answer(tokenizer, job)
        _limit_time(0.0)
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()


def _answer(tokenizer: Tokenizer, job: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return {"ids": tokenizer.encode(job["text"], add_special_tokens=job["adds_special"]).ids}
    except BaseException as error:  # the library's panics are no Exception
        return {"error": (str(error) or type(error).__name__)[:2000]}


def _limit_time(seconds: float) -> None:
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)


if __name__ == "__main__":
    main()
