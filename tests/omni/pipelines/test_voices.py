"""Names of voices: a pipeline's own, those of its YAML, and OpenAI's."""

from __future__ import annotations

import re
from pathlib import Path
from unittest.mock import patch

import pytest
from typer.testing import CliRunner

import stage_configs
from omni import Omni, Pipeline
from omni.commands.cli import app
from omni.pipelines.pipeline_config import PipelineConfig
from omni.pipelines.voices import Voices
from tests.support.speech_pipeline import speech_stages

VOICES = {"speakers": ("Ada", "Ben")}


def pipeline(**voices: str) -> Pipeline:
    return Pipeline(speech_stages(talker=VOICES, code2wav=VOICES), voices=voices)


def test_stock_names_stand_for_the_voices_in_order() -> None:
    voices = pipeline().voices
    found = [voices.find(name) for name in ("alloy", "ash", "ballad", "cedar", "Ben", None)]
    assert found == ["Ada", "Ben", "Ada", "Ada", "Ben", None]
    assert voices.own == ("Ada", "Ben")
    assert voices.other_names("Ben")[:2] == ["ash", "coral"] and "Ben" not in voices.other_names(
        "Ben"
    )


def test_an_alias_of_the_pipeline_comes_before_a_stock_name() -> None:
    voices = pipeline(alloy="Ben", narrator="Ada").voices
    assert [voices.find(name) for name in ("alloy", "narrator", "ash")] == ["Ben", "Ada", "Ben"]
    with pytest.raises(ValueError, match="'naratar': stage 'talker' .*did you mean 'narrator'"):
        voices.find("naratar")


def test_a_voice_that_is_called_like_a_stock_name_is_itself() -> None:
    own = {"speakers": ("Ada", "alloy")}
    voices = Pipeline(speech_stages(talker=own, code2wav=own)).voices
    assert voices.find("alloy") == "alloy" and voices.find("ash") == "alloy"


@pytest.mark.parametrize(
    ("voices", "message"),
    [
        ({"narrator": "Adda"}, "voices.narrator: 'Adda': stage 'talker' .*did you mean 'Ada'"),
        (
            {"alloy": "Bob"},
            "voices.alloy: 'Bob': stage 'talker' has no such voice; known are 'Ada', 'Ben'$",
        ),
        ({"Ada": "Ben"}, "voices.Ada: is a voice itself"),
    ],
)
def test_an_alias_that_stands_for_nothing_is_refused(voices: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pipeline(**voices)


@pytest.mark.parametrize("runtime", ["inline", "processes"])
def test_an_alias_is_checked_before_models_are_loaded(runtime: str) -> None:
    given = {"voices": {"narrator": "Bob"}, "runtime.kind": runtime}
    config = PipelineConfig.load("omni_speech", given)
    built = "stages.autoregressive.AutoregressiveStageConfig.build_stage"
    with (
        patch(built, side_effect=AssertionError("a stage is built")),
        pytest.raises(ValueError, match="voices.narrator: 'Bob': stage 'talker' has no such voice"),
    ):
        Omni(config)


@pytest.mark.parametrize("command", ["validate", "serve"])
@pytest.mark.usefixtures("checkpoint_cache")
def test_a_wrong_alias_or_speaker_in_a_file_is_refused_by_it(command: str, tmp_path: Path) -> None:
    folder = Path(stage_configs.__file__).parent
    text = (folder / "spoken_sums.yaml").read_text()
    text = text.replace("model: spoken_sums", f"model: {folder}/spoken_sums")
    path = tmp_path / "mine.yaml"
    for wrong, told in (
        ("voices: {alloy: Bob}", "voices.alloy: 'Bob': stage 'talker' has no such voice; known "),
        ("speaker: Bob", "speaker 'Bob': stage 'talker' has no such voice"),
    ):
        path.write_text(re.sub(f"^{wrong.split()[0]}.*", "", text, flags=re.M) + f"\n{wrong}\n")
        result = CliRunner().invoke(app, [command, str(path)])
        assert result.exit_code == 2
        assert result.stderr.startswith(f"error: {path}: {told}")
        assert "serving" not in result.stderr


def test_a_voice_without_a_name_answers_to_stock_names() -> None:
    stages = speech_stages()
    voices = Pipeline(stages).voices
    assert voices.own == () and voices.speaks and voices.find("alloy") is None
    with pytest.raises(ValueError, match="'Ada': the pipeline's voice has no name; leave it out"):
        voices.find("Ada")


def test_what_does_not_speak_has_no_voices() -> None:
    stages = PipelineConfig.load("two_step").stages
    voices = Voices(stages, {}, {})
    assert not voices.speaks and voices.own == ()
    with pytest.raises(ValueError, match="'alloy': none of the stages .'writer', 'reader'. speaks"):
        voices.find("alloy")
