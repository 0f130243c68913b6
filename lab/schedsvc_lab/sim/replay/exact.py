"""Replays a recording to the letter: the same calls at the same times, the same digest."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from schedsvc._core import CallerError, Decision, InvariantError, Scheduler, Session
from schedsvc.records.recording.form import Event, FormError, Kind, call_of
from schedsvc_lab.sim.replay.reader import Recording, ReplayError

__all__ = ["Exact", "Replayed", "Watcher", "recorded_core"]


class Watcher:
    """Sees the core's answers in a replay; by default it ignores them."""

    def admitted(
        self, now_ns: int, principal: int, data: bytes, queue_ttl_ns: int, answer: int | bytes
    ) -> None:
        """See the answer to a unary Admit: a handle, or a serialised AdmitResponse."""

    def decided(self, now_ns: int, decision: Decision) -> None:
        """See a verdict, or the expiry of a lease."""

    def opened(self, owner: int, principal: int) -> None:
        """See a new stream."""

    def received(self, now_ns: int, owner: int, data: bytes) -> None:
        """See a serialised SessionRequest, before the core does."""

    def taken(self, now_ns: int, owner: int, data: bytes) -> None:
        """See a serialised SessionResponse."""

    def event(self, event: Event) -> None:
        """See any other event, before the core does."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """Holds the result of a replay. All of the `checks` digests in the file were met."""

    events: int
    checks: int
    digest: int
    duration_ns: int


def recorded_core(recording: Recording) -> Scheduler:
    """Make the core as the recording's header says. Raises ReplayError."""
    header = recording.header
    try:
        core = Scheduler(**header["options"])
        for name, args, kwargs in header["setup"]:
            if not name.startswith("set_"):
                raise ValueError(f"{name} sets nothing up")
            getattr(core, name)(*args, **kwargs)
    except (ValueError, TypeError, AttributeError) as error:
        raise ReplayError(
            f"{recording.path}: its settings, of schedsvc {header.get('schedsvc')}, are not "
            f"understood here: {error}"
        ) from None
    return core


class Exact:
    """Replays a recording with its own core."""

    def __init__(self, recording: Recording, watcher: Watcher | None = None) -> None:
        """Make the core. Raises ReplayError."""
        self.recording = recording
        self.core = recorded_core(recording)
        self._watcher = Watcher() if watcher is None else watcher
        self._sessions: dict[int, Session] = {}
        self._calls: dict[Kind, Callable[..., Any]] = {
            Kind.ADMIT: self._admit,
            Kind.CANCEL: self.core.cancel,
            Kind.PROGRESS: self.core.progress,
            Kind.COMPLETE: self.core.complete,
            Kind.POLL: self._poll,
            Kind.OPEN: self._open,
            Kind.RECEIVE: self._receive,
            Kind.PART: self._receive_part,
            Kind.REST: self._receive_rest,
            Kind.TAKE: self._take,
            Kind.CLOSE: self._close,
            Kind.DRAIN: self.core.drain,
            Kind.EVICT: self.core.evict_queued,
            Kind.SET: self._set,
            Kind.REVOKE: self.core.revoke,
        }

    def run(self, watch: Callable[[int], None] | None = None) -> Replayed:
        """Replay every event; `watch` hears how many there were. O(events log n).

        Raises ReplayError if a digest differs from the recorded one, naming the event.
        """
        calls, see = self._calls, self._watcher.event
        events = checks = 0
        first_ns = last_ns = -1
        for event in self.recording.events():
            if event.kind == Kind.CHECK:
                self._check(events, event.fields[0])
                checks += 1
                if watch is not None:
                    watch(events)
                continue
            events += 1
            if event.kind != Kind.OPEN:
                last_ns = event.fields[0]
                first_ns = last_ns if first_ns < 0 else first_ns
            see(event)
            try:
                if event.data:
                    calls[event.kind](*event.fields, event.data)
                else:
                    calls[event.kind](*event.fields)
            except CallerError:
                pass  # the caller got this error in the recording, too; nothing changed
            except (InvariantError, LookupError, FormError, TypeError) as error:
                raise ReplayError(
                    f"{self.recording.path}: event {events} ({event.kind.name.lower()}): {error}"
                ) from None
        if watch is not None:
            watch(events)
        return Replayed(events, checks, self.core.digest(), last_ns - first_ns)

    def _check(self, events: int, recorded: int) -> None:
        if self.core.digest() != recorded:
            raise ReplayError(
                f"{self.recording.path}: after event {events} the digest is "
                f"{self.core.digest():016x}, recorded {recorded:016x}: this core decides otherwise "
                f"than schedsvc {self.recording.header.get('schedsvc')} did"
            )

    def _admit(self, now_ns: int, principal: int, queue_ttl_ns: int, data: bytes = b"") -> None:
        answer = self.core.admit_wire(now_ns, principal, data, queue_ttl_ns)
        self._watcher.admitted(now_ns, principal, data, queue_ttl_ns, answer)

    def _set(self, now_ns: int, data: bytes = b"") -> None:
        name, args, kwargs = call_of(data)
        getattr(self.core, name)(*args, **kwargs)

    def _poll(self, now_ns: int) -> None:
        for decision in self.core.poll(now_ns):
            self._watcher.decided(now_ns, decision)
        self.core.ready()

    def _open(self, principal: int) -> None:
        session = self.core.open_session(principal)
        self._sessions[session.owner] = session
        self._watcher.opened(session.owner, principal)

    def _receive(self, now_ns: int, owner: int, data: bytes = b"") -> None:
        self._watcher.received(now_ns, owner, data)
        self._sessions[owner].receive(now_ns, data)

    def _receive_part(self, now_ns: int, owner: int, events_max: int, data: bytes = b"") -> None:
        self._watcher.received(now_ns, owner, data)
        self._sessions[owner].receive(now_ns, data, events_max)

    def _receive_rest(self, now_ns: int, owner: int, events_max: int) -> None:
        self._sessions[owner].receive_rest(now_ns, events_max)

    def _take(self, now_ns: int, owner: int) -> None:
        data = self._sessions[owner].take(now_ns)
        if data is not None:
            self._watcher.taken(now_ns, owner, data)

    def _close(self, now_ns: int, owner: int) -> None:
        self._sessions.pop(owner).close(now_ns)
