"""Tests writing beside the event loop: limits, failures, and an existing file."""

import os
import stat
import threading
import time

import pytest

from schedsvc.records.recording import writer as module
from schedsvc.records.recording.form import Event, Kind, pack
from schedsvc.records.recording.writer import RecordingError, RecordingWriter
from schedsvc_lab.sim.replay.reader import Recording
from tests.killed import holding
from tests.usage.attacks import delete, move, rename_over
from tests.waiting import wait_until

HEADER = {"options": {}, "setup": []}
MB = 1 << 20


def polls(numbers):
    return [Event(Kind.POLL, (number,)) for number in numbers]


def write(path, events, **options):
    writer = RecordingWriter(path, HEADER, **{"bytes_max": MB, **options})
    writer.begin()
    for event in events:
        writer.put(pack(event))
    return writer


def test_events_are_in_the_file_in_their_order(tmp_path):
    writer = write(tmp_path / "r", polls(range(5_000)))
    writer.close()
    writer.close()
    recording = Recording(tmp_path / "r")
    assert list(recording.events()) == polls(range(5_000))
    assert recording.header == HEADER
    assert recording.cut_bytes == 0


def test_only_its_owner_can_read_it(tmp_path):
    write(tmp_path / "r", []).close()
    assert stat.S_IMODE((tmp_path / "r").stat().st_mode) == 0o600


def test_events_reach_the_file_while_it_is_open(tmp_path):
    writer = write(tmp_path / "r", polls([1]))
    wait_until(lambda: Recording(tmp_path / "r").frames)
    assert list(Recording(tmp_path / "r").events()) == polls([1])
    writer.close()


def test_the_last_recording_is_kept(tmp_path):
    for run in range(3):
        write(tmp_path / "r", polls([run])).close()
    assert list(Recording(tmp_path / "r").events()) == polls([2])
    assert list(Recording(tmp_path / "r.1").events()) == polls([1])
    assert sorted(file.name for file in tmp_path.iterdir()) == ["r", "r.1"]


def test_a_recording_ends_at_its_size(tmp_path):
    reasons = []
    # Random bytes do not get smaller.
    events = [Event(Kind.ADMIT, (0, 0, 0), os.urandom(50_000)) for _ in range(100)]
    writer = write(tmp_path / "r", [], on_stop=reasons.append)
    for event in events:
        writer.put(pack(event))
        writer._wake.set()
        time.sleep(0.001)
    writer.close()
    assert reasons == [writer.stopped]
    assert "has reached 1 MiB" in reasons[0]
    assert (tmp_path / "r").stat().st_size <= MB
    read = list(Recording(tmp_path / "r").events())
    assert read == events[: len(read)]


def test_a_slow_disk_stops_the_recording_and_not_the_server(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "QUEUED_BYTES_MAX", 10_000)
    gate = threading.Event()
    real = os.write

    def slow(file, data):
        gate.wait()
        return real(file, data)

    reasons = []
    writer = write(tmp_path / "r", [], on_stop=reasons.append)
    monkeypatch.setattr(module.os, "write", slow)
    for event in polls(range(3_000)):
        writer.put(pack(event))  # or it would wait for ever
    gate.set()
    writer.close()
    assert reasons == [writer.stopped]
    assert "too slow" in reasons[0]
    read = list(Recording(tmp_path / "r").events())
    assert read == polls(range(len(read)))


def test_a_full_disk_is_reported(tmp_path, monkeypatch):
    reasons = []
    writer = write(tmp_path / "r", [], on_stop=reasons.append)

    def full(file, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.os, "write", full)
    writer.put(pack(polls([1])[0]))
    writer.close()
    assert reasons == [f"cannot write to {tmp_path / 'r'}: No space left on device"]


def test_a_file_that_cannot_be_made_is_reported(tmp_path):
    with pytest.raises(RecordingError, match="cannot record to"):
        write(tmp_path / "nowhere" / "r", [])


def test_file_of_a_live_recording_is_left_alone(tmp_path):
    first = write(tmp_path / "r", polls([1]))
    with pytest.raises(RecordingError, match="another process records to it; stop that one"):
        RecordingWriter(tmp_path / "r", HEADER, bytes_max=MB)
    assert len(list(tmp_path.glob("r*"))) == len(list(tmp_path.glob("r.held.*"))) + 1
    first.close()
    assert list(Recording(tmp_path / "r").events()) == polls([1])


def test_recording_that_never_begins_touches_nothing(tmp_path):
    write(tmp_path / "r", polls([1])).close()
    for path, left in ((tmp_path / "r", ["r"]), (tmp_path / "new", ["r"])):
        writer = RecordingWriter(path, HEADER, bytes_max=MB)
        writer.put(pack(polls([2])[0]))
        writer.close()
        writer.close()
        assert [file.name for file in tmp_path.iterdir()] == left
    assert list(Recording(tmp_path / "r").events()) == polls([1])


def test_events_before_the_beginning_are_recorded(tmp_path):
    (tmp_path / "r").touch(0o644)  # the file of a start that was killed
    writer = RecordingWriter(tmp_path / "r", HEADER, bytes_max=MB)
    writer.put(pack(polls([1])[0]))
    writer.begin()
    writer.close()
    assert list(Recording(tmp_path / "r").events()) == polls([1])
    assert [file.name for file in tmp_path.iterdir()] == ["r"]
    assert stat.S_IMODE((tmp_path / "r").stat().st_mode) == 0o600


def delete_all(path):
    for each in path.parent.iterdir():
        each.unlink()


@pytest.mark.parametrize(
    ("harm", "what"),
    [
        (delete_all, "deleted, with its second name"),
        (lambda path: os.truncate(path, 3), "truncated"),
    ],
)
def test_recording_that_is_harmed_ends_and_says_so(tmp_path, harm, what):
    reasons = []
    writer = write(tmp_path / "r", [], on_stop=reasons.append)
    harm(tmp_path / "r")
    writer.put(pack(polls([1])[0]))
    writer.close()
    assert reasons == [f"{tmp_path / 'r'} was {what}"]


@pytest.mark.parametrize("attack", [delete, move, rename_over])
def test_recording_that_is_taken_is_put_back_whole(tmp_path, attack):
    found = []
    writer = write(tmp_path / "r", polls([1]), on_put_back=lambda *args: found.append(args))
    wait_until(lambda: Recording(tmp_path / "r").frames)
    attack(tmp_path / "r")
    writer.put(pack(polls([2])[0]))
    writer.close()
    assert not writer.stopped
    aside = tmp_path / "r.aside" if attack is rename_over else None
    assert [each for _, each in found] == [aside]
    assert list(Recording(tmp_path / "r").events()) == polls([1, 2])
    assert not list(tmp_path.glob("r.held*"))


def recorded(path):
    writer = write(path, polls([1]))
    wait_until(lambda: Recording(path).frames)
    return writer


@pytest.mark.parametrize("attack", [delete, move, rename_over])
def test_recording_taken_and_killed_at_once_is_kept(tmp_path, attack):
    with holding(recorded, tmp_path / "r") as kill:
        attack(tmp_path / "r")
        with pytest.raises(RecordingError, match="another process records to it"):
            RecordingWriter(tmp_path / "r", HEADER, bytes_max=MB)
        kill()
    write(tmp_path / "r", polls([2])).close()
    assert list(Recording(tmp_path / "r").events()) == polls([2])
    assert list(Recording(tmp_path / "r.1").events()) == polls([1])


def test_recording_emptied_and_killed_at_once_is_reported(tmp_path):
    reports = []
    with holding(recorded, tmp_path / "r") as kill:
        os.truncate(tmp_path / "r", 0)
        kill()
    for _ in range(2):
        writer = RecordingWriter(
            tmp_path / "r", HEADER, bytes_max=MB, on_put_back=lambda *lost: reports.append(lost)
        )
        writer.begin()
        writer.close()
    assert reports == [("truncated to 0 bytes", None)]
