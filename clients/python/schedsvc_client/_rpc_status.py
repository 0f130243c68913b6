"""Reads `google.rpc.Status` details out of a failed call's trailing metadata.

The three messages of google.rpc that the scheduler sends are declared here, in a private
descriptor pool: the package that ships them is no dependency of an engine host.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from google.protobuf import descriptor_pb2, descriptor_pool, message, message_factory

_DETAILS_KEY = "grpc-status-details-bin"
_FIELD = descriptor_pb2.FieldDescriptorProto
# message -> (field, number, type, repeated, type name)
_SCHEMA: dict[str, tuple[tuple[str, int, int, bool, str], ...]] = {
    "Packed": (
        ("type_url", 1, _FIELD.TYPE_STRING, False, ""),
        ("value", 2, _FIELD.TYPE_BYTES, False, ""),
    ),
    "Status": (
        ("code", 1, _FIELD.TYPE_INT32, False, ""),
        ("message", 2, _FIELD.TYPE_STRING, False, ""),
        ("details", 3, _FIELD.TYPE_MESSAGE, True, "Packed"),
    ),
    "FieldViolation": (
        ("field", 1, _FIELD.TYPE_STRING, False, ""),
        ("description", 2, _FIELD.TYPE_STRING, False, ""),
    ),
    "BadRequest": (("field_violations", 1, _FIELD.TYPE_MESSAGE, True, "FieldViolation"),),
    "Duration": (
        ("seconds", 1, _FIELD.TYPE_INT64, False, ""),
        ("nanos", 2, _FIELD.TYPE_INT32, False, ""),
    ),
    "RetryInfo": (("retry_delay", 1, _FIELD.TYPE_MESSAGE, False, "Duration"),),
}
_PACKAGE = "schedsvc_client.rpc_status"


def _message_classes() -> dict[str, type[Any]]:
    """Build the message classes of `_SCHEMA`."""
    file = descriptor_pb2.FileDescriptorProto(
        name="schedsvc_client/rpc_status.proto", package=_PACKAGE, syntax="proto3"
    )
    for name, fields in _SCHEMA.items():
        declared = file.message_type.add(name=name)
        for field, number, kind, repeated, of in fields:
            added = declared.field.add(name=field, number=number)
            added.type = _FIELD.Type.ValueType(kind)
            added.label = _FIELD.LABEL_REPEATED if repeated else _FIELD.LABEL_OPTIONAL
            if of:
                added.type_name = f".{_PACKAGE}.{of}"
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))
        for name in _SCHEMA
    }


_CLASSES = _message_classes()


class Violation(NamedTuple):
    """Names one field of a call that was wrong."""

    field: str
    description: str


class Details(NamedTuple):
    """Holds the details of a failed call."""

    violations: tuple[Violation, ...] = ()
    retry_after_ms: int = 0


def read_details(metadata: Iterable[tuple[str, Any]] | None) -> Details:
    """Read BadRequest and RetryInfo; empty where there are none or they cannot be read."""
    for key, value in metadata or ():
        if key == _DETAILS_KEY and isinstance(value, bytes):
            try:
                return _unpack(value)
            except message.DecodeError:
                return Details()
    return Details()


def _unpack(data: bytes) -> Details:
    violations: list[Violation] = []
    retry_after_ms = 0
    for packed in _CLASSES["Status"].FromString(data).details:
        kind = packed.type_url.rpartition("/")[2]
        if kind == "google.rpc.BadRequest":
            bad = _CLASSES["BadRequest"].FromString(packed.value)
            violations += [Violation(v.field, v.description) for v in bad.field_violations]
        elif kind == "google.rpc.RetryInfo":
            delay = _CLASSES["RetryInfo"].FromString(packed.value).retry_delay
            retry_after_ms = delay.seconds * 1_000 + delay.nanos // 1_000_000
    return Details(tuple(violations), retry_after_ms)
