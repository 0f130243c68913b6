"""Tests a recorded core: nothing that could change a decision goes unrecorded."""

import pytest

from schedsvc._core import Scheduler, Session
from schedsvc.records.recording.form import FormError, Kind, call_of, unpack
from schedsvc.records.recording.recorder import READS, _Recorded, _RecordedSession, record

# It is not for a driver, but for simulators, which record nothing.
SIMULATORS = {"admit", "first_sight", "replay", "telemetry", "reset_learned"}


class Events:
    def __init__(self):
        self.raw = b""

    def put(self, event):
        self.raw += event


def methods(kind):
    """Return its public methods, also those of the classes that it extends."""
    return {
        name for name in dir(kind) if not name.startswith("_") and callable(getattr(kind, name))
    }


def test_every_method_of_the_core_is_recorded_or_changes_nothing():
    """A new method of the core has to be listed here."""
    recorded = methods(_Recorded)
    sets = {name for name in methods(Scheduler) if name.startswith("set_")}
    assert methods(Scheduler) == recorded | READS | sets | SIMULATORS
    assert not recorded & (READS | sets | SIMULATORS)
    assert methods(_RecordedSession) == methods(Session)


def test_a_method_that_the_recorder_does_not_know_is_refused():
    core = record(Scheduler(), Events())
    with pytest.raises(AttributeError, match=r"reset_learned"):
        core.reset_learned()


def test_whatever_sets_something_is_recorded_with_its_arguments():
    events = Events()
    core = record(Scheduler(), events)
    core.poll(5)
    assert core.set_flow(b"a", weight_milli=1_000) == 0
    core.set_key(b"k" * 32, 0)
    found = [event for event in unpack(events.raw) if event.kind == Kind.SET]
    assert [event.fields for event in found] == [(5,), (5,)]
    assert [call_of(event.data) for event in found] == [
        ("set_flow", [b"a"], {"weight_milli": 1_000}),
        ("set_key", [b"k" * 32, 0], {}),
    ]


@pytest.mark.parametrize(
    "data", [b"", b"[]", b'["poll", [], {}]', b'["set_x", [], 3]', b"\xff", b"[" * 100_000]
)
def test_a_malformed_call_is_refused(data):
    with pytest.raises(FormError, match="malformed"):
        call_of(data)


def test_call_without_effect_is_not_recorded():
    events, core = Events(), Scheduler()
    recorded = record(core, events)
    session = recorded.open_session(3)
    before = events.raw
    recorded.check()
    recorded.stats(0)
    assert recorded.next_deadline() == core.next_deadline()
    assert session.take(0) is None
    assert events.raw == before
    assert [event.kind for event in unpack(before)] == [Kind.OPEN]


def test_digests_stand_in_the_recording_now_and_then():
    events = Events()
    core = record(Scheduler(), events)
    for now_ms in range(0, 1_000, 10):
        core.poll(now_ms * 1_000_000)
    kinds = [event.kind for event in unpack(events.raw)]
    assert kinds.count(Kind.POLL) == 100
    assert kinds.count(Kind.CHECK) == 4


def test_service_of_other_members_is_replayed():
    events = Events()
    core = record(Scheduler(), events)
    core.set_shared(0)
    core.set_flow(b"a", 1_000)
    core.set_pool(0, b"p", 1, 1_000, 1)
    rows = [(b"a", b"default", b"", (1 << 62) - 1, 3), (b"other", b"default", b"", 5, 0)]
    assert core.set_remote_service(7, rows) == 1
    again = Scheduler()
    for event in unpack(events.raw):
        name, args, kwargs = call_of(event.data)
        getattr(again, name)(*args, **kwargs)
    assert again.digest() == core.digest() != 0
    assert again.flow_stats(7, 0)["vtc_micro"] == core.flow_stats(7, 0)["vtc_micro"] > 0
