"""Signs of life: a shim's beat, which the core acknowledges."""

from schedsvc_client.v1 import scheduler_pb2 as pb

from .stream import Stream
from .support import make

BEAT = pb.SessionEvent(beat=pb.SessionBeat())


def test_a_beat_is_acknowledged_at_once_and_changes_nothing() -> None:
    s = make()
    stream = Stream(s)
    before, digest = s.stats(0), s.digest()
    answer = stream.send(0, BEAT, BEAT)
    assert answer == pb.SessionResponse(ack_seq=2)
    assert s.stats(0) == before
    assert s.digest() == digest
    assert stream.send(0, BEAT).ack_seq == 3
    s.check()
