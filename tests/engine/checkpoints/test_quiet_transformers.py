"""Nothing of a load shows, and nothing of the hiding stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from huggingface_hub.utils.tqdm import are_progress_bars_disabled
from transformers.utils import logging

from engine import EncoderEngine, EngineConfig
from engine.checkpoints.config_file import hidden_progress_bars
from engine.models.model_loader import open_checkpoint


def test_an_encoder_loads_in_silence(
    bert_checkpoint: str, capfd: pytest.CaptureFixture[str]
) -> None:
    EncoderEngine(EngineConfig(model=bert_checkpoint, num_blocks=8, max_model_len=16)).close()
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("family", ["qwen2_5_omni", "qwen3_omni"])
def test_configs_of_several_parts_open_in_silence(
    seeded: Callable[[str], str], caplog: pytest.LogCaptureFixture, family: str
) -> None:
    open_checkpoint(seeded(family), part="thinker")
    assert caplog.messages == []


def test_bars_are_as_before_when_the_context_ends(capfd: pytest.CaptureFixture[str]) -> None:
    made: list[Any] = []

    def users_own(make: Any, args: Any, kwargs: Any) -> Any:
        made.append(kwargs)
        return make(*args, **kwargs)

    before = logging.is_progress_bar_enabled(), are_progress_bars_disabled()
    previous = logging.set_tqdm_hook(users_own)
    try:
        with pytest.raises(RuntimeError, match="in the middle"), hidden_progress_bars():
            assert list(logging.tqdm(range(3), desc="hidden")) == [0, 1, 2]
            raise RuntimeError("in the middle")
        assert made == []
        list(logging.tqdm(range(3), desc="shown"))
        assert made == [{"desc": "shown"}]
    finally:
        logging.set_tqdm_hook(previous)
    assert (logging.is_progress_bar_enabled(), are_progress_bars_disabled()) == before
    shown = capfd.readouterr().err
    assert "hidden" not in shown
    assert "shown" in shown or not before[0]
