"""The destination of tensors that lie on a GPU, with a direct transport and without one.

The GPU is fake: tensors that claim to lie on one, in a cluster that claims to have some. What CI
machines cannot show is described in docs/placement.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from omni import Omni
from omni.pipelines.pipeline_config import PipelineConfig
from tests.support.file_transport import num_fetched, num_offered, remove_files
from tests.support.gpu_kind import where_it_lies
from tests.support.made_up_gpu import WITHIN_GPU, register_within_gpu
from tests.support.patience import wait_for
from tests.support.ray_cluster import SessionCluster

_HALF, _WHOLE, _NONE = 0.5, 1, 0


@pytest.fixture
def transport(ray_cluster: SessionCluster) -> Iterator[str]:
    register_within_gpu()
    yield WITHIN_GPU
    remove_files()


def _pipeline(transport: str, final_output: str = "text", **readers: float) -> PipelineConfig:
    """Return a source with half a GPU, and readers by their share of one."""
    transform = f"{where_it_lies.__module__}:{where_it_lies.__name__}"
    stages: dict[str, Any] = {"source": {"placement": {"num_gpus": _HALF}}}
    stages["source"]["final_output"] = final_output
    for name, num_gpus in readers.items():
        inputs = {"from": "source", "transform": transform}
        stages[name] = {"inputs": inputs, "placement": {"num_gpus": num_gpus}}
        stages[name]["final_output"] = "text"
    kind = {"kind": "made_up_gpu"}
    given = {name: kind | stage for name, stage in stages.items()}
    runtime = {"kind": "ray", "tensor_transport": transport}
    return PipelineConfig.model_validate({"name": "on_gpus", "runtime": runtime, "stages": given})


def _told(name: str, gpu: str) -> str:
    """Return a reader's text about the source's tensors, given where those of the GPU arrive."""
    return f"{name}(rows: {gpu} 800020000, one: {gpu} 1, on_host: cpu 799980000, little: cpu 0)"


def test_what_lies_on_a_gpu_comes_to_the_gpu_of_who_shares_it(transport: str) -> None:
    """Others, with none or another one, get them on the host, where host tensors always stay."""
    before = num_fetched()
    with Omni(_pipeline(transport, near=_HALF, far=_WHOLE, host=_NONE)) as omni:
        for prompt in ("one", "two"):
            (output,) = omni.generate(prompt)
            assert output.stages["near"].text == _told("near", "cuda")
            assert output.stages["far"].text == _told("far", "cpu")
            assert output.stages["host"].text == _told("host", "cpu")
        wait_for(lambda: num_offered() == 0)
    assert num_fetched() == before + 4, "rows and one, by the one that shares the GPU, twice"


@pytest.mark.parametrize(
    ("tensor_transport", "final_output"), [("object_store", "text"), (WITHIN_GPU, "tensors")]
)
def test_what_goes_by_the_store_comes_to_the_host(
    transport: str, tensor_transport: str, final_output: str
) -> None:
    """Where that is the transport, and for stages whose users get tensors, which outlive actors."""
    with Omni(_pipeline(tensor_transport, final_output, near=_HALF)) as omni:
        (output,) = omni.generate("one")
    assert output.stages["near"].text == _told("near", "cpu")
    for name, tensor in output.stages["source"].tensors.items():
        assert tensor.device.type == "cpu", name
    assert num_fetched() == 0
