"""Which tests start programs, and wait for them: ``make test-programs`` runs those."""

from __future__ import annotations

import ast
from collections.abc import Mapping

import pytest
from _pytest.mark.expression import Expression

__all__ = ["FILES", "leaves_out_programs", "marks_programs", "needs_cluster"]

FILES: Mapping[str, str] = {
    "omni/commands/test_cli_processes.py": "commands whose stages run in processes, some of which "
    "are killed, and what such commands leave behind",
    "omni/commands/test_cli_ray.py": "commands that start Ray clusters of their own",
    "omni/runtime/test_chaos.py": "workers that are killed and disturbed over and over",
    "omni/runtime/test_processes.py": "pipelines whose workers are killed and started anew",
    "stages/remote/test_worker_process.py": "workers that are killed, hang and end in every way",
    "test_readme.py": "a command that joins a Ray cluster, among others that stay unmarked",
}
"""The files of ``tests`` that may mark tests ``programs``, and what takes the time in them.

Beside these, whatever needs the cluster of the run is marked by itself: see :func:`needs_cluster`.
Whoever adds a file takes its tests out of ``make test``, and says here why they cannot stay.
"""


def marks_programs(source: str) -> bool:
    """Whether a file's source mentions ``pytest.mark.programs``."""
    return any(
        isinstance(node, ast.Attribute)
        and ast.unparse(node).removeprefix("pytest.") == "mark.programs"
        for node in ast.walk(ast.parse(source))
    )


def leaves_out_programs(markexpr: str) -> bool:
    """Whether an expression of marks leaves tests out because they are marked ``programs``."""
    if not markexpr:
        return False
    chosen = Expression.compile(markexpr)
    without = chosen.evaluate(lambda name, **_: False)
    return without and not chosen.evaluate(lambda name, **_: name == "programs")


def needs_cluster(item: pytest.Item) -> bool:
    """Whether a test asks for the run's Ray cluster, or has ``ray`` for where its stages run."""
    if not isinstance(item, pytest.Function):
        return False
    callspec = getattr(item, "callspec", None)
    params = () if callspec is None else callspec.params.values()
    words = [word for each in params for word in (each if isinstance(each, tuple) else (each,))]
    return "ray_cluster" in item.fixturenames or any(
        isinstance(word, str) and word == "ray" for word in words
    )
