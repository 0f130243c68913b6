"""Reports the engine beside a session: its pool and its telemetry."""

from __future__ import annotations

from schedsvc_client.aio.session_writer import Alarm
from schedsvc_client.requests import message_of
from schedsvc_client.session_protocol import SessionProtocol
from schedsvc_client.v1 import pool_pb2


class EngineReports:
    """Keeps the part of a session that describes an engine."""

    _protocol: SessionProtocol
    _wake: Alarm

    def register_pool(
        self,
        *,
        pool: str,
        epoch: int,
        capacity_tokens: int,
        block_size_tokens: int,
        max_running: int = 0,
        max_model_tokens: int = 0,
        gates: int = 1,
    ) -> None:
        """Offer the engine's KV cache, now and on every new stream.

        `gates`: how many sessions offer this pool, one for each API process of the engine.
        """
        registration = message_of(
            pool_pb2.PoolRegistration,
            pool=pool,
            epoch=epoch,
            capacity_tokens=capacity_tokens,
            block_size_tokens=block_size_tokens,
            max_running=max_running,
            max_model_tokens=max_model_tokens,
            gates=gates,
        )
        self._protocol.register_pool(registration)
        self._wake.set()

    def telemetry(
        self,
        *,
        pool: str,
        epoch: int,
        running: int,
        waiting: int,
        used_tokens: int,
        preemptions: int,
    ) -> None:
        """Report what the engine says of itself; dropped while there is no stream."""
        report = message_of(
            pool_pb2.EngineTelemetry,
            pool=pool,
            epoch=epoch,
            running=running,
            waiting=waiting,
            used_tokens=used_tokens,
            preemptions=preemptions,
        )
        self._protocol.telemetry(report)
        self._wake.set()
