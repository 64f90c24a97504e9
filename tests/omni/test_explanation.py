"""The drawing of a pipeline's graph."""

from __future__ import annotations

from omni.explanation import draw_graph
from omni.pipeline_config import PipelineConfig


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
