"""A run of an engine in which one step is interrupted somewhere, and what became of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine import FinishReason, LLMEngine, RequestOutput
from engine.interface.engine import EngineBrokenError
from prefix_cache import IntegrityError
from tests.support.line_faults import LineFault
from tests.support.request_stream import Alone, Ask, assert_same

__all__ = ["Outcome", "disturbed_run", "lines_of_step"]

MAX_STEPS = 400


@dataclass(frozen=True)
class Outcome:
    """What became of a run.

    Attributes:
        kind: ``went on`` (every request ended as if nothing had happened), ``failed alone`` (some
            ended with an error that says so, all others as if nothing had happened), ``said
            broken`` (the engine refuses to go on); or what must not be: ``wrong``, ``broken``,
            ``hangs``.
        place: where the fault was raised.
        detail: what was seen.
    """

    kind: str
    place: str | None
    detail: str = ""


def start(engine: LLMEngine, asks: Sequence[Ask]) -> None:
    for number, ask in enumerate(asks):
        engine.add_request(
            f"r{number}", ask.prompt, ask.params, priority=ask.priority, cache_salt=ask.salt
        )


def lines_of_step(
    build: Callable[[], LLMEngine], asks: Sequence[Ask], *, bytecodes: bool = False
) -> list[int]:
    """Lines, or bytecodes, of every step of an undisturbed run."""
    engine = build()
    start(engine, asks)
    counts = []
    while engine.has_unfinished_requests:
        with LineFault(-1, bytecodes=bytecodes) as counted:
            engine.step()
        counts.append(counted.num_events)
    return counts


def disturbed_run(
    engine: LLMEngine,
    asks: Sequence[Ask],
    alone: Alone,
    *,
    step: int,
    fault: LineFault,
) -> Outcome:
    """Interrupt one step, go on, then ask everything again, and compare with each alone.

    Args:
        engine: idle, and consistent.
        asks: the requests.
        alone: their answers.
        step: which step is interrupted.
        fault: where, and by what.
    """
    done: dict[str, RequestOutput] = {}

    def take(outputs: Sequence[RequestOutput]) -> None:
        done.update({output.request_id: output for output in outputs if output.finished})

    try:
        start(engine, asks)
        for number in range(MAX_STEPS):
            if not engine.has_unfinished_requests:
                break
            if number == step:
                try:
                    with fault:
                        take(engine.step())
                except BaseException:
                    if fault.place is None:
                        raise
            else:
                take(engine.step())
        else:
            return Outcome("hangs", fault.place)
        engine.check_integrity()
        kind = "went on"
        for number, ask in enumerate(asks):
            output = done.get(f"r{number}")
            if output is None:
                return Outcome("wrong", fault.place, f"r{number} is lost")
            if output.outputs[0].finish_reason is FinishReason.ERROR or output.error is not None:
                kind = "failed alone"
                continue
            assert_same(output, alone.answer(ask), alone.atol)
        for ask in asks:
            again = engine.generate(ask.prompt, ask.params)[0]
            assert again.error is None, again.error
            assert_same(again, alone.answer(ask), alone.atol)
        engine.check_integrity()
    except EngineBrokenError:
        return Outcome("said broken", fault.place)
    except AssertionError as error:
        return Outcome("wrong", fault.place, str(error)[:300])
    except IntegrityError as error:
        return Outcome("broken", fault.place, f"integrity: {error}"[:300])
    except Exception as error:
        return Outcome("broken", fault.place, f"{type(error).__name__}: {error}"[:300])
    return Outcome(kind, fault.place)
