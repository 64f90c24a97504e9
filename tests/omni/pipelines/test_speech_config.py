"""The YAML schema of pipelines that speak: parts, generators, streams; mistakes are named."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from typer.testing import CliRunner

import stage_configs
from engine import ChatPrompt, EngineConfig, TokensPrompt
from engine.interface.config import GenerationParams, GeneratorConfig
from omni import Omni, Pipeline
from omni.commands.cli import app
from omni.pipelines.config_file import ConfigError, parse_overrides
from omni.pipelines.pipeline_config import PipelineConfig
from omni.pipelines.voices import RecordedVoice, Voices, speak_like
from stages import AutoregressiveStageConfig, GeneratorStageConfig
from tests.support.speech_pipeline import speech_stages
from tests.support.tables import rows

SPEECH = """\
name: speech
stages:
  thinker: {kind: autoregressive, model: nobody/thinker, final_output: text}
  talker:
    kind: autoregressive
    model: seeded:qwen2
    part: talker
    inputs: {from: thinker, transform: thinker_to_talker, chunk_size: 4}
  code2wav:
    kind: generator
    model: seeded:qwen2
    generation: {num_steps: 3}
    inputs: {from: talker, transform: talker_to_code2wav, chunk_size: 8, max_pending_chunks: 3}
    final_output: audio
"""


def load(folder: Path, overrides: dict[str, Any]) -> PipelineConfig:
    path = folder / "mine.yaml"
    path.write_text(SPEECH, encoding="utf-8")
    return PipelineConfig.load(path, overrides)


def test_a_generators_settings_parts_and_streams_reach_their_stages(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text("{}")
    models = {f"stages.{name}.model": "./checkpoint" for name in ("talker", "code2wav")}
    config = load(tmp_path, models | {"speaker": "Ethan", "stages.code2wav.part": "code2wav"})
    thinker, talker, code2wav = config.stages.values()
    assert config.speaker == "Ethan"
    assert thinker.inputs is None
    assert (talker.inputs.chunk_size, talker.inputs.max_pending_chunks) == (4, 2)
    assert (code2wav.inputs.chunk_size, code2wav.inputs.max_pending_chunks) == (8, 3)
    assert isinstance(talker, AutoregressiveStageConfig)
    assert isinstance(code2wav, GeneratorStageConfig)
    assert talker.engine_config() == EngineConfig(model=str(checkpoint), part="talker")
    assert code2wav.generator_config() == GeneratorConfig(
        model=str(checkpoint), part="code2wav", generation=GenerationParams(num_steps=3)
    )
    assert code2wav.final_output == ("audio",)


STREAMS = rows("""
code2wav.inputs.from=[talker, thinker] | code2wav.inputs.chunk_size: is for one source, got 2 | out
code2wav.inputs={from: [talker, thinker], transform: talker_to_code2wav} | takes 1 source(s), got |
talker.inputs.transform=text_as_prompt | needs a transform that works chunk by | 'text_as_prompt'
talker.part=null & talker.model=seeded:qwen2 | 'seeded:qwen2': it reads its whole input | leave out
talker.kind=encoder & ENDS | talker.inputs.chunk_size: is not for an encoder | leave it out
thinker.kind=encoder & thinker.final_output=tensors | needs a source that generates tok | 'encoder'
talker.inputs.chunk_size=0 | chunk_size: should be greater than or equal to 1, got 0 |
talker.inputs.chunksize=4 | talker.inputs.chunksize: unknown key | 'chunk_size'
code2wav.generation.steps=4 | code2wav.generation.steps: unknown key | 'num_steps'
code2wav.generation.window.left=4 | generation.window.left: unknown key | 'left_blocks'
code2wav.engine.num_blocks=4 | code2wav.engine.num_blocks: unknown key | known are
code2wav.final_output=text | code2wav.final_output: should be 'audio', got 'text' |
code2wav.sampling.seed=1 | code2wav.sampling: unknown key |
""")


@pytest.mark.parametrize(("changes", "place", "fix"), STREAMS)
def test_a_mistake_in_a_pipeline_that_speaks_is_named_too(
    changes: str, place: str, fix: str, tmp_path: Path
) -> None:
    changes = changes.replace("ENDS", "code2wav.inputs.from=thinker & talker.final_output=tensors")
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, parse_overrides([f"stages.{each}" for each in changes.split(" & ")]))
    message = str(caught.value)
    assert place in message and "stages." in message
    assert fix in message
    assert "\n" not in message, "one mistake, one line"


def test_a_speaker_has_a_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="speaker: .*at least 1 character"):
        load(tmp_path, {"speaker": ""})


VOICES = {"speakers": ("Ada", "Ben")}


def pipeline(**voices: str | RecordedVoice) -> Pipeline:
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


def test_recorded_voices_have_names_where_stages_have_none(tmp_path: Path) -> None:
    for name in ("ada", "ben"):
        (tmp_path / f"{name}.wav").write_bytes(name.encode())
    ada, ben = (RecordedVoice(audio=tmp_path / f"{name}.wav") for name in ("ada", "ben"))
    recorded = {"Ada": ada, "Ben": ben, "narrator": "Ben"}
    voices = Pipeline(speech_stages(), voices=recorded, speaker="ash").voices
    assert voices.own == ("Ada", "Ben")
    found = [voices.find(name) for name in ("alloy", "ash", "ballad", "Ada", "narrator")]
    assert found == ["Ada", "Ben", "Ada", "Ada", "Ben"]
    with pytest.raises(ValueError, match="'Adda': no such voice.*did you mean 'Ada'"):
        voices.find("Adda")
    said = ({"role": "user", "content": [{"type": "audio"}, {"type": "text", "text": "x"}]},)
    for prompt in ("x", ChatPrompt(({"role": "user", "content": "x"},))):
        shown = ChatPrompt(said, multi_modal_data={"audio": [b"ben"]})
        assert voices.apply(prompt, "Ben") == (shown, None)
    own = ChatPrompt(said, multi_modal_data={"audio": ["own.wav"]})
    assert voices.apply(own, "Ben") == (own, None), "a prompt with a sound keeps it"
    with pytest.raises(ValueError, match="give text or messages, got TokensPrompt"):
        voices.apply(TokensPrompt((1,)), "Ben")
    with pytest.raises(
        ValueError, match="voices.Ada: a recording is for stages that speak without"
    ):
        pipeline(Ada=ada)


def test_a_recording_with_its_words_is_said_before() -> None:
    system, asked = {"role": "system", "content": "s"}, {"role": "1", "content": "x"}
    said = {"role": "1", "content": [{"type": "text", "text": "words"}, {"type": "audio"}]}
    for earlier in ((), ({"role": "0", "content": "y"},)):
        made = speak_like(ChatPrompt((system, *earlier, asked)), b"sound", "words")
        assert made == ChatPrompt(
            (system, said, *earlier, asked), multi_modal_data={"audio": [b"sound"]}
        )


def test_a_recording_is_found_beside_the_yaml_file(tmp_path: Path) -> None:
    shipped = Path(stage_configs.__file__).parent / "pocket_tts_seeded.yaml"
    path = tmp_path / "mine.yaml"
    path.write_text(f"{shipped.read_text()}\nvoices: {{Ada: {{audio: ada.wav}}}}\n")
    with pytest.raises(
        ConfigError, match=r"voices.Ada.audio: there is no file .*/ada.wav'"
    ) as error:
        PipelineConfig.load(path)
    assert "\n" not in str(error.value), "that it could have been text is no help"
    (tmp_path / "ada.wav").write_bytes(b"")
    config = PipelineConfig.load(path, {"speaker": "Adda"})
    with pytest.raises(ValueError, match="'Adda': no such voice was recorded; did you mean 'Ada'"):
        config.check_speaker()
    assert config.voices == {"Ada": RecordedVoice(audio=tmp_path / "ada.wav")}


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
    for wrong, reported in (
        ("voices: {alloy: Bob}", "voices.alloy: 'Bob': stage 'talker' has no such voice; known "),
        ("speaker: Bob", "speaker 'Bob': stage 'talker' has no such voice"),
    ):
        path.write_text(re.sub(f"^{wrong.split()[0]}.*", "", text, flags=re.M) + f"\n{wrong}\n")
        result = CliRunner().invoke(app, [command, str(path)])
        assert result.exit_code == 2
        assert result.stderr.startswith(f"error: {path}: {reported}")
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
