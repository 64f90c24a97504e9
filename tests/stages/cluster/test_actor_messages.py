"""What waits to be said to and by an actor keeps its order."""

from __future__ import annotations

import threading
from itertools import permutations

import pytest

from stages.cluster.actor_messages import InOrder, Outbox, OutgoingMessage, Unconfirmed


@pytest.mark.parametrize("order", list(permutations(range(4))))
def test_messages_are_taken_in_the_order_of_their_numbers(order: tuple[int, ...]) -> None:
    inbox: InOrder[str] = InOrder()
    taken = [item for number in order for item in inbox.put(number, f"message {number}")]
    assert taken == [f"message {number}" for number in range(4)]


def test_a_message_that_comes_twice_is_taken_once() -> None:
    inbox: InOrder[int] = InOrder()
    taken = [item for number in (1, 0, 0, 1, 3, 3, 2, 3) for item in inbox.put(number, number)]
    assert taken == [0, 1, 2, 3] and not len(inbox)


def test_an_inbox_knows_what_has_come() -> None:
    inbox: InOrder[int] = InOrder()
    assert [*inbox.put(0, 0), *inbox.put(2, 2)] == [0]
    assert [number in inbox for number in range(4)] == [True, False, True, False]
    assert inbox.num_given == 1


def test_what_was_sent_is_overdue_until_it_is_confirmed() -> None:
    sent: Unconfirmed[str] = Unconfirmed(patience_s=3.0)
    for number, item in enumerate("abc"):
        sent.add(number, item, now_s=float(number))
    assert sent.overdue(now_s=3.0) == []
    sent.confirm(1)
    assert sent.overdue(now_s=4.5) == [(1, "b")]
    assert sent.overdue(now_s=5.5) == [(2, "c")], "the other one has just been sent again"
    assert sent.num_overdue == 2
    sent.confirm(2)
    assert sent.num_overdue == 0, "something has come"
    sent.confirm(3)
    assert sent.overdue(now_s=100.0) == [] and sent.num_overdue == 0


def test_an_outbox_gives_all_that_it_has_before_its_end() -> None:
    outbox = Outbox()
    messages = [OutgoingMessage(bytes([number])) for number in range(100)]
    for message in messages:
        outbox.put(message)
    outbox.end("it was enough")
    outbox.end("another reason")
    taken: list[OutgoingMessage] = []
    ended = None
    while ended is None:
        some, ended = outbox.take()
        taken += some
    assert (taken, ended) == (messages, "it was enough")
    with pytest.raises(ConnectionError, match="the actor has ended: it was enough"):
        outbox.put(messages[0])


def test_an_outbox_is_waited_for() -> None:
    outbox = Outbox()
    taken: list[tuple[list[OutgoingMessage], str | None]] = []
    waiting = threading.Thread(target=lambda: taken.append(outbox.take()))
    waiting.start()
    outbox.put(OutgoingMessage(b"late"))
    waiting.join()
    assert taken == [([OutgoingMessage(b"late")], None)]
