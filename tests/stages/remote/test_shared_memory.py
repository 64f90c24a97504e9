"""Shared memory is kept exactly as long as a reader uses it."""

from __future__ import annotations

import gc
import mmap
import os
import tempfile
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stages.remote import shared_memory
from stages.remote.shared_memory import (
    Segment,
    SharedBytes,
    SharedTensor,
    SharedTensors,
    aligned,
)
from stages.stage_output import StageOutput
from stages.worker.stage_worker import num_tensor_bytes

pytestmark = pytest.mark.usefixtures("nothing_older_collected")


def segment_of(*contents: bytes) -> Segment:
    return Segment.write([np.frombuffer(each, np.uint8) for each in contents])


def is_open(fd: int) -> bool:
    try:
        return "omni-segment" in os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return False


def descriptor_of(segment: Segment) -> int:
    assert segment.file is not None
    return segment.file.fd


@given(st.lists(st.binary(min_size=1, max_size=5000), min_size=1, max_size=9))
def test_contents_are_aligned(contents: list[bytes]):
    segment, start = segment_of(*contents), 0
    for content in contents:
        start = aligned(start)
        assert start % 64 == 0
        assert SharedBytes(segment, start, len(content)).array().tobytes() == content
        start += len(content)
    assert segment.size >= start


def inode(segment: Segment) -> int:
    return os.fstat(descriptor_of(segment)).st_ino


def test_memory_is_reused_only_without_readers(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shared_memory, "_kept", deque())
    first = segment_of(b"first")
    number = inode(first)
    passed_on = Segment(os.dup(descriptor_of(first)))
    assert inode(segment_of(b"other")) != number
    del first
    gc.collect()
    assert inode(segment_of(b"other")) != number, "another descriptor refers to it"
    array = SharedBytes(passed_on, 0, 5).array()
    del passed_on
    gc.collect()
    assert inode(segment_of(b"other")) != number, "it is mapped"
    assert array.tobytes() == b"first"
    del array
    gc.collect()
    held = [segment_of(b"other") for _ in range(3)]
    assert number in map(inode, held)
    assert len(set(map(inode, held))) == 3


def test_a_segment_is_closed_with_its_last_reference():
    segment = segment_of(b"content")
    fd = descriptor_of(segment)
    array = SharedBytes(segment, 0, 7).array()
    assert is_open(fd)
    del segment
    gc.collect()
    assert not is_open(fd) and array.tobytes() == b"content"


def test_a_detached_segment_keeps_its_content_and_no_descriptor():
    segment, mapped = segment_of(b"content"), segment_of(b"content")
    kept = mapped.content
    for each in (segment, mapped):
        fd = descriptor_of(each)
        each.detach()
        each.detach()
        gc.collect()
        assert not is_open(fd) and each.file is None
        assert each.content.tobytes().startswith(b"content")
    assert np.shares_memory(kept, mapped.content)


def test_the_number_of_open_segments_is_bounded():
    sent = [segment_of(b"%d" % n) for n in range(300)]
    received = [Segment.received(os.dup(descriptor_of(each))) for each in sent]
    assert sum(each.file is not None for each in received) == 256
    contents = [each.content.tobytes() for each in received]
    assert all(content.startswith(b"%d" % n) for n, content in enumerate(contents))


def test_a_failed_mapping_is_a_memory_error(monkeypatch: pytest.MonkeyPatch):
    segment = segment_of(b"content")

    def fail(*_: Any) -> None:
        raise OSError(12, "Cannot allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(mmap, "mmap", fail)
        with pytest.raises(MemoryError, match="no room to map .* bytes: .*Cannot allocate"):
            _ = segment.content
    assert segment.content.tobytes().startswith(b"content")


def test_without_memfd_an_unnamed_file_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    segment = segment_of(b"content")
    assert list(tmp_path.iterdir()) == []
    assert segment.content.tobytes().startswith(b"content")


def test_a_shared_tensor_views_the_memory_and_frees_it_with_its_last_view():
    segment = Segment.write([np.arange(6, dtype=np.float32).view(np.uint8)])
    handle = SharedTensor(SharedBytes(segment, 0, 24), torch.float32, (2, 3))
    assert (handle.shape, handle.dtype, handle.nbytes) == ((2, 3), torch.float32, 24)
    tensor = handle.tensor()
    assert tensor.tolist() == [[0, 1, 2], [3, 4, 5]]
    segment.content.view(np.float32)[5] = 9
    view = tensor[1:, 2]
    del handle, tensor, segment
    gc.collect()
    assert view.tolist() == [9]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.int64, torch.complex64])
def test_shared_tensors_are_of_any_type(dtype: torch.dtype):
    wanted = torch.tensor([0, 1, 0, 1]).to(dtype)
    segment = Segment.write([wanted.view(torch.uint8).numpy()])
    made = SharedTensor(SharedBytes(segment, 0, wanted.nbytes), dtype, (4,)).tensor()
    assert made.dtype == dtype and torch.equal(made, wanted)


def test_shared_tensors_are_mapped_on_first_access():
    segment = segment_of(bytes(8))
    handle = SharedTensor(SharedBytes(segment, 0, 8), torch.float32, (2,))
    tensors = SharedTensors({"rows": handle, "small": torch.ones(1)})
    assert list(tensors) == ["rows", "small"] and "rows" in tensors and len(tensors) == 2
    assert tensors.entries["rows"] is handle
    output = StageOutput("r", "a", finished=True, tensors=tensors)
    assert num_tensor_bytes([output]) == 12
    assert repr(tensors) == (
        "SharedTensors({'rows': (2,) torch.float32, 'small': (1,) torch.float32})"
    )
    assert segment._content is None
    assert tensors["rows"] is tensors["rows"] and tensors["rows"].tolist() == [0, 0]
    assert segment._content is not None
    assert tensors.get("nothing") is None


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 4), (0, 8), (7, 1), (6, -4), (2**70, 4)])
def test_bytes_outside_a_segment_are_refused(offset: int, nbytes: int):
    segment = segment_of(b"content")
    segment.size = 7
    with pytest.raises(ValueError, match="are not in a segment of 7"):
        SharedBytes(segment, offset, nbytes)


@pytest.mark.parametrize("shape", [(3,), (-1, -2), (2, 2), ()])
def test_a_shape_that_does_not_fit_the_bytes_is_refused(shape: tuple[int, ...]):
    held = SharedBytes(segment_of(bytes(8)), 0, 8)
    with pytest.raises(ValueError, match="are not 8 bytes"):
        SharedTensor(held, torch.float32, shape)
