"""A run of an engine with one step interrupted somewhere, and its outcome."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine import Engine
from engine.interface.engine import EngineBrokenError
from prefix_cache import IntegrityError
from tests.support.line_faults import Event, LineFault

MAX_STEPS = 400

Outputs = Mapping[str, Sequence[Any]]
"""All outputs of each request, in order."""


@dataclass(frozen=True)
class Subject:
    """An engine, its requests, and the right outputs.

    Attributes:
        name: name of the kind.
        build: builds the engine.
        add: adds all of the requests, with ids that begin with the given prefix.
        check: raises ``AssertionError`` unless a request's outputs, given the rest of its id, are
            those that it has alone and undisturbed; for requests that did not fail.
        num_asks: number of requests.
    """

    name: str
    build: Callable[[], Engine[Any]]
    add: Callable[[Engine[Any], str], None]
    check: Callable[[int, Sequence[Any]], None]
    num_asks: int


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run.

    Attributes:
        kind: ``went on`` (every request ended as if nothing had happened), ``failed alone`` (some
            ended with an error that says so, all others as if nothing had happened), ``said
            broken`` (the engine refuses to continue); or a failure: ``wrong``, ``silently broken``,
            ``hangs``.
        place: where the fault was raised.
        detail: what was observed.
    """

    kind: str
    place: str | None
    detail: str = ""


class _HangsError(Exception):
    """Requests are live but do not end."""


def warmed_up(subject: Subject) -> Engine[Any]:
    """Return a new engine that has run before, so that its steps use the same paths."""
    engine = subject.build()
    subject.add(engine, "warm-up")
    _run(engine, -1, LineFault(-1))
    engine.reset_prefix_cache()
    return engine


def events_of_steps(subject: Subject, *, bytecodes: bool = False) -> list[list[Event]]:
    """Return the lines or bytecodes of every step, except the first, of an undisturbed run."""
    engine = warmed_up(subject)
    subject.add(engine, "r")
    steps: list[list[Event]] = []
    while engine.has_unfinished_requests:
        with LineFault(-1, bytecodes=bytecodes) as traced:
            engine.step()
        steps.append(traced.events)
    return steps


def disturbed_run(
    engine: Engine[Any], subject: Subject, step: int, fault: LineFault, aborted: int | None = None
) -> Outcome:
    """Interrupt one step, continue, rerun everything, and compare each output with its solo run.

    Args:
        engine: idle and consistent.
        subject: the engine's requests.
        step: number of the interrupted step.
        fault: the line and the error.
        aborted: a request that is aborted after the fault.
    """
    kind = "went on"
    try:
        subject.add(engine, "r")
        first = _run(engine, step, fault, None if aborted is None else f"r{aborted}")
        for number in range(subject.num_asks):
            outputs = first.get(f"r{number}", ())
            if number == aborted and not (outputs and outputs[-1].finished):
                continue
            if not outputs or not outputs[-1].finished:
                return Outcome("wrong", fault.place, f"r{number} is lost")
            if outputs[-1].error is not None:
                kind = "failed alone"
                continue
            subject.check(number, outputs)
        subject.add(engine, "r")  # the same ids: nothing may be left of the earlier requests
        again = _run(engine, -1, fault)
        for number in range(subject.num_asks):
            outputs = again[f"r{number}"]
            assert outputs[-1].error is None, outputs[-1].error
            subject.check(number, outputs)
    except EngineBrokenError:
        return Outcome("said broken", fault.place)
    except _HangsError as error:
        return Outcome("hangs", fault.place, str(error))
    except AssertionError as error:
        return Outcome("wrong", fault.place, str(error)[:300])
    except IntegrityError as error:
        return Outcome("silently broken", fault.place, f"integrity: {error}"[:300])
    except Exception as error:
        return Outcome("silently broken", fault.place, f"{type(error).__name__}: {error}"[:300])
    return Outcome(kind, fault.place)


def _run(engine: Engine[Any], step: int, fault: LineFault, aborted: str | None = None) -> Outputs:
    """Step until all have ended, and check that the engine holds nothing."""
    found: dict[str, list[Any]] = {}
    for number in range(MAX_STEPS):
        if not engine.has_unfinished_requests:
            break
        outputs: Sequence[Any] = ()
        if number == step:
            try:
                with fault:
                    outputs = engine.step()
            except BaseException:
                if fault.place is None:
                    raise
            if aborted is not None:
                engine.abort(aborted)
        else:
            outputs = engine.step()
        for output in outputs:
            found.setdefault(output.request_id, []).append(output)
        engine.check_integrity()
    else:
        raise _HangsError(f"after {MAX_STEPS} steps {engine.live_request_ids} are live")
    stats = engine.stats()
    if stats.kv is not None:
        kv = stats.kv
        if kv.held or kv.free + kv.cached + 1 != kv.num_blocks:
            raise IntegrityError(f"idle, but of {kv.num_blocks} blocks {kv.held} are held: {kv}")
    return found
