"""Describes workloads: what the tenants ask for, and when."""

from schedsvc_lab.workload.reader import FORMS, TraceReader
from schedsvc_lab.workload.record import Message, Record, TraceError
from schedsvc_lab.workload.trace import TraceRequest, read_trace, rescale

__all__ = [
    "FORMS",
    "Message",
    "Record",
    "TraceError",
    "TraceReader",
    "TraceRequest",
    "read_trace",
    "rescale",
]
