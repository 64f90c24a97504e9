"""Runs chat templates in processes of their own, where they can be stopped."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from engine.text.job_processes import JobProcess, JobProcesses

__all__ = ["TemplateLimitError", "TemplateLimits", "TemplateProcesses", "TemplateRefusalError"]

_WORKER = Path(__file__).with_name("template_worker.py")


@dataclass(frozen=True, slots=True)
class TemplateLimits:
    """What the rendering of one prompt may take.

    Attributes:
        max_chars: of the text that comes out.
        seconds: of CPU time, all tries together.
        num_bytes: of memory, the process's own included.
    """

    max_chars: int = 2**22
    seconds: float = 5.0
    num_bytes: int = 2**29


class TemplateLimitError(ValueError):
    """A template took more than it may; another try would as well."""


class TemplateRefusalError(Exception):
    """A template raised.

    Args:
        message: what it said.
        is_deliberate: whether it refused the messages, rather than stumbled.
    """

    def __init__(self, message: str, is_deliberate: bool) -> None:
        super().__init__(message)
        self.is_deliberate = is_deliberate


class TemplateProcesses(JobProcesses):
    """Renders chat templates."""

    def start(self) -> JobProcess:
        """See :meth:`JobProcesses.start`."""
        jinja = find_spec("jinja2")
        if jinja is None or jinja.origin is None:
            raise ValueError("chat templates need the package jinja2, which is not installed")
        package = str(Path(jinja.origin).parents[1])
        return JobProcess([sys.executable, "-I", str(_WORKER), package])

    def render(
        self, template: str, values: Mapping[str, Any], limits: TemplateLimits
    ) -> tuple[str, float]:
        """Render a template.

        Args:
            template: jinja2's, as transformers has them.
            values: what it sees. What JSON does not know is replaced by the name of its type.
            limits: what it may take.

        Returns:
            The text, and the seconds of CPU time that it took.

        Raises:
            TemplateLimitError: it took more than it may; says of what.
            TemplateRefusalError: the template raised.
            ValueError: the values cannot be written as JSON.
        """
        job = _line(
            {
                "template": template,
                "values": values,
                "chars": limits.max_chars,
                "seconds": limits.seconds,
                "bytes": limits.num_bytes,
            }
        )
        answer = self.ask(job, limits.seconds)
        if isinstance(answer, int):
            raise _ended(answer, limits)
        if "error" in answer:
            raise TemplateRefusalError(answer["error"], answer["refused"])
        if "beyond" in answer:
            raise _beyond(answer["beyond"], limits)
        return answer["text"], answer["seconds"]


def _line(job: Mapping[str, Any]) -> bytes:
    try:
        # What a message carries beside words, templates only ask for.
        text = json.dumps(job, default=lambda each: f"<{type(each).__name__}>")
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"the chat messages are no plain data: {error}") from error
    return text.encode() + b"\n"


def _beyond(limit: str, limits: TemplateLimits) -> TemplateLimitError:
    if limit == "characters":
        return TemplateLimitError(
            f"what the checkpoint's chat template makes of the messages has more than "
            f"{limits.max_chars} characters; shorten them, or raise engine.limits.max_prompt_chars"
        )
    return TemplateLimitError(
        f"the checkpoint's chat template took more than {limits.num_bytes} bytes of memory; if it "
        "is to be trusted, raise engine.limits.template_bytes"
    )


def _ended(status: int, limits: TemplateLimits) -> TemplateLimitError:
    if hasattr(signal, "SIGPROF") and status == -signal.SIGPROF:
        return TemplateLimitError(
            f"the checkpoint's chat template took more than {limits.seconds:.3g} s of CPU time; if "
            "it is to be trusted, raise engine.limits.template_seconds"
        )
    return TemplateLimitError(
        f"the process of the checkpoint's chat template ended with status {status}; "
        "the template may not work, or need more memory: see engine.limits.template_bytes"
    )
