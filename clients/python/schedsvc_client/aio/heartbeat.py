"""Lets a Pulse run in the event loop, while a stream is open."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from schedsvc_client.errors import CallError, silent, unavailable
from schedsvc_client.pulse import Pulse


class Heartbeat:
    """Sends beats, and says when the scheduler falls silent and when it answers again."""

    def __init__(
        self,
        bound_s: float,
        send: Callable[[], None],
        changed: Callable[[], None],
        *,
        hangs_up: bool = False,
    ) -> None:
        """`send` sends one beat; `changed` is called when `is_silent` has changed by itself.

        `hangs_up`: a stream that falls silent is dead, because another scheduler may lead.
        """
        self._bound_s, self._hangs_up = bound_s, hangs_up
        self._pulse = Pulse(int(bound_s * 1e9))
        self._died = asyncio.Event()
        self._send, self._changed = send, changed
        self._timer: asyncio.TimerHandle | None = None
        self._beats = 0

    async def death(self) -> CallError:
        """Wait until the stream is dead; return that as an error.

        It brought nothing for twice the bound (if it hangs up: for the bound). Its connection may
        be dead, which gRPC's own pings find after 20 s.
        """
        self._died.clear()
        await self._died.wait()
        if self._hangs_up:
            return silent(f"no answer for {self._bound_s:g} s")
        return unavailable("no sign of life on this connection; another one is tried")

    @property
    def is_silent(self) -> bool:
        """Return whether the scheduler gave no sign of life for the bound, and is not back yet."""
        return self._pulse.is_silent

    def begin(self, *, beats: bool) -> None:
        """Begin with a stream that was welcomed; `beats`: its scheduler acknowledges them."""
        self._pulse.begin(time.monotonic_ns(), beats=beats)
        self._run(0.0)

    def end(self) -> None:
        """End with the stream. If it hangs up, the next stream is judged by itself."""
        self._pulse.end()
        if self._hangs_up:
            self._pulse = Pulse(int(self._bound_s * 1e9))
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def heard(self, beats: int) -> None:
        """Take note of a message; `beats` is the number that have been acknowledged in all."""
        pulse = self._pulse
        was_silent = pulse.is_silent
        is_beat, self._beats = beats > self._beats, beats
        if pulse.heard(time.monotonic_ns(), beat=is_beat):
            self._run(0.0)
        if not self._hangs_up and pulse.is_silent is not was_silent:
            self._changed()

    def _run(self, delay_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._pulse.runs:
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._tick)

    def _tick(self) -> None:
        was_silent = self.is_silent
        if self._pulse.tick(time.monotonic_ns()):
            self._send()
        self._run(self._pulse.step_ns / 1e9)
        if self._pulse.is_dead or (self._hangs_up and self._pulse.is_silent):
            self._died.set()
        if not self._hangs_up and self.is_silent is not was_silent:
            self._changed()
