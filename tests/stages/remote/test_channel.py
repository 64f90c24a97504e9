"""Messages arrive whole and in order, whether a side is slow, dies or sends invalid data."""

from __future__ import annotations

import gc
import os
import queue
import re
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import msgspec
import pytest
import torch

from stages.remote import channel as channel_module
from stages.remote import shared_memory
from stages.remote.channel import PROTOCOL_VERSION, Channel, ChannelClosed
from stages.remote.codec import Reference, encode
from stages.remote.shared_memory import SharedTensor, SharedTensors
from stages.stage_output import StageOutput
from tests.support.notes import Note
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.usefixtures("nothing_older_collected")


class End:
    """A channel and what it received."""

    def __init__(self, sock: socket.socket, name: str) -> None:
        self.channel = Channel(sock, Note, name)
        self.messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.reasons: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.channel.start(self.messages.put, self.reasons.put)

    def next(self) -> Any:
        return self.messages.get(timeout=PATIENCE_S)

    def reason(self) -> str:
        return self.reasons.get(timeout=PATIENCE_S)


def until(condition: Callable[[], bool]) -> None:
    begin = time.monotonic()
    while not condition():
        waited = time.monotonic() - begin
        assert waited < PATIENCE_S
        if waited > 0.05:  # reference cycles need the collector
            gc.collect()
        time.sleep(0.001)


def open_files() -> Counter[str]:
    """Return open files: pipes and sockets by inode, segments by their common name."""
    links: Counter[str] = Counter()
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # another thread has closed it
            links[os.readlink(f"/proc/self/fd/{fd}")] += 1
    return links


def segments() -> int:
    return sum(number for link, number in open_files().items() if "omni-segment" in link)


@pytest.fixture
def nothing_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Check that a test leaves no segment open; threads of other tests may open and close files."""
    monkeypatch.setattr(shared_memory, "_MAX_KEPT", 0)
    gc.collect()
    before = segments()
    yield
    until(lambda: segments() <= before)


@pytest.fixture
def pair(nothing_left: None) -> Iterator[tuple[End, End]]:
    left, right = socket.socketpair()
    ends = End(left, "left"), End(right, "right")
    own = {os.readlink(f"/proc/self/fd/{each.fileno()}") for each in (left, right)}
    yield ends
    for end in ends:
        end.channel.close()
        assert end.channel.join(PATIENCE_S)
        vars(end).clear()  # pytest still has the fixture when descriptors are counted
    until(lambda: not open_files().keys() & own)


def relay() -> tuple[End, End, End, End]:
    """Return a source, both ends of a relay, and a target."""
    a, between_a = socket.socketpair()
    between_b, b = socket.socketpair()
    return End(a, "source"), End(between_a, "first"), End(between_b, "second"), End(b, "target")


def rows(num: int, value: float = 1.0) -> Note:
    return reported(rows=torch.full((num, 256), value))


def reported(**tensors: torch.Tensor) -> Note:
    return Note(outputs=(StageOutput("r", "s", True, tensors=tensors),))


def tensors_of(note: Note) -> Mapping[str, torch.Tensor]:
    (output,) = note.outputs
    return output.tensors


def test_messages_arrive_in_order_in_both_directions(pair: tuple[End, End]):
    left, right = pair
    for number in range(100):
        left.channel.send(Note([number, "there"]))
        right.channel.send(Note({"back": number}))
    assert [right.next().value for _ in range(100)] == [[n, "there"] for n in range(100)]
    assert [left.next().value for _ in range(100)] == [{"back": n} for n in range(100)]


def test_large_tensors_use_shared_memory_and_small_ones_the_message(pair: tuple[End, End]):
    left, right = pair
    small = torch.ones(64, 256)
    large = torch.randn(65, 256)
    left.channel.send(reported(large=large, small=small))
    arrived = tensors_of(right.next())
    assert isinstance(arrived, SharedTensors)
    assert torch.equal(arrived["large"], large) and torch.equal(arrived["small"], small)
    assert isinstance(arrived.entries["large"], SharedTensor)
    assert isinstance(arrived.entries["small"], torch.Tensor)


def test_arrays_and_strided_tensors_use_shared_memory(pair: tuple[End, End]):
    left, right = pair
    tensor = torch.randn(199, 199).bfloat16().T
    left.channel.send(Note(tensor.float().numpy(), (tensor, tensor)))
    arrived = right.next()
    assert all(torch.equal(each, tensor) for each in arrived.tensors)
    assert (arrived.value == tensor.float().numpy()).all()


def test_large_messages_arrive_whole_in_both_directions_at_once(pair: tuple[End, End]):
    """Neither side waits for the other to read before reading itself."""
    left, right = pair
    contents = [bytes([number]) * (3 * 2**20) for number in range(6)]
    for content in contents:
        left.channel.send(Note(content))
        right.channel.send(Note(content))
    assert [right.next().value for _ in contents] == contents
    assert [left.next().value for _ in contents] == contents
    assert left.channel.wait_until_sent(PATIENCE_S)


def test_threads_may_send_at_once(pair: tuple[End, End]):
    left, right = pair

    def send(thread: int) -> None:
        for number in range(30):
            left.channel.send(Note([thread, number, b"x" * 5000], (torch.full((9000,), thread),)))

    threads = [threading.Thread(target=send, args=(thread,)) for thread in range(4)]
    for each in threads:
        each.start()
    seen: dict[int, int] = {}
    for _ in range(120):
        note = right.next()
        thread, number, content = note.value
        assert number == seen.get(thread, -1) + 1, "messages of a thread keep their order"
        seen[thread] = number
        assert (note.tensors[0] == thread).all() and content == b"x" * 5000
    del note
    for each in threads:
        each.join()


def test_sending_does_not_wait_for_a_silent_reader(nothing_left: None):
    left, right = socket.socketpair()
    end = End(left, "silent")
    for _ in range(50):
        end.channel.send(Note(b"x" * 100_000, (torch.ones(20_000),)))
    assert not end.channel.wait_until_sent(0.0)
    right.close()
    assert "the other side closed it or has ended" in end.reason()
    with pytest.raises(ChannelClosed, match="the channel to silent has ended"):
        end.channel.wait_until_sent(PATIENCE_S)


def test_memory_outlives_its_sender_but_not_its_readers(
    nothing_left: None,
):
    source, first, second, target = relay()
    source.channel.send(rows(100, 5.0))
    handed = first.next()
    close(source, first)
    second.channel.send(handed)
    del handed
    arrived = tensors_of(target.next())
    assert (arrived["rows"] == 5.0).all()
    del arrived
    close(second, target)


def close(*ends: End) -> None:
    for end in ends:
        end.channel.close()
        end.channel.close()
        assert end.channel.join(PATIENCE_S)
        end.reason()
        assert end.reasons.empty(), "the end is reported once"


def test_both_sides_are_notified_of_the_end_once(nothing_left: None):
    left, right = (End(sock, "peer") for sock in socket.socketpair())
    left.channel.send(Note("last words"))
    left.channel.close()
    assert left.reason() == "it was closed here"
    assert right.next().value == "last words"
    assert right.reason() == "the other side closed it or has ended"
    for end in (left, right):
        with pytest.raises(ChannelClosed, match="the channel to peer has ended: "):
            end.channel.send(Note(1))
    for end in (left, right):
        end.channel.close()
        assert end.channel.join(PATIENCE_S) and end.reasons.empty()


def test_a_channel_that_never_started_can_be_closed(nothing_left: None):
    left, right = socket.socketpair()
    channel = Channel(left, Note, "nobody")
    channel.send(Note(tensors=(torch.ones(20_000),)))
    channel.close()
    channel.close()
    right.close()
    assert channel.join(PATIENCE_S)


def sender_and_receiver() -> tuple[End, Channel]:
    """Return a started sender and a receiver that is not started."""
    left, right = socket.socketpair()
    return End(right, "sender"), Channel(left, Note, "receiver")


def test_a_message_handler_may_close_the_channel(nothing_left: None):
    end, channel = sender_and_receiver()
    reasons: queue.SimpleQueue[str] = queue.SimpleQueue()
    seen: list[Any] = []

    def stop(message: Any) -> None:
        seen.append(message.value)
        channel.close()

    for number in range(5):
        end.channel.send(Note(number))
    channel.start(stop, reasons.put)
    assert reasons.get(timeout=PATIENCE_S) == "it was closed here" and seen == [0]
    assert "other side" in end.reason()
    assert channel.join(PATIENCE_S) and end.channel.join(PATIENCE_S)


def test_an_error_of_the_handler_ends_the_channel_with_its_reason(
    nothing_left: None, caplog: pytest.LogCaptureFixture
):
    end, channel = sender_and_receiver()
    reasons: queue.SimpleQueue[str] = queue.SimpleQueue()
    channel.start(lambda message: 1 / message.value, reasons.put)
    end.channel.send(Note(0))
    assert "ZeroDivisionError: division by zero" in reasons.get(timeout=PATIENCE_S)
    assert "a message of receiver could not be handled" in caplog.text
    assert "other side" in end.reason()
    assert channel.join(PATIENCE_S) and end.channel.join(PATIENCE_S)


def test_a_message_that_cannot_be_sent_or_is_too_large_changes_nothing(
    pair: tuple[End, End], monkeypatch: pytest.MonkeyPatch
):
    left, right = pair
    monkeypatch.setattr(channel_module, "_MAX_BYTES", 1000)
    for message, error in (
        (Note(object(), (torch.ones(20_000),)), r"Note\.value cannot be sent"),
        (Note(b"x" * 1000), "1000 are the most"),
    ):
        with pytest.raises(ValueError, match=error):
            left.channel.send(message)
        left.channel.send(Note("next"))
        assert right.next().value == "next"


def test_without_shared_memory_tensors_are_sent_in_the_message(
    pair: tuple[End, End], monkeypatch: pytest.MonkeyPatch
):
    left, right = pair

    def fail(*_: Any) -> None:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(os, "memfd_create", fail)
        left.channel.send(rows(100, 5.0))
    assert (tensors_of(right.next())["rows"] == 5.0).all()


def test_a_handle_is_forwarded_without_being_mapped(nothing_left: None):
    """A relay between two workers passes handles."""
    source, first, second, target = relay()
    source.channel.send(rows(100, 5.0))
    handed = first.next()
    second.channel.send(handed)
    second.channel.send(Note(outputs=handed.outputs, tensors=(torch.full((20_000,), 7.0),)))
    segment = handed.outputs[0].tensors.entries["rows"].source.segment
    assert segment._content is None
    segment.detach()
    second.channel.send(handed)
    del handed, segment
    arrived, mixed, copied = target.next(), target.next(), target.next()
    assert (mixed.tensors[0] == 7.0).all()
    close(source, first, second, target)
    for each in (arrived, mixed, copied):
        assert (tensors_of(each)["rows"] == 5.0).all()


def test_more_segments_than_fit_in_one_message_arrive(nothing_left: None):
    source, first, second, target = relay()
    for number in range(255):
        source.channel.send(rows(65, number))
    handed = [first.next().outputs[0] for _ in range(255)]
    second.channel.send(Note(outputs=tuple(handed)))
    del handed
    arrived = target.next().outputs
    assert [float(each.tensors["rows"][0, 0]) for each in arrived] == list(range(255))
    close(source, first, second, target)


ELSEWHERE = encode(Note(tensors=(torch.ones(2),)), lambda _: Reference(7, 8))


def frame(content: bytes, version: int = PROTOCOL_VERSION) -> bytes:
    return struct.pack("<BHQ", version, 0, len(content)) + content


@pytest.mark.parametrize(
    ("sent", "reported"),
    [
        (
            frame(b"", 99),
            f"speaks version 99 of the protocol.* this one version {PROTOCOL_VERSION}: both",
        ),
        (frame(msgspec.msgpack.encode({"a": 1})), "a message that cannot be read"),
        (frame(ELSEWHERE), "segment 7 of 0"),
        (struct.pack("<BHQ", PROTOCOL_VERSION, 0, 2**40), "a frame of 1099511627776 bytes"),
    ],
)
def test_invalid_data_ends_the_channel_with_a_reason(
    sent: bytes, reported: str, nothing_left: None
):
    ours, theirs = socket.socketpair()
    end = End(ours, "peer")
    theirs.sendall(sent)
    assert re.search(reported, end.reason())
    theirs.close()
    assert end.channel.join(PATIENCE_S)


def test_a_truncated_frame_is_no_message(nothing_left: None):
    ours, theirs = socket.socketpair()
    end = End(ours, "peer")
    theirs.sendall(frame(bytes(100))[:50])
    theirs.close()
    assert "other side" in end.reason() and end.messages.empty()
    assert end.channel.join(PATIENCE_S)


def test_a_channel_can_be_started_only_once(pair: tuple[End, End]):
    with pytest.raises(RuntimeError, match="started once"):
        pair[0].channel.start(print, print)
