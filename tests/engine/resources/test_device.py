"""An engine runs its model with its device as the current one: Triton launches kernels there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from engine.resources.device import _warn_of_slow, on_device, resolve_dtype
from tests.support.three_engines import KINDS, build_engine


def test_a_cuda_device_is_current_inside_and_a_cpu_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
):
    current = [0]

    def exchange(index: int) -> int:
        current.append(index)
        return current[-2]

    monkeypatch.setattr(torch.cuda, "_exchange_device", exchange)
    monkeypatch.setattr(torch.cuda, "_maybe_exchange_device", exchange)
    with on_device(torch.device("cuda:1")):
        assert current == [0, 1]
    assert current == [0, 1, 0]
    with on_device(torch.device("cpu", 0)):
        assert current == [0, 1, 0]


@pytest.mark.parametrize("has", [False, True])
def test_a_half_type_on_a_cpu_without_its_instructions_warns_once(
    has: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    cpu = torch.device("cpu")
    capabilities = {"avx512_bf16": has, "amx_bf16": False, "avx512_f": True}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    _warn_of_slow.cache_clear()
    assert resolve_dtype("auto", torch.bfloat16, cpu) is torch.float32
    assert resolve_dtype("float32", torch.bfloat16, cpu) is torch.float32
    assert not caplog.records
    for _ in range(2):
        assert resolve_dtype("bfloat16", torch.float32, cpu) is torch.bfloat16
    assert [each.levelname for each in caplog.records] == [] if has else ["WARNING"]
    _warn_of_slow.cache_clear()


@pytest.mark.parametrize("kind", KINDS)
def test_every_model_runs_inside_its_device(
    kind: str,
    seeded: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
):
    entered: list[torch.device] = []
    runs: list[bool] = []

    @contextmanager
    def recorded(device: torch.device) -> Iterator[None]:
        entered.append(device)
        yield
        entered.pop()

    for user in (
        "engine.execution.model_runner",
        "engine.encoder.encoder_engine",
        "engine.encoder.sentence_layout",
        "engine.generator.generator_engine",
    ):
        monkeypatch.setattr(f"{user}.on_device", recorded)
    engine, prompt = build_engine(kind, seeded)
    engine.add_request("r", prompt)
    with register_module_forward_pre_hook(lambda *_: runs.append(bool(entered))):
        while engine.has_unfinished_requests:
            assert all(output.error is None for output in engine.step())
    assert runs
    assert all(runs)
    assert entered == []
