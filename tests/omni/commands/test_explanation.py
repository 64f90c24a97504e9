"""The drawing of a pipeline's graph, and what is told of its memory."""

from __future__ import annotations

import re

import pytest

from omni.commands.explanation import describe_memory, draw_graph
from omni.pipelines.pipeline_config import PipelineConfig


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


def test_an_edge_that_is_streamed_is_a_wave_with_its_chunk_size() -> None:
    _, graph, legend, kinds = draw_graph(PipelineConfig.load("omni_speech")).split("\n\n")
    prompt, thinker, talker = graph.splitlines()
    assert "~" not in prompt
    assert "~~thinker_to_talker~~4~" in thinker and thinker.endswith("► talker")
    assert "~~talker_to_code2wav~~8~" in talker and talker.endswith("► code2wav => audio")
    assert len({line.index("►") for line in graph.splitlines()}) == 1, "arrows end in one column"
    assert "N tokens at a time" in legend
    assert "seeded:qwen2_5_omni (code2wav)" in kinds


@pytest.mark.usefixtures("checkpoint_cache")
def test_the_weights_of_every_stage_that_speaks_are_told_alike() -> None:
    told = describe_memory(PipelineConfig.load("omni_speech"))
    weights = re.findall(r"^      weights +([\d.]+ [KM]iB) \(float32 on cpu\)$", told, re.M)
    assert len(weights) == 3


@pytest.mark.usefixtures("checkpoint_cache")
def test_the_memory_of_each_stage_is_told_by_its_kinds_of_layers() -> None:
    stages = {
        name: {"kind": "autoregressive", "model": f"seeded:{name}", "final_output": "text"}
        for name in ("qwen2", "gemma2", "jamba")
    }
    told = describe_memory(PipelineConfig.model_validate({"name": "memory", "stages": stages}))
    qwen2, gemma2, jamba = (told.split(f"\n  {name}\n")[1].split("\n\n")[0] for name in stages)
    assert "full attention" in qwen2 and "large page" not in qwen2
    for told_of_stage, kind in ((gemma2, "sliding window of 16"), (jamba, "recurrent")):
        assert kind in told_of_stage and "full attention" in told_of_stage
        assert "per token" in told_of_stage and "one size" in told_of_stage
