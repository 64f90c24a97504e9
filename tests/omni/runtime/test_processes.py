"""The same pipelines in separate processes: the same outputs, whatever dies, nothing left."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from omni import Omni, OmniOutput, OmniRequest, verify
from omni.pipelines.pipeline_config import PipelineConfig
from tests.support.patience import PATIENCE_S, wait_for
from tests.support.remote_stages import kill_workers, pids_of
from tests.support.same_outputs import assert_same, last_outputs, streamed
from tests.support.settled_stages import check_integrity

PROMPTS = ["A quick brown fox", "A quick brown dog", "A quick brown fox jumps", "Hello"]
DRAWN = [
    PROMPTS[0],
    *(OmniRequest(each, sampling={"writer": {"temperature": 1.0}}) for each in PROMPTS[:2]),
    OmniRequest(PROMPTS[3], sampling={"writer": {"logit_bias": {5: 100, 6: 99.5, 7: -100.0}}}),
]
SPOKEN = ["hello there", "what is it"]


@contextmanager
def in_processes(config: Any, **options: Any) -> Iterator[Omni]:
    """Start an Omni whose workers are gone when it is closed."""
    with Omni(config, runtime="processes", **options) as omni:
        pids = [pid for name in omni.pipeline.stages for pid in pids_of(omni, name)]
        assert len(set(pids)) == len(pids)
        yield omni
        pids += [pid for name in omni.pipeline.stages for pid in pids_of(omni, name)]
    wait_for(lambda: not any(is_alive(pid) for pid in pids))


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.fixture(scope="module")
def texts() -> list[OmniOutput]:
    with Omni("two_step") as omni:
        return omni.generate(PROMPTS)


@pytest.fixture(scope="module")
def drawn() -> list[OmniOutput]:
    with Omni("two_step", overrides={"stages.writer.engine.seed": 7}) as omni:
        return omni.generate(DRAWN)


@pytest.fixture(scope="module")
def speeches() -> list[OmniOutput]:
    with Omni("omni_speech") as omni:
        return omni.generate(SPOKEN)


@pytest.fixture(scope="module")
def shared_speaker() -> Iterator[Omni]:
    """One start of its workers serves many tests, whatever these do to them."""
    with in_processes("omni_speech") as omni:
        yield omni


@pytest.fixture
def speaker(shared_speaker: Omni) -> Omni:
    """A pipeline that speaks, whose workers are up and have empty caches."""
    with shared_speaker.paused() as pipeline:
        for stage in pipeline.stages.values():
            stage.reset_prefix_cache()
    return shared_speaker


def test_text_is_that_of_one_process_and_prefixes_hit(
    texts: list[OmniOutput], drawn: list[OmniOutput]
) -> None:
    with in_processes("two_step", overrides={"stages.writer.engine.seed": 7}) as omni:
        # First, and without explicit seeds: the engine assigns them one by one.
        assert_same(omni.generate(DRAWN), drawn)
        assert_same(omni.generate(PROMPTS), texts)
        assert_same(omni.generate(PROMPTS), texts)
        assert omni.stats()["reader"].cached_tokens > 0
        assert not omni.pipeline.stages["writer"].has_unfinished_requests
        check_integrity(omni)


def test_streamed_speech_is_that_of_one_process(speaker: Omni, speeches: list[OmniOutput]) -> None:
    assert_same(streamed(speaker, SPOKEN), speeches)


def test_nothing_is_left_when_it_is_closed() -> None:
    def run() -> int:
        with in_processes("two_step") as omni:
            kill_workers(omni, "writer")
            omni.generate(PROMPTS)
        return len(os.listdir("/proc/self/fd"))

    shared = os.listdir("/dev/shm")
    first = run()  # the process that workers are forked from stays
    wait_for(lambda: run() <= first)
    assert os.listdir("/dev/shm") == shared


def test_a_temporary_driver_of_the_stages_is_no_longer_notified() -> None:
    """The driver would sleep until a worker counts as dead."""
    config = PipelineConfig.load("two_step", {"runtime.stall_timeout_s": 1e6})
    with in_processes(config) as omni:
        assert verify(omni, PROMPTS[:1]).equal
        again: list[OmniOutput] = []
        waiting = threading.Thread(target=lambda: again.extend(omni.generate(PROMPTS)), daemon=True)
        waiting.start()
        waiting.join(PATIENCE_S)
        assert len(again) == len(PROMPTS)


@pytest.mark.parametrize("victim", ["thinker", "talker", "code2wav"])
@pytest.mark.parametrize("after", [0, 3])
def test_killing_a_busy_worker_changes_no_output(
    victim: str, after: int, speaker: Omni, speeches: list[OmniOutput]
) -> None:
    before = speaker.stats()["thinker"].generated_tokens
    found = last_outputs(speaker, SPOKEN, after, lambda: kill_workers(speaker, victim))
    assert_same(found, speeches)
    assert_same(speaker.generate(SPOKEN), speeches)
    reported = sum(len(each.stages["thinker"].token_ids) for each in speeches)
    counted = speaker.stats()["thinker"].generated_tokens - before
    assert counted >= 2 * reported, "what died had counted, too"


def test_replicas_share_the_requests(texts: list[OmniOutput]) -> None:
    overrides = {"stages.writer.placement.replicas": 2, "runtime.kind": "processes"}
    config = PipelineConfig.load("two_step", overrides)
    with in_processes(config) as omni:
        assert len(pids_of(omni, "writer")) == 2
        assert_same(omni.generate(PROMPTS), texts)
        for pid in pids_of(omni, "writer")[:1]:
            os.kill(pid, signal.SIGKILL)
        assert_same(omni.generate(PROMPTS), texts)


def test_stages_that_share_a_worker_answer_as_those_of_one_process_whatever_dies(
    texts: list[OmniOutput],
) -> None:
    with Omni("two_step", apart=True) as omni:
        (first,) = {*pids_of(omni, "writer"), *pids_of(omni, "reader")}
        assert first != os.getpid()
        assert_same(omni.generate(PROMPTS), texts)
        hits = omni.generate(PROMPTS)
        assert_same(hits, texts)
        assert hits[0].stages["reader"].num_cached_tokens > 0
        assert verify(omni, PROMPTS).equal
        assert_same(last_outputs(omni, PROMPTS, 3, lambda: kill_workers(omni, "writer")), texts)
        (second,) = {*pids_of(omni, "writer"), *pids_of(omni, "reader")}
        assert second != first
        for name in ("writer", "reader"):
            (state,) = omni.worker_states()[name]
            assert (state.num_restarts, state.last_end) == (1, "was killed by SIGKILL")
    wait_for(lambda: not is_alive(first) and not is_alive(second))


def test_speech_from_a_shared_worker_that_is_killed_is_that_of_one_process(
    speeches: list[OmniOutput],
) -> None:
    """The talker streams to code2wav within the worker; the thinker has a separate one."""
    shared = {f"stages.{name}.placement.worker": "voice" for name in ("talker", "code2wav")}
    config = PipelineConfig.load("omni_speech", shared | {"runtime.kind": "processes"})
    with Omni(config) as omni:
        (voice,) = pids_of(omni, "talker")
        assert pids_of(omni, "code2wav") == [voice] != pids_of(omni, "thinker")
        assert_same(streamed(omni, SPOKEN), speeches)
        assert_same(last_outputs(omni, SPOKEN, 3, lambda: kill_workers(omni, "talker")), speeches)
