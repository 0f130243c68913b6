"""Serves one connection: bytes to nghttp2 and back, and a call for each stream."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import ngh2

from schedsvc.transport.call import Call, Details
from schedsvc.transport.certificate import auth_context_of
from schedsvc.transport.link import Bounds, Link
from schedsvc.transport.sockets import peer_name
from schedsvc.transport.wire import (
    Fields,
    Values,
    WireError,
    status_fields,
    timeout_s,
)

__all__ = ["Connection"]

#: The window of a stream bounds what a caller can send before its handler reads. That of a
#: connection bounds all its streams together.
_STREAM_WINDOW, _CONNECTION_WINDOW = 65_535, 1 << 20
#: SETTINGS names the first. A request with more than the second ends its connection.
_HEADERS_TOLD, _HEADERS_MAX, _HEADERS_COUNT_MAX = 16_384, 32_768, 256
_CONTINUATIONS_MAX = 8
#: RST_STREAM frames: at once, and a second. A client that cancels more loses its connection.
_RESETS = (2_000, 500)
#: Other frames that cost more than they help: at once, and a second.
_GLITCHES = (1_000, 100)
_ACKS_MAX = 1_000
_FRAME_BYTES = 16_384
#: Bytes that are handed to the socket at a time.
_PULL = 1 << 18
_PING_ALIVE, _PING_DRAIN = b"alive?\0\0", b"drained\0"
_OK_HEADERS: Fields = (
    (b":status", b"200"),
    (b"content-type", b"application/grpc"),
    (b"grpc-accept-encoding", b"identity"),
)
_NOT_POST: Fields = ((b":status", b"405"), (b"allow", b"POST"))
_NOT_GRPC: Fields = ((b":status", b"415"),)
_CONTENT_TYPE = b"application/grpc"
_UNIMPLEMENTED, _INTERNAL = 12, 13

_CONFIGURATION = ngh2.Configuration(
    auto_window_update=False,
    max_outbound_ack=_ACKS_MAX,
    stream_reset_rate_limit=_RESETS,
    glitch_rate_limit=_GLITCHES,
    max_continuations=_CONTINUATIONS_MAX,
    max_inbound_header_list_size=_HEADERS_MAX,
    max_inbound_header_count=_HEADERS_COUNT_MAX,
)


class Connection(Link):
    """Speaks HTTP/2 with one peer."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        bounds: Bounds,
        find: Callable[[Details], Any],
        ended: Callable[["Connection"], None],
    ) -> None:
        """Serve calls by the handlers that `find` returns; `ended` hears of the end."""
        self.loop = loop
        self.bounds = bounds
        #: gRPC's name for the peer.
        self.peer = ""
        #: The names of the client's certificate.
        self.auth_context = {}
        self.writers = set()
        self._find, self._ended = find, ended
        self._h2 = ngh2.Connection(ngh2.Role.SERVER, _CONFIGURATION)
        self._transport: Any = None
        self._calls: dict[int, Call] = {}
        #: Streams that are answered, and whose peer may still send.
        self._half_open: set[int] = set()
        #: Streams that join those with the next flush.
        self._answering: list[int] = []
        self._is_paused = False
        self._is_receiving = False
        self._is_greeted = False  # has the peer's settings
        self._is_draining = self._is_drained = False
        self._began_s = self._heard_s = self._used_s = self._widened_s = loop.time()
        times_s = (bounds.handshake_s, bounds.keepalive_s, bounds.idle_s, bounds.write_stall_s)
        #: There are many connections, so each looks no more often than its shortest time asks.
        self._look_s = min(times_s)
        self._asked_s: float | None = None  # when the ping was sent that has no answer
        self._timer: asyncio.TimerHandle | None = None

    # For the event loop.

    def connection_made(self, transport: Any) -> None:
        """Greet the peer."""
        self._transport = transport
        secure = transport.get_extra_info("ssl_object")
        if secure is not None and secure.selected_alpn_protocol() != "h2":
            transport.abort()
            return
        self.peer = peer_name(transport.get_extra_info("peername"))
        if secure is not None:
            self.auth_context = auth_context_of(secure.getpeercert())
        setting = ngh2.Setting
        self._h2.initiate_connection(
            {
                setting.MAX_CONCURRENT_STREAMS: self.bounds.streams_max,
                setting.INITIAL_WINDOW_SIZE: _STREAM_WINDOW,
                setting.MAX_FRAME_SIZE: _FRAME_BYTES,
                setting.MAX_HEADER_LIST_SIZE: _HEADERS_TOLD,
            }
        )
        self._h2.set_local_window_size(_CONNECTION_WINDOW)
        self._timer = self.loop.call_later(self._look_s, self._look)
        self.flush()

    def data_received(self, data: bytes) -> None:
        """Take bytes of the peer. O(bytes)."""
        if self._transport is None:
            return
        self._heard_s, self._asked_s = self.loop.time(), None
        self._is_receiving = True
        try:
            self._h2.receive_data(data)
            self._take_events()
        except ngh2.NGH2Error:
            # It broke the protocol in a way that nghttp2 does not survive, or a bound.
            self.abort()
            return
        finally:
            self._is_receiving = False
        self.flush()

    def eof_received(self) -> bool:
        """Close, as a peer that sends nothing more can have no answer taken."""
        return False

    def pause_writing(self) -> None:
        """Leave answers with nghttp2 while the socket is full."""
        self._is_paused = True

    def resume_writing(self) -> None:
        """Go on writing."""
        self._is_paused = False
        self.flush()
        self._resume_writers()

    def connection_lost(self, error: Exception | None) -> None:
        """End all calls."""
        self._transport = None
        if self._timer is not None:
            self._timer.cancel()
        calls, self._calls = list(self._calls.values()), {}
        for call in calls:
            call.closed()
        self._ended(self)

    # For calls.

    def consumed(self, stream_id: int, size: int) -> None:
        """Give the peer new window for what was read; the next flush sends it."""
        if self._transport is None or not size:
            return
        try:
            self._h2.acknowledge_received_data(size, stream_id)
        except ngh2.NGH2Error:
            return  # stream or connection end in this moment, here and below

    def send_headers(self, stream_id: int, fields: Fields) -> None:
        """Begin an answer."""
        if self._transport is None:
            return
        try:
            self._h2.send_response(stream_id, _OK_HEADERS + fields if fields else _OK_HEADERS)
        except ngh2.NGH2Error:
            return

    def send_data(self, stream_id: int, data: bytes) -> None:
        """Send bytes of an answer, which wait for window if need be."""
        if self._transport is None:
            return
        try:
            self._h2.send_data(stream_id, data)
        except ngh2.NGH2Error:
            return

    def finish(
        self,
        stream_id: int,
        is_half_open: bool,
        code: int,
        message: str,
        metadata: Sequence[tuple[str, Values]],
        has_headers: bool,
    ) -> None:
        """Send the status of a call; `is_half_open`: its peer may send more."""
        if self._transport is None:
            return
        try:
            trailers = status_fields(code, message, metadata)
            if not has_headers:
                self._h2.send_response(stream_id, _OK_HEADERS + trailers, end_stream=True)
            else:
                self._h2.send_trailers(stream_id, trailers)
            if is_half_open and (not has_headers or self.room(stream_id)):
                self._answering.append(stream_id)
        except ngh2.NGH2Error:
            return

    def room(self, stream_id: int) -> int:
        """Return how many bytes of an answer can be sent now; 0 while the socket is full. O(1)."""
        h2 = self._h2
        if self._transport is None or self._is_paused:
            return 0
        try:
            window = min(h2.remote_window_size, h2.stream_remote_window_size(stream_id))
        except ngh2.NGH2Error:  # it was closed in this moment
            return 0
        return max(0, window - h2.queued_body_size())

    def flush(self) -> None:
        """Write what nghttp2 has, unless the socket is full. O(bytes)."""
        if self._is_receiving:
            return
        try:
            self._write()
        except ngh2.NGH2Error:
            self.abort()

    def _write(self) -> None:
        h2 = self._h2
        while self._transport is not None and not self._is_paused:
            data = h2.data_to_send(_PULL)
            if data:
                self._transport.write(data)
            self._take_events()
            if len(data) < _PULL:
                break
        if self._answering and not self._is_paused:
            self._half_open.update(self._answering)
            self._answering.clear()
        if self._is_drained and not self._calls and self._transport is not None:
            self._transport.close()

    def _reset(self, call: Call, code: int) -> None:
        self._half_open.discard(call.stream_id)
        self._h2.reset_stream(call.stream_id, code)

    # Events of nghttp2.

    def _take_events(self) -> None:
        wider = False
        while events := self._h2.events():
            # A call that is reset already needs no answer.
            gone = {event.stream_id for event in events if isinstance(event, ngh2.StreamReset)}
            event: Any
            for event in events:
                kind = type(event)
                if gone and kind is ngh2.RequestReceived and event.stream_id in gone:
                    continue
                if kind is ngh2.RequestReceived:
                    self._on_request(event)
                elif kind is ngh2.DataReceived:
                    self._on_data(event.stream_id, event.data, event.end_stream)
                elif kind is ngh2.StreamClosed:
                    self._on_closed(event.stream_id)
                elif kind is ngh2.WindowUpdated:
                    wider = True
                elif kind is ngh2.TrailersReceived:
                    self._on_data(event.stream_id, b"", True)
                elif kind is ngh2.SettingsReceived:
                    # They may have widened every window.
                    self._is_greeted = wider = True
                elif kind is ngh2.PingAcknowledged:
                    if event.opaque_data == _PING_DRAIN:
                        self._last_goaway()
                elif kind is ngh2.ConnectionClosed:
                    self._on_connection_closed()
        if wider:
            self._widened_s = self._heard_s
            if self.writers:
                # The flush that follows first sends bytes that wait in nghttp2.
                self.loop.call_soon(self._resume_writers)

    def _on_request(self, event: Any) -> None:
        fields, stream_id = event.headers, event.stream_id
        self._used_s = self._heard_s
        path, timeout, coding, refusal = _head_of(fields)
        call = self._calls[stream_id] = Call(self, stream_id, fields, path)
        if refusal:
            call.end()
            self._h2.send_response(stream_id, refusal, end_stream=True)
            return
        if coding not in (b"", b"identity"):
            call.fail(_UNIMPLEMENTED, "no coding of messages is supported but identity")
            return
        try:
            handler = self._find(Details(call))
            seconds = timeout_s(timeout) if timeout else None
        except WireError as error:
            call.fail(_INTERNAL, str(error))
            return
        if handler is None:
            call.fail(_UNIMPLEMENTED, "Method not found!")
            return
        call.open(handler, seconds)
        if event.end_stream:
            call.receive(b"", True)

    def _on_data(self, stream_id: int, data: bytes, is_last: bool) -> None:
        call = self._calls.get(stream_id)
        if call is None:
            self.consumed(stream_id, len(data))
            return
        if stream_id in self._half_open and not is_last:
            # Not with the answer: grpcio's client may then lose the status.
            self._reset(call, ngh2.ErrorCode.NO_ERROR)
        call.receive(data, is_last)

    def _on_closed(self, stream_id: int) -> None:
        self._half_open.discard(stream_id)
        call = self._calls.pop(stream_id, None)
        if call is not None:
            call.closed()
        self._used_s = self._heard_s

    def _resume_writers(self) -> None:
        for call in list(self.writers):
            if self.room(call.stream_id):
                call.resume()

    def _on_connection_closed(self) -> None:
        transport = self._transport
        if transport is not None:
            self.loop.call_soon(transport.close)

    # Time.

    def _look(self) -> None:
        """Close, ask or drop what is due; else look again when something may be."""
        if self._transport is None:
            return
        try:
            self._look_now()
        except ngh2.NGH2Error:
            self.abort()
        self.flush()

    def _look_now(self) -> None:
        now_s, bounds = self.loop.time(), self.bounds
        due_s = now_s + self._look_s
        if not self._is_greeted:
            due_s = min(due_s, self._began_s + bounds.handshake_s)
        elif self._asked_s is not None:
            due_s = min(due_s, self._asked_s + bounds.keepalive_timeout_s)
        if due_s <= now_s:
            self.abort()
            return
        if self._asked_s is None:
            if now_s >= self._heard_s + bounds.keepalive_s:
                self._asked_s = now_s
                self._h2.ping(_PING_ALIVE)
                due_s = min(due_s, now_s + bounds.keepalive_timeout_s)
            else:
                due_s = min(due_s, self._heard_s + bounds.keepalive_s)
        idle_s = 0.0 if self._calls else now_s - self._used_s
        if self._is_draining and idle_s >= 2 * bounds.idle_s:
            self.abort()  # it was asked to go
        elif idle_s >= bounds.idle_s:
            self.drain()
        self._drop_stalled(now_s - bounds.write_stall_s)
        self._timer = self.loop.call_at(due_s, self._look)

    def _drop_stalled(self, before_s: float) -> None:
        """Reset calls that ended before a time, if the peer took nothing since. O(calls)."""
        if self._widened_s > before_s:
            return
        for call in list(self._calls.values()):
            if call.is_over and call.over_s <= before_s:
                is_answered = call.stream_id in self._half_open
                code = ngh2.ErrorCode.NO_ERROR if is_answered else ngh2.ErrorCode.CANCEL
                self._reset(call, code)

    # The end.

    def drain(self) -> None:
        """Ask the peer for no more calls; close once those that it has sent are answered."""
        if self._transport is None or self._is_draining:
            return
        self._is_draining = True
        try:
            self._h2.send_shutdown_notice()
            # nghttp2 sends a ping before all else. This one has to come after the notice: then its
            # answer says that the peer knows, and that what the peer sent before is here.
            self._transport.write(self._h2.data_to_send())
            self._h2.ping(_PING_DRAIN)
        except ngh2.NGH2Error:
            self.abort()
        self.flush()

    def _last_goaway(self) -> None:
        if not self._is_drained:
            self._is_drained = True
            self._h2.send_goaway()

    def close(self) -> None:
        """End all calls, send the peer a GOAWAY, and close."""
        if self._transport is None:
            return
        transport, calls = self._transport, list(self._calls.values())
        try:
            self._h2.terminate_connection()
            self.flush()
        except ngh2.NGH2Error:
            self.abort()
        for call in calls:
            call.closed()
        transport.close()

    def abort(self) -> None:
        """Drop the connection, with what is not written yet."""
        if self._transport is not None:
            self._transport.abort()


def _head_of(fields: Fields) -> tuple[bytes, bytes, bytes, Fields]:
    """Return path, grpc-timeout and grpc-encoding of a request, and the answer if it is no call."""
    path = timeout = coding = kind = b""
    method = b"POST"
    for name, value in fields:
        if name == b":path":
            path = value
        elif name == b":method":
            method = value
        elif name == b"content-type":
            kind = value
        elif name == b"grpc-timeout":
            timeout = value
        elif name == b"grpc-encoding":
            coding = value
    if method != b"POST":
        return path, timeout, coding, _NOT_POST
    if not kind.startswith(_CONTENT_TYPE) or kind[len(_CONTENT_TYPE) :][:1] not in b"+;":
        return path, timeout, coding, _NOT_GRPC
    return path, timeout, coding, ()
