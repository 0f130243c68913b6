"""Builds AdmitRequests, with request ids that are unique for this process."""

from __future__ import annotations

import hashlib
import itertools
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import grpc

from schedsvc_client import wire
from schedsvc_client.errors import InvalidRequest, Violation
from schedsvc_client.v1 import scheduler_pb2 as pb

A = TypeVar("A")
M = TypeVar("M")

#: The most of one request; the scheduler refuses more.
PREFIX_HASHES_MAX = 4_096


class RequestIds:
    """Makes ids that no other process, forked or not, and no other object makes.

    An id is 64 random bits, the process, and a number.
    """

    def __init__(self) -> None:
        self._prefix = secrets.token_hex(8)
        self._numbers = itertools.count(1)

    def next(self) -> str:
        """Make a new id."""
        return f"{self._prefix}-{os.getpid():x}-{next(self._numbers)}"


class Asked:
    """Holds an AdmitRequest as its bytes, which is all that most requests need of it."""

    __slots__ = ("_message", "encoded", "request_id")

    def __init__(self, request_id: str, encoded: bytes) -> None:
        self.request_id, self.encoded = request_id, encoded
        self._message: pb.AdmitRequest | None = None

    @classmethod
    def of(cls, message: pb.AdmitRequest) -> Asked:
        """Return a message's own. It must not be changed afterwards."""
        return cls(message.request_id, message.SerializeToString())

    @property
    def message(self) -> pb.AdmitRequest:
        """Return the message. O(bytes) the first time."""
        if self._message is None:
            self._message = pb.AdmitRequest.FromString(self.encoded)
        return self._message


def api_key_hash(api_key: str) -> bytes:
    """Return an API key's SHA-256 (32 bytes). Clients send it and never the key."""
    return hashlib.sha256(api_key.encode()).digest()


def admit_request(
    *,
    request_id: str,
    input_tokens: Sequence[int] | int,
    max_output_tokens: int,
    n: int = 1,
    tenant: str = "",
    api_key_sha256: bytes = b"",
    pools: Sequence[str] = (),
    adapter: str = "",
    request_class: str = "",
    prefix_block_hashes: Sequence[int] = (),
    deadline_ms: int = 0,
    queue_ttl_ms: int = 0,
    reports_progress: bool = True,
    whole_answer: bool = False,
    input_estimated: bool | None = None,
    tenant_proof: int = 0,
    client_request_id: str = "",
    session: str = "",
) -> Asked:
    """Write the message of one request. `input_tokens`: of each prompt, or of the one.

    `pools`: those in which it may run; empty: any.
    `input_estimated` False: they are counted as the engine counts; see AdmitRequest.
    `tenant_proof`: how the caller knows the name in `tenant`, a TenantProof.
    `client_request_id`: another id by which `schedsvc why` finds it.

    Raises InvalidRequest, naming the field, if a value does not fit its type on the wire, or if
    there are more hashes than a message may have room for; the scheduler judges everything else.
    """
    prompts = (input_tokens,) if isinstance(input_tokens, int) else input_tokens
    try:
        encoded = wire.admit_request(
            request_id, tenant, api_key_sha256, pools, prompts, n, max_output_tokens,
            prefix_block_hashes, adapter, request_class, deadline_ms, queue_ttl_ms,
            reports_progress, input_estimated, tenant_proof, whole_answer, client_request_id,
            session,
        )  # fmt: skip
    except wire.ODD:
        presence = {} if input_estimated is None else {"input_estimated": input_estimated}
        encoded = message_of(
            pb.AdmitRequest,
            request_id=request_id,
            tenant=tenant,
            api_key_sha256=api_key_sha256,
            pools=pools,
            input_tokens=prompts,
            n=n,
            max_output_tokens=max_output_tokens,
            prefix_block_hashes=prefix_block_hashes,
            adapter=adapter,
            request_class=request_class,
            deadline_ms=deadline_ms,
            queue_ttl_ms=queue_ttl_ms,
            reports_progress=reports_progress,
            tenant_proof=tenant_proof,
            whole_answer=whole_answer,
            client_request_id=client_request_id,
            session=session,
            **presence,
        ).SerializeToString()
    if (hashes := len(prefix_block_hashes)) > PREFIX_HASHES_MAX:
        text = f"has {hashes:,} hashes; at most {PREFIX_HASHES_MAX:,} are allowed"
        raise _invalid("prefix_block_hashes", text)
    return Asked(request_id, encoded)


def message_of(kind: Callable[..., M], **values: Any) -> M:
    """Return a message. Raises InvalidRequest that names a value which does not fit its field.

    None does not: protobuf would send the default instead.
    """
    for field, value in values.items():
        if value is None:
            raise _invalid(field, "is None; it has to have a value")
    if isinstance(values.get("pools"), str):  # protobuf would take its letters for names
        raise _invalid("pools", "is a string; give a sequence of names")
    try:
        return kind(**values)
    except (TypeError, ValueError):
        raise _misfit(kind, values) from None


def _misfit(kind: Callable[..., object], values: Mapping[str, Any]) -> InvalidRequest:
    """Say which value does not fit, and why."""
    for field, value in values.items():
        try:
            kind(**{field: value})
        except (TypeError, ValueError) as error:
            return _invalid(field, str(error))
    raise AssertionError("every value fits by itself")


def _invalid(field: str, text: str) -> InvalidRequest:
    return InvalidRequest(
        grpc.StatusCode.INVALID_ARGUMENT, f"{field}: {text}", violations=(Violation(field, text),)
    )


class Asker(Generic[A]):
    """Makes Admissions: the common part of all clients."""

    def __init__(self) -> None:
        self._ids = RequestIds()

    def _admission(self, asked: Asked) -> A:
        raise NotImplementedError

    def admission(
        self,
        *,
        input_tokens: Sequence[int] | int,
        max_output_tokens: int,
        n: int = 1,
        tenant: str = "",
        api_key_sha256: bytes = b"",
        pools: Sequence[str] = (),
        adapter: str = "",
        request_class: str = "",
        prefix_block_hashes: Sequence[int] = (),
        deadline_ms: int = 0,
        queue_ttl_ms: int = 0,
        request_id: str | None = None,
        reports_progress: bool = True,
        whole_answer: bool = False,
        input_estimated: bool | None = None,
        tenant_proof: int = 0,
        client_request_id: str = "",
        session: str = "",
    ) -> A:
        """Prepare one request; see schedsvc.v1.AdmitRequest for the fields. Enter it to ask.

        Raises InvalidRequest, naming the field, if a value does not fit the wire.
        """
        asked = admit_request(
            request_id=request_id or self._ids.next(),
            input_tokens=input_tokens,
            max_output_tokens=max_output_tokens,
            n=n,
            tenant=tenant,
            api_key_sha256=api_key_sha256,
            pools=pools,
            adapter=adapter,
            request_class=request_class,
            prefix_block_hashes=prefix_block_hashes,
            deadline_ms=deadline_ms,
            queue_ttl_ms=queue_ttl_ms,
            reports_progress=reports_progress,
            whole_answer=whole_answer,
            input_estimated=input_estimated,
            tenant_proof=tenant_proof,
            client_request_id=client_request_id,
            session=session,
        )
        return self._admission(asked)
