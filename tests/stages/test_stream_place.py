"""How far a stream has come: chunks are counted, and what is closed stays closed."""

from stages.worker.messages import CloseStream, Credit, StreamPlace

CREDIT = Credit("r", "b")


def test_a_chunk_moves_the_place_and_a_credit_takes_it_off():
    place = StreamPlace().after(3, 2).after(1, 4)
    assert place == StreamPlace(next_token=4, next_row=6, outstanding=2)
    assert place.answered(CREDIT) == StreamPlace(next_token=4, next_row=6, outstanding=1)
    assert StreamPlace().answered(CREDIT) == StreamPlace()


def test_a_chunk_that_was_under_way_does_not_open_a_closed_stream():
    assert not StreamPlace().answered(CloseStream("r", "b")).after(1, 1).is_open
