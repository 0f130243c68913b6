"""Workloads: what the tenants ask for, and when."""

from schedsvc.workload.reader import FORMS, TraceReader
from schedsvc.workload.record import Message, Record, TraceError
from schedsvc.workload.trace import TraceRequest, read_trace, rescale

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
