"""The drawing of a pipeline's graph, its memory and its limits."""

from __future__ import annotations

import re

import pytest

from omni.commands.explanation import describe_memory, describe_serving, draw_graph
from omni.commands.serve_command import ServeOptions
from omni.pipelines.pipeline_config import PipelineConfig
from omni.server.serving.settings import ServerLimits


def test_every_edge_of_a_graph_is_drawn_sources_first() -> None:
    decoder = {"kind": "autoregressive", "model": "seeded:qwen2"}
    config = PipelineConfig.model_validate(
        {
            "name": "graph",
            "description": "Two roots into one.",
            "stages": {
                "last": {
                    **decoder,
                    "inputs": {
                        "from": ["first", "encoder"],
                        "transform": "hidden_states_as_prompt_embeds",
                    },
                    "final_output": ["text", "tensors"],
                },
                "first": decoder,
                "encoder": {"kind": "encoder", "model": "seeded:bert"},
            },
        }
    )
    heading, graph, kinds = draw_graph(config).split("\n\n")
    assert heading == "graph: Two roots into one."
    first, encoder, last = [line.split() for line in graph.splitlines()]
    assert (first[0], *first[2:]) == ("prompt", "first")
    assert (encoder[0], *encoder[2:]) == ("prompt", "encoder")
    assert last[:3] == ["first", "+", "encoder"]
    assert last[3] == "──hidden_states_as_prompt_embeds──►"
    assert last[4:] == ["last", "=>", "text,", "tensors"]
    assert len({line.index("►") for line in graph.splitlines()}) == 1, "arrows end in one column"
    assert [line.split() for line in kinds.splitlines()] == [
        ["first", "autoregressive", "seeded:qwen2"],
        ["encoder", "encoder", "seeded:bert"],
        ["last", "autoregressive", "seeded:qwen2"],
    ]


def test_a_streamed_edge_is_a_wave_with_its_chunk_size() -> None:
    _, graph, legend, kinds = draw_graph(PipelineConfig.load("omni_speech")).split("\n\n")
    prompt, thinker, talker = graph.splitlines()
    assert "~" not in prompt
    assert "~~thinker_to_talker~~4~" in thinker and thinker.endswith("► talker")
    assert "~~talker_to_code2wav~~8~" in talker and talker.endswith("► code2wav => audio")
    assert len({line.index("►") for line in graph.splitlines()}) == 1, "arrows end in one column"
    assert "N tokens at a time" in legend
    assert "seeded:qwen2_5_omni (code2wav)" in kinds


@pytest.mark.usefixtures("checkpoint_cache")
def test_the_weights_of_every_kind_of_stage_are_shown_alike() -> None:
    reported = describe_memory(PipelineConfig.load("omni_speech"))
    weights = re.findall(r"^      weights +([\d.]+ [KM]iB) \(float32 on cpu\)$", reported, re.M)
    assert len(weights) == 3


@pytest.mark.usefixtures("checkpoint_cache")
def test_the_memory_of_each_stage_is_shown_by_kind_of_layer() -> None:
    stages = {
        name: {"kind": "autoregressive", "model": f"seeded:{name}", "final_output": "text"}
        for name in ("qwen2", "gemma2", "jamba")
    }
    reported = describe_memory(PipelineConfig.model_validate({"name": "memory", "stages": stages}))
    qwen2, gemma2, jamba = (reported.split(f"\n  {name}\n")[1].split("\n\n")[0] for name in stages)
    assert "full attention" in qwen2 and "large page" not in qwen2
    for told_of_stage, kind in ((gemma2, "sliding window of 16"), (jamba, "recurrent")):
        assert kind in told_of_stage and "full attention" in told_of_stage
        assert "per token" in told_of_stage and "one size" in told_of_stage


def limits_of(config: PipelineConfig) -> dict[str, str]:
    """The limits of serving a pipeline, by flag or setting."""
    _, rows = describe_serving(config).split("\n\n")
    columns = [re.split(r" {2,}", line.strip()) for line in rows.splitlines()]
    return {how.partition(";")[0] if what != "fetching it" else what: value
            for what, value, how in columns}  # fmt: skip


def test_limits_of_a_server_are_shown_with_their_flags() -> None:
    config = PipelineConfig.load(
        "omni_speech", overrides={"stages.thinker.engine.media_limits.max_audio_s": 7}
    )
    reported = limits_of(config)
    flags = {each.replace("_", "-") for each in ServeOptions.__dataclass_fields__}
    named = {each.removeprefix("--") for each in reported if each.startswith("--")}
    assert named <= flags and len(named) == 6
    assert reported["--max-waiting-requests"] == "64"
    assert reported["--request-timeout"] == "600 s"
    assert reported["--max-body-mib"] == "64.0 MiB"
    assert reported["stages.thinker.engine.media_limits.max_audio_s"] == "7 s"
    assert reported["stages.thinker.engine.media_limits.max_image_pixels"] == "33,554,432"
    assert not any("talker" in each for each in reported), "it has no media of users"


def test_every_limit_of_the_server_is_shown() -> None:
    _, rows = describe_serving(PipelineConfig.load("encode_then_generate")).split("\n\n")
    of_stages = sum("media_limits." in line for line in rows.splitlines())
    # One of them is derived from another.
    assert len(rows.splitlines()) - of_stages == len(ServerLimits.model_fields) + 1


def test_the_request_limit_is_the_sum_over_all_replicas() -> None:
    config = PipelineConfig.load(
        "two_step",
        {
            "runtime.kind": "processes",
            "stages.writer.placement": {"replicas": 3},
            "stages.writer.engine.max_num_seqs": 5,
            "stages.reader.engine.max_num_seqs": 2,
        },
    )
    assert limits_of(config)["--max-running-requests"] == "17"
