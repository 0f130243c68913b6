"""Keeps a standby's copy of what its leader would find after a restart: rows of the state file."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import structlog
from schedsvc_client.v1 import follow_pb2 as pb

from schedsvc.cluster.leading import Campaign
from schedsvc.config.cluster import Cluster
from schedsvc.config.files import read_file
from schedsvc.driver import Leading
from schedsvc.driver.clock import boot_ns

__all__ = ["Following"]

_log = structlog.get_logger("schedsvc.cluster")

_METHOD = "/schedsvc.v1.FollowService/Follow"
_HEALTH_METHOD = "/grpc.health.v1.Health/Check"
#: A HealthCheckResponse of status SERVING, which only a leader answers for the whole process.
_SERVES = b"\x08\x01"
_HEALTH_S = 0.1
_AGAIN_S = 0.2
#: A leader sends a message at least every 100 ms.
_LIVES_NS = 1_000_000_000
_MESSAGE_BYTES_MAX = 64 << 20


class Following:
    """Follows whichever member leads."""

    def __init__(
        self,
        settings: Cluster,
        resolve: Callable[[str], Path],
        fingerprint: str,
        leading: Leading,
        campaign: Campaign,
    ) -> None:
        self._settings, self._resolve, self._fingerprint = settings, resolve, fingerprint
        self._leading, self._campaign = leading, campaign
        #: Key to value and time by the wall clock, as they were in `term`; 0: nothing is followed.
        self.rows: dict[bytes, tuple[bytes, int]] = {}
        self.operators = pb.OperatorState()
        #: The key of each place of the leader's queue, and since when it waits, by boot_ns().
        self._places: dict[int, tuple[bytes, int]] = {}
        self.term = 0
        self.problem = ""
        self._differs = False
        self._heard_ns = 0

    def leader_lives(self) -> bool:
        """Return whether the leader was heard of within the last second."""
        return boot_ns() - self._heard_ns < _LIVES_NS

    def differs(self) -> bool:
        """Return whether the last leader had other tenants or principals than this member."""
        return self._differs

    def waits(self) -> list[tuple[bytes, int]]:
        """Return the keys of what waited at the leader, and for how long by now, in ns. O(keys)."""
        now_ns = boot_ns()
        return [(key, max(0, now_ns - since_ns)) for key, since_ns in self._places.values()]

    def configured(self, fingerprint: str) -> None:
        """Follow with another configuration. O(1)."""
        if fingerprint != self._fingerprint:
            self._fingerprint, self._differs = fingerprint, False

    async def run(self) -> None:
        """Follow until cancelled."""
        while True:
            target, leader = self._leading.target, self._leading.leader
            if target and leader != self._leading.me:
                try:
                    await self._follow(target)
                except (grpc.aio.AioRpcError, OSError) as error:
                    self._failed(error)
                self._heard_ns = 0  # its stream is over
                self._leading.followed_ns = 0
            await asyncio.sleep(_AGAIN_S)

    async def serves(self, target: str) -> bool:
        """Return whether the member at a target serves as the leader now; wait 0.1 s at most."""
        try:
            async with self._channel(target) as channel:
                check = channel.unary_unary(_HEALTH_METHOD, None, None)
                answer = await check(b"", timeout=_HEALTH_S)
        except (grpc.aio.AioRpcError, OSError):
            return False
        return bool(answer == _SERVES)

    async def _follow(self, target: str) -> None:
        leader = self._settings.leader
        metadata = []
        if leader.token_file is not None:
            token = read_file(self._resolve(leader.token_file)).decode().strip()
            metadata.append(("authorization", f"Bearer {token}"))
        async with self._channel(target) as channel:
            call = channel.stream_stream(
                _METHOD,
                request_serializer=pb.FollowRequest.SerializeToString,
                response_deserializer=pb.FollowResponse.FromString,
            )(metadata=metadata)  # type: ignore[call-arg] # it writes instead
            hello = pb.FollowRequest(
                member=self._settings.member_name,
                fingerprint=self._fingerprint,
                may_lead=self._settings.role == "auto",
            )
            await call.write(hello)
            await self._take(call)

    def _channel(self, target: str) -> grpc.aio.Channel:
        options = [
            ("grpc.max_receive_message_length", _MESSAGE_BYTES_MAX),
            ("grpc.use_local_subchannel_pool", 1),
        ]
        credentials = self._credentials()
        if credentials is None:
            return grpc.aio.insecure_channel(target, options)
        return grpc.aio.secure_channel(target, credentials, options)

    def _credentials(self) -> grpc.ChannelCredentials | None:
        tls = self._settings.leader.tls
        if tls is None:
            return None
        ca, key, cert = (
            None if name is None else read_file(self._resolve(name))
            for name in (tls.ca, tls.key, tls.cert)
        )
        return grpc.ssl_channel_credentials(ca, key, cert)

    async def _take(
        self, call: "grpc.aio.StreamStreamCall[pb.FollowRequest, pb.FollowResponse]"
    ) -> None:
        rows: dict[bytes, tuple[bytes, int]] = {}
        places: dict[int, tuple[bytes, int]] = {}
        operators = pb.OperatorState()
        async for message in call:
            self._heard_ns = boot_ns()
            now_ns = time.time_ns()
            for row in message.rows:
                if row.is_gone:
                    rows.pop(row.key, None)
                else:
                    rows[row.key] = (row.value, now_ns - row.age_ns)
            for place in message.places:
                if place.key:
                    places[place.number] = place.key, self._heard_ns - place.waited_ns
                else:
                    places.pop(place.number, None)
            if message.HasField("operators"):
                operators = message.operators
            stated = message.leadership
            if stated.term and not self._campaign.follow(stated.term, stated.leader):
                return
            self._differs = False
            if message.is_whole:
                if self.term != stated.term:
                    _log.info("following", leader=stated.leader, term=stated.term, rows=len(rows))
                self.rows, self.operators, self.term = rows, operators, stated.term
                self._places, self._leading.followed_places = places, len(places)
                self._leading.heard_ns = self._heard_ns
                self._leading.followed_ns = self._leading.followed_ns or self._heard_ns
                self.problem = ""
            if message.asked_ns:
                promises = self._campaign.promise()
                await call.write(pb.FollowRequest(asked_ns=message.asked_ns, promises=promises))
            if message.hands_over:
                self._heard_ns = 0
                self._campaign.handed_over(stated.term)

    def _failed(self, error: Exception) -> None:
        reason = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
        if isinstance(error, grpc.aio.AioRpcError):
            self._differs |= error.code() == grpc.StatusCode.FAILED_PRECONDITION
        if reason != self.problem:
            _log.warning("not_following", reason=reason)
        self.problem = reason or ""
