"""Workloads: what the tenants ask for, and when."""

from schedsvc.workload.trace import TraceError, TraceRequest, read_trace, rescale

__all__ = ["TraceError", "TraceRequest", "read_trace", "rescale"]
