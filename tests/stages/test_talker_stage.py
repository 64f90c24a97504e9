"""The talker stage consumes chunks, produces chunks and can be paused."""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine import EngineConfig, SamplingParams
from stages import AutoregressiveStage, StageOutput, StageRequest
from tests.support.speech import cut, made_up

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


def test_a_talker_streams_chunks_in_and_out(seeded: Callable[[str], str]) -> None:
    config = EngineConfig(
        model=seeded("qwen2_5_omni"), part="talker", block_size=4, max_model_len=64
    )
    stage = AutoregressiveStage("talker", config, sampling=GREEDY, outputs=["hidden_states"])
    assert stage.takes_chunks and stage.gives_chunks
    assert stage.speakers == ("Chelsie", "Ethan")
    first, *rest = cut(made_up(0, 5, 4), (1,))
    stage.add_request(StageRequest("r", first))
    stage.pause_request("r")
    assert stage.step() == [] and stage.has_unfinished_requests
    stage.resume_request("r")
    parts: list[torch.Tensor] = []
    done: StageOutput | None = None
    while done is None:
        if stage.needs_input("r"):
            stage.extend_request("r", rest.pop(0))
        done = next((output for output in stage.step() if output.finished), None)
        if done is None:
            num_rows = sum(len(part) for part in parts)
            parts += stage.partial_tensors("r", num_rows).values()
    assert done.error is None and not rest
    whole = done.tensors["hidden_states"]
    assert whole.shape[0] == 5 + 2 + 5
    assert torch.equal(torch.cat(parts), whole[: sum(len(part) for part in parts)])
    stage.check_integrity()
