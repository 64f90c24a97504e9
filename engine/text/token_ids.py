"""Makes token ids of a text, in bounded time whatever a checkpoint's tokenizer is like."""

from __future__ import annotations

import json
import signal
import sys
from importlib.util import find_spec
from pathlib import Path
from weakref import WeakKeyDictionary

from transformers import PreTrainedTokenizerBase

from engine.text.job_processes import JobProcess, JobProcesses
from engine.text.tokenizer import doubtful_patterns, encodes_as_the_library, tokenizers_turn

__all__ = ["token_ids"]

_WORKER = Path(__file__).with_name("tokenizer_worker.py")


def token_ids(
    tokenizer: PreTrainedTokenizerBase, text: str, *, add_special_tokens: bool, seconds: float
) -> list[int]:
    """Tokenize a text.

    Where the tokenizer cuts it by patterns that are not known to be harmless, that happens in a
    process of its own, which can be stopped.

    Args:
        tokenizer: of the checkpoint.
        text: what to tokenize.
        add_special_tokens: whether to add those that the tokenizer begins and ends a text with.
        seconds: of CPU time that such a process may take.

    Raises:
        ValueError: the tokenizer cannot take it, or took longer.
    """
    processes = _processes_of(tokenizer)
    if processes is not None:
        return processes.token_ids(text, add_special_tokens, seconds)
    with tokenizers_turn(tokenizer):
        # Not verbose: it would warn of what is too long, which the caller cuts or refuses.
        ids: list[int] = tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)[
            "input_ids"
        ]
    return ids


class _TokenizerProcesses(JobProcesses):
    """Tokenizes by one tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, patterns: tuple[str, ...]) -> None:
        super().__init__()
        self._pattern = patterns[0][:80]
        first = {
            "tokenizer": tokenizer.backend_tokenizer.to_str(),
            "splits_special_tokens": tokenizer.split_special_tokens,
        }
        self._first = json.dumps(first).encode() + b"\n"

    def start(self) -> JobProcess:
        """See :meth:`JobProcesses.start`."""
        library = find_spec("tokenizers")
        assert library is not None and library.origin is not None, "it has loaded the tokenizer"
        package = str(Path(library.origin).parents[1])
        process = JobProcess([sys.executable, "-I", str(_WORKER), package])
        process.send(self._first)
        return process

    def token_ids(self, text: str, adds_special: bool, seconds: float) -> list[int]:
        """See :func:`token_ids`."""
        job = {"text": text, "adds_special": adds_special, "seconds": seconds}
        answer = self.ask(json.dumps(job).encode() + b"\n", seconds)
        if isinstance(answer, dict) and "ids" in answer:
            ids: list[int] = answer["ids"]
            return ids
        if isinstance(answer, dict):
            raise ValueError(f"the checkpoint's tokenizer cannot take this: {answer['error']}")
        if hasattr(signal, "SIGPROF") and answer == -signal.SIGPROF:
            raise ValueError(
                f"the checkpoint's tokenizer took more than {seconds:.3g} s of CPU time for "
                f"{len(text)} characters, which it cuts by patterns such as {self._pattern!r}; if "
                "it is to be trusted, raise engine.limits.tokenizer_seconds"
            )
        raise ValueError(
            f"the process of the checkpoint's tokenizer ended with status {answer} over "
            f"{len(text)} characters"
        )


_PROCESSES: WeakKeyDictionary[PreTrainedTokenizerBase, _TokenizerProcesses | None] = (
    WeakKeyDictionary()
)


def _processes_of(tokenizer: PreTrainedTokenizerBase) -> _TokenizerProcesses | None:
    """None for a tokenizer that is harmless.

    One whose class does more than the library is, or is trusted, as it was loaded.
    """
    if tokenizer not in _PROCESSES:
        may_be_sent = encodes_as_the_library(tokenizer)
        patterns = doubtful_patterns(tokenizer) if may_be_sent else ()
        made = _TokenizerProcesses(tokenizer, patterns) if patterns else None
        # Another thread may have been first; its processes are then the ones.
        _PROCESSES.setdefault(tokenizer, made)
    return _PROCESSES[tokenizer]
