"""Spoilt checkpoints are refused by file and key, before anything is made of them.

A part of what ``torture/hostile_checkpoints.py`` and ``torture/config_fuzz.py`` try in processes
of their own.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.models.model_loader import open_checkpoint
from tests.support.config_changes import config_changes
from tests.support.hostile_checkpoints import Hostile, hostile_checkpoints
from tests.support.model_trial import TRIALS

CASES = list(hostile_checkpoints())
# Each way once, in a family that changes from one to the next; the vocoder's voices all.
WAYS: dict[str, list[Hostile]] = {}
for case in CASES:
    WAYS.setdefault(case.what, []).append(case)
CHOSEN = [ways[number % len(ways)] for number, ways in enumerate(WAYS.values())]


def test_there_are_enough_of_them_and_no_two_alike():
    assert len(CASES) > 600
    assert len({(case.family, case.what) for case in CASES}) == len(CASES)
    assert {case.family for case in CASES} == set(TRIALS)


@pytest.mark.parametrize("case", CHOSEN, ids=lambda case: f"{case.family}: {case.what}")
def test_a_spoilt_checkpoint_is_refused_by_name_or_is_none(
    case: Hostile, seeded: Callable[[str], str], tmp_path: Path
):
    trial, folder = TRIALS[case.family], tmp_path / "checkpoint"
    shutil.copytree(seeded(trial.seeded), folder)
    case.spoil(folder)
    try:
        told = trial.run(folder)
    except ValueError as error:
        told = str(error)
        assert str(folder) in told
    assert not case.names or told is not None, "it loaded and answered"
    assert [name for name in case.names if name not in (told or "")] == [], told


@pytest.mark.parametrize("family", [name for name in TRIALS if name not in ("talker", "code2wav")])
def test_a_changed_config_opens_or_is_refused_by_name(
    family: str, seeded: Callable[[str], str], tmp_path: Path
):
    trial, folder = TRIALS[family], tmp_path / "checkpoint"
    shutil.copytree(seeded(trial.seeded), folder)
    changes = list(config_changes(json.loads((folder / "config.json").read_text())))
    refused = 0
    for change in random.Random(0).sample(changes, 30):
        (folder / "config.json").write_text(change.text)
        try:
            open_checkpoint(folder, part=trial.part)
        except ValueError as error:
            assert str(folder) in str(error), change.what
            refused += 1
    assert refused > 5


KEYS: list[tuple[str, str, Any]] = [
    ("qwen2", "hidden_size", 0),
    ("qwen2", "hidden_size", -64),
    ("qwen2", "num_attention_heads", 0),
    ("qwen2", "vocab_size", 10**18),
    ("qwen2", "rms_norm_eps", -1.0),
    ("qwen2", "hidden_act", "evil"),
    ("qwen2", "num_hidden_layers", 10**9),
    ("gemma2", "query_pre_attn_scalar", 0),
    ("gemma2", "final_logit_softcapping", -1.0),
    ("mistral-sliding", "sliding_window", 0),
    ("jamba", "mamba_d_conv", -3),
    ("jamba", "mamba_d_state", 0),
    ("t5", "relative_attention_num_buckets", 0),
    ("whisper", "max_source_positions", 0),
    ("bert", "num_attention_heads", 0),
]


@pytest.mark.parametrize(("name", "key", "value"), KEYS)
def test_values_that_cannot_be_are_refused_by_their_keys(
    name: str, key: str, value: Any, seeded: Callable[[str], str], tmp_path: Path
):
    folder = tmp_path / "checkpoint"
    shutil.copytree(seeded(name), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {key: value}))
    with pytest.raises(ValueError, match=rf"checkpoint/config\.json.*\b{key}\b") as raised:
        open_checkpoint(folder)
    assert str(value) in str(raised.value)


def test_the_part_of_a_config_is_named(seeded: Callable[[str], str], tmp_path: Path):
    folder = tmp_path / "checkpoint"
    shutil.copytree(seeded("llava"), folder)
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"]["patch_size"] = 0
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"vision_config\.patch_size must be an integer of 1 to"):
        open_checkpoint(folder)
