"""Two stages whose node is lost, of which one has no place on any other one."""

from __future__ import annotations

import threading
from typing import Any
from unittest.mock import patch

from omni import Omni, OmniRequest
from stages.remote import supervisor
from tests.support.patience import PATIENCE_S, wait_for

__all__ = ["lose_together"]

_SPECIAL = {"num_cpus": 2, "resources": {"special": 1}, "object_store_memory": 100 * 2**20}
_PLACES = {
    "stages.writer.placement.num_cpus": 1,
    "stages.reader.placement.num_cpus": 1,
    "stages.reader.placement.resources": {"special": 1},
    "stages.writer.sampling.max_tokens": 900,
    "stages.writer.sampling.ignore_eos": True,
    "stages.writer.engine.max_model_len": 1000,
    "runtime.kind": "ray",
}


def lose_together(cluster: Any) -> None:
    """Lose them while one has requests, which end, and say what there is no place for."""
    node = cluster.add_node(**_SPECIAL)
    told: list[str | None] = []
    with Omni("two_step", overrides=_PLACES | {"runtime.address": cluster.address}) as omni:

        def ask() -> None:
            for output in omni.stream([OmniRequest(f"{number} times") for number in range(32)]):
                has_begun.set()
                if output.finished:
                    told.append(output.error)

        has_begun = threading.Event()
        thread = threading.Thread(target=ask)
        thread.start()
        assert has_begun.wait(PATIENCE_S)
        with patch.object(supervisor, "_FIRST_DELAY_S", 0.01):
            cluster.remove_node(node)
            thread.join(PATIENCE_S)
            wait_for(lambda: all(_state(omni, name) == "waiting" for name in ("writer", "reader")))
        (later,) = omni.generate(["hello"])
        told.append(later.error)
    for error in told:
        assert error is not None and "special" in error, told
    assert "stage 'reader' was lost with it" in str(told[0]), told


def _state(omni: Omni, stage: str) -> str:
    (worker,) = omni.worker_states()[stage]
    return worker.state
