"""Progress of a stream: chunks are counted, and a closed stream stays closed."""

from stages.worker.messages import CloseStream, Credit, StreamPlace

CREDIT = Credit("r", "b")


def test_a_chunk_advances_the_stream_and_a_credit_reduces_its_outstanding_chunks():
    place = StreamPlace().after(3, 2).after(1, 4)
    assert place == StreamPlace(next_token=4, next_row=6, outstanding=2)
    assert place.answered(CREDIT) == StreamPlace(next_token=4, next_row=6, outstanding=1)
    assert StreamPlace().answered(CREDIT) == StreamPlace()


def test_a_late_chunk_does_not_reopen_a_closed_stream():
    assert not StreamPlace().answered(CloseStream("r", "b")).after(1, 1).is_open
