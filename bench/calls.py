"""Unary calls, one after the other, to the scheduler and to the echo."""

import time
from types import TracebackType

import grpc
import numpy as np
from schedsvc_client.v1 import scheduler_pb2 as pb

from bench.echo import ANSWER_METHOD
from bench.messages import INPUT_TOKENS, OUTPUT_TOKENS, admits
from bench.peers import FLOWS, Peer
from schedsvc.service import SERVICE_NAME

__all__ = ["Admits", "give_answer"]

#: A server drops calls at random if more than a thousand are unread.
_AT_ONCE = 200


def _method(channel: grpc.Channel, name: str) -> "grpc.UnaryUnaryMultiCallable[bytes, bytes]":
    return channel.unary_unary(name, request_serializer=None, response_deserializer=None)


def give_answer(peer: Peer, answer: bytes) -> None:
    """Set the answer that an echo gives from now on."""
    with grpc.insecure_channel(peer.unix) as channel:
        _method(channel, ANSWER_METHOD)(answer)


def _complete(answer: bytes) -> bytes:
    """Return the CompleteRequest for the lease of an AdmitResponse."""
    verdict = pb.AdmitResponse.FromString(answer)
    if not verdict.grant.lease_id:
        raise ValueError(f"not granted: {verdict}")
    request = pb.CompleteRequest(
        lease_id=verdict.grant.lease_id,
        pool_epoch=verdict.grant.pool_epoch,
        input_tokens=INPUT_TOKENS,
        output_tokens=OUTPUT_TOKENS,
    )
    return request.SerializeToString()


class Admits:
    """Calls Admit on one target, over a channel of its own."""

    def __init__(self, peer: Peer, target: str, *, is_scheduler: bool) -> None:
        self._peer = peer
        self._channel = grpc.insecure_channel(target)
        self.admit = _method(self._channel, f"/{SERVICE_NAME}/Admit")
        self._complete = _method(self._channel, f"/{SERVICE_NAME}/Complete")
        self._is_scheduler = is_scheduler
        self._requests = admits(FLOWS)
        #: Round trips of all slices, in ns.
        self.spent_ns: list[int] = []

    def __enter__(self) -> "Admits":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._channel.close()

    def next_request(self) -> bytes:
        """Return a serialised AdmitRequest that was not sent before."""
        return next(self._requests)

    def end(self, answers: list[bytes]) -> None:
        """End the leases that were granted. Raises ValueError if one was not."""
        if not self._is_scheduler:
            return
        for start in range(0, len(answers), _AT_ONCE):
            calls = [
                self._complete.future(_complete(answer))
                for answer in answers[start : start + _AT_ONCE]
            ]
            for call in calls:
                call.result()

    def slice(self, calls: int) -> list[float]:
        """Return the median round trip and the server's CPU time a call, in ns."""
        requests = [self.next_request() for _ in range(calls)]
        admit, clock = self.admit, time.perf_counter_ns
        answers, spent_ns = [], []
        cpu_ns = self._peer.cpu_ns()
        for request in requests:
            began_ns = clock()
            answer = admit(request)
            spent_ns.append(clock() - began_ns)
            answers.append(answer)
        cpu_ns = self._peer.cpu_ns() - cpu_ns
        self.end(answers)
        self.spent_ns += spent_ns
        return [float(np.median(spent_ns)), cpu_ns / calls]
