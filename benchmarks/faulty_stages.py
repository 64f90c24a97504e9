"""Stage kinds whose steps raise on request from another process, for ``benchmarks.chaos``."""

from __future__ import annotations

import ctypes
import os
import socket
import threading
from typing import Any, Literal, NoReturn

from omni.pipelines.pipeline_config import PipelineConfig
from stages import Stage, StageOutput
from stages.autoregressive import AutoregressiveStageConfig
from stages.generator import GeneratorStageConfig
from stages.stage_config import StageConfig, register_stage_kind

_raise_in: Any = ctypes.pythonapi.PyThreadState_SetAsyncExc


_RAISE, _RUIN = b"raise", b"ruin"


class InjectedError(Exception):
    """Exception that no stage expects."""


def throw(pid: int, *, ruins: bool = False) -> None:
    """Make a step raise: the current one at its current line, or else the next one.

    Args:
        pid: id of a process on this machine that has built a faulty stage.
        ruins: if true, the next step raises, and afterwards the stage can neither abort requests
            nor be rebuilt.

    Raises:
        ProcessLookupError: there is no such process, or it is not ready yet.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        try:
            sock.sendto(_RUIN if ruins else _RAISE, _address(pid))
        except ConnectionRefusedError as error:
            raise ProcessLookupError(f"no faulty stage listens in process {pid}") from error


def _address(pid: int) -> str:
    """Return the name of an abstract Linux socket, which leaves no file. Signals are unsuitable:
    Python handles them only in the main thread, which in an actor belongs to Ray."""
    return f"\0omni-faulty-stage-{pid}"


class _Breaker:
    """Wraps a stage's steps to raise on request.

    Args:
        stage: its ``step`` is replaced.
    """

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._step = stage.step
        self._lock = threading.Lock()
        self._inside: int | None = None
        self._is_due = self._is_ruined = False
        stage.step = self.step  # type: ignore[method-assign]
        threading.Thread(target=self._listen, name="faults", daemon=True).start()

    def _listen(self) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.bind(_address(os.getpid()))
            while what := sock.recv(16):
                self._handle(what)

    def _handle(self, what: bytes) -> None:
        with self._lock:
            self._is_ruined |= what == _RUIN
            if self._inside is None or self._is_ruined:
                self._is_due = True
            else:
                _raise_in(ctypes.c_ulong(self._inside), ctypes.py_object(InjectedError))

    def step(self) -> list[StageOutput]:
        with self._lock:
            is_due, self._is_due = self._is_due, False
            self._inside = None if is_due else threading.get_ident()
        if is_due:
            if self._is_ruined:
                self._ruin()
            raise InjectedError("before a step")
        try:
            return self._step()
        finally:
            with self._lock:  # cancel an exception that arrives too late
                _raise_in(ctypes.c_ulong(threading.get_ident()), None)
                self._inside = None

    def _ruin(self) -> None:
        def fail(*_: object) -> NoReturn:
            raise InjectedError("it is ruined")

        for method in ("step", "abort", "rebuild"):
            setattr(self._stage, method, fail)


@register_stage_kind
class FaultyAutoregressiveConfig(AutoregressiveStageConfig):
    kind: Literal["faulty_autoregressive"]  # type: ignore[assignment]

    def build_stage(self, name: str) -> Any:
        stage = super().build_stage(name)
        _Breaker(stage)
        return stage


@register_stage_kind
class FaultyGeneratorConfig(GeneratorStageConfig):
    kind: Literal["faulty_generator"]  # type: ignore[assignment]

    def build_stage(self, name: str) -> Any:
        stage = super().build_stage(name)
        _Breaker(stage)
        return stage


_KINDS: dict[str, type[StageConfig]] = {
    "autoregressive": FaultyAutoregressiveConfig,
    "generator": FaultyGeneratorConfig,
}


def faulty(config: PipelineConfig) -> PipelineConfig:
    """Return the pipeline with stages whose steps raise on request.

    Raises:
        KeyError: there is no faulty version of a stage's kind.
    """
    stages = {
        name: _KINDS[stage.kind].model_validate(dict(stage) | {"kind": f"faulty_{stage.kind}"})
        for name, stage in config.stages.items()
    }
    return config.model_copy(update={"stages": stages})
