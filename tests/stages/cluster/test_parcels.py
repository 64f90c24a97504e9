"""What waits to be said to and by an actor keeps its order."""

from __future__ import annotations

import threading
from itertools import permutations

import pytest

from stages.cluster.parcels import InOrder, Outbox, Parcel, Turns


@pytest.mark.parametrize("order", list(permutations(range(4))))
def test_messages_are_taken_in_the_order_of_their_numbers(order: tuple[int, ...]) -> None:
    inbox: InOrder[str] = InOrder()
    taken = [item for number in order for item in inbox.put(number, f"message {number}")]
    assert taken == [f"message {number}" for number in range(4)]


def test_a_message_that_comes_twice_is_taken_once() -> None:
    inbox: InOrder[int] = InOrder()
    taken = [item for number in (1, 0, 0, 1, 3, 3, 2, 3) for item in inbox.put(number, number)]
    assert taken == [0, 1, 2, 3] and not len(inbox)


def test_an_outbox_gives_all_that_it_has_before_its_end() -> None:
    outbox = Outbox()
    parcels = [Parcel(bytes([number])) for number in range(100)]
    for parcel in parcels:
        outbox.put(parcel)
    outbox.end("it was enough")
    outbox.end("another reason")
    taken: list[Parcel] = []
    ended = None
    while ended is None:
        some, ended = outbox.take()
        taken += some
    assert (taken, ended) == (parcels, "it was enough")
    with pytest.raises(ConnectionError, match="nobody listens any more: it was enough"):
        outbox.put(parcels[0])


def test_an_outbox_is_waited_for() -> None:
    outbox = Outbox()
    taken: list[tuple[list[Parcel], str | None]] = []
    waiting = threading.Thread(target=lambda: taken.append(outbox.take()))
    waiting.start()
    outbox.put(Parcel(b"late"))
    waiting.join()
    assert taken == [([Parcel(b"late")], None)]


def test_turns_are_taken_by_number_whoever_comes_first() -> None:
    turns = Turns()
    said: list[int] = []

    def speak(number: int) -> None:
        with turns.turn(number):
            said.append(number)

    threads = [threading.Thread(target=speak, args=(number,)) for number in (2, 1, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert said == [0, 1, 2]
