"""Places in shared memory: never two at once, given back when let go of, never more than needed."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stages.remote.segments import (
    PAGE_BYTES,
    Place,
    Segment,
    SegmentPool,
    SharedBytes,
    SharedTensor,
    SharedTensors,
)

pytestmark = pytest.mark.usefixtures("nothing_older_collected")

MIB = 2**20


def descriptors() -> set[str]:
    gc.collect()
    return set(os.listdir("/proc/self/fd"))


def shared(place: Place, release: Callable[[], object] = lambda: None) -> SharedBytes:
    made = SharedBytes(place.segment, place.offset, place.nbytes)
    weakref.finalize(made, release)
    return made


@given(st.lists(st.tuples(st.integers(1, 9 * PAGE_BYTES), st.integers(0, 9)), max_size=40))
def test_places_do_not_overlap_and_all_room_comes_back(events: list[tuple[int, int]]):
    pool = SegmentPool(segment_bytes=16 * PAGE_BYTES, max_idle_bytes=20 * PAGE_BYTES)
    live: list[tuple[Place, int]] = []
    for number, (nbytes, older) in enumerate(events):
        place = pool.place(nbytes)
        place.content[:] = number % 256
        live.append((place, number % 256))
        if older < len(live):
            live.pop(older)[0].free()
        assert pool.idle_bytes <= 20 * PAGE_BYTES
        assert all((each.content == value).all() for each, value in live)
    for place, _ in live:
        place.free()
    assert pool.live_bytes == 0 and pool.idle_bytes <= 20 * PAGE_BYTES


def test_a_place_that_was_freed_is_used_again_with_its_pages():
    pool = SegmentPool()
    first = pool.place(MIB)
    first.content[:] = 1
    first.free()
    second = pool.place(MIB)
    assert (second.segment, second.offset) == (first.segment, first.offset)
    assert pool.num_segments == 1 and pool.idle_bytes == 0


def test_what_is_larger_than_a_segment_gets_one_of_its_own():
    pool = SegmentPool(segment_bytes=MIB)
    place = pool.place(3 * MIB)
    assert place.segment.size == 4 * MIB and place.nbytes == 3 * MIB


def test_what_lies_idle_beyond_the_limit_takes_no_memory():
    pool = SegmentPool(segment_bytes=8 * MIB, max_idle_bytes=2 * MIB)
    kept, large = pool.place(PAGE_BYTES), pool.place(6 * MIB)
    large.content[:] = 1
    assert blocks(kept.segment) >= 6 * MIB
    large.free()
    assert pool.idle_bytes == 0 and blocks(kept.segment) == PAGE_BYTES
    assert not pool.place(6 * MIB).content.any()


def blocks(segment: Segment) -> int:
    return os.fstat(segment.fd).st_blocks * 512


def test_segments_that_are_not_needed_are_closed():
    before = descriptors()
    pool = SegmentPool(segment_bytes=MIB, max_idle_bytes=0)
    places = [pool.place(MIB) for _ in range(5)]
    for place in places:
        place.free()
    del place, places
    assert pool.num_segments == 0 and descriptors() == before


def test_memory_that_may_still_be_read_is_never_written_again():
    pool = SegmentPool(segment_bytes=MIB)
    read, other = pool.place(PAGE_BYTES), pool.place(PAGE_BYTES)
    read.content[:] = 7
    array = shared(read).array()
    read.abandon()
    later = [pool.place(PAGE_BYTES) for _ in range(300)]
    for place in later:
        place.content[:] = 9
    assert all(place.segment is not read.segment for place in later)
    other.free()
    assert pool.num_segments == 2, "the one that was given up is gone from the pool"
    assert (array == 7).all()


def test_a_segment_is_not_made_shorter():
    segment = Segment.create(MIB)
    with pytest.raises(PermissionError):
        os.ftruncate(segment.fd, 0)


@pytest.mark.parametrize("call", ["memfd_create", "ftruncate", "posix_fallocate"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.ENOMEM, errno.EMFILE])
def test_where_a_limit_is_reached_the_sender_is_told_and_nothing_leaks(
    call: str, number: int, monkeypatch: pytest.MonkeyPatch
):
    pool = SegmentPool(segment_bytes=MIB)
    before = descriptors()

    def fail(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(MemoryError, match=f"no shared memory for .* {os.strerror(number)}"):
            pool.place(PAGE_BYTES)
    assert pool.num_segments == pool.live_bytes == pool.idle_bytes == 0
    assert descriptors() == before
    pool.place(PAGE_BYTES).content[:] = 1


def test_where_there_is_no_room_for_a_mapping_the_sender_is_told(monkeypatch: pytest.MonkeyPatch):
    pool = SegmentPool(segment_bytes=MIB)

    def fail(*_: Any) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(mmap, "mmap", fail)
        with pytest.raises(MemoryError, match="no shared memory"):
            pool.place(PAGE_BYTES)
    assert pool.num_segments == 0


def test_without_memfd_a_file_without_a_name_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    pool = SegmentPool(segment_bytes=MIB, max_idle_bytes=0)
    place = pool.place(MIB)
    place.content[:] = 3
    assert list(tmp_path.iterdir()) == []
    assert (shared(place).array() == 3).all()


@pytest.mark.parametrize("size", [0, 5000, PAGE_BYTES // 2])
def test_a_pool_of_segments_of_odd_sizes_is_refused(size: int):
    with pytest.raises(ValueError, match="power of two"):
        SegmentPool(segment_bytes=size)


def test_a_shared_tensor_is_the_memory_itself_and_lets_go_of_it_with_its_last_view():
    pool = SegmentPool()
    place = pool.place(24)
    place.content.view(np.float32)[:] = range(6)
    released: list[int] = []
    handle = SharedTensor(shared(place, lambda: released.append(1)), torch.float32, (2, 3))
    assert (handle.shape, handle.dtype, handle.nbytes) == ((2, 3), torch.float32, 24)
    tensor = handle.tensor()
    assert tensor.tolist() == [[0, 1, 2], [3, 4, 5]]
    place.content.view(np.float32)[5] = 9
    view = tensor[1:, 2]
    del handle, tensor
    gc.collect()
    assert view.tolist() == [9] and not released
    del view
    gc.collect()
    assert released == [1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.int64, torch.complex64])
def test_shared_tensors_are_of_any_type(dtype: torch.dtype):
    place = SegmentPool().place(4 * dtype.itemsize)
    wanted = torch.tensor([0, 1, 0, 1]).to(dtype)
    place.content[:] = wanted.view(torch.uint8).numpy()
    made = SharedTensor(shared(place), dtype, (4,)).tensor()
    assert made.dtype == dtype and torch.equal(made, wanted)


def test_shared_tensors_are_mapped_when_they_are_asked_for():
    place = SegmentPool().place(8)
    place.content[:] = 0
    fd = os.dup(place.segment.fd)
    segment = Segment(place.segment.identity, fd, place.segment.size)
    handle = SharedTensor(SharedBytes(segment, 0, 8), torch.float32, (2,))
    tensors = SharedTensors({"rows": handle, "small": torch.ones(1)})
    assert list(tensors) == ["rows", "small"] and "rows" in tensors and len(tensors) == 2
    assert tensors.nbytes == 12 and tensors.entries["rows"] is handle
    assert repr(tensors) == (
        "SharedTensors({'rows': (2,) torch.float32, 'small': (1,) torch.float32})"
    )
    assert segment._map is None
    assert tensors["rows"] is tensors["rows"] and tensors["rows"].tolist() == [0, 0]
    assert segment._map is not None
    assert tensors.get("nothing") is None


@pytest.mark.parametrize(
    ("offset", "nbytes"), [(-1, 4), (0, MIB + 1), (MIB, 1), (8, -4), (2**70, 4)]
)
def test_bytes_outside_of_a_segment_are_refused(offset: int, nbytes: int):
    segment = Segment.create(MIB)
    with pytest.raises(ValueError, match="are not in a segment of"):
        SharedBytes(segment, offset, nbytes)


@pytest.mark.parametrize("shape", [(3,), (-1, -2), (2, 2), ()])
def test_a_shape_that_does_not_fit_the_bytes_is_refused(shape: tuple[int, ...]):
    held = shared(SegmentPool().place(8))
    with pytest.raises(ValueError, match="cannot lie in 8 bytes"):
        SharedTensor(held, torch.float32, shape)


def test_a_segment_of_another_size_than_announced_is_refused_and_closed():
    before = descriptors()
    fd = os.memfd_create("test")
    os.ftruncate(fd, 100)
    with pytest.raises(ValueError, match="a segment of 200 bytes was announced, and it has 100"):
        Segment(bytes(16), fd, 200)
    assert descriptors() == before
