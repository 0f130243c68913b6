# C types for `scheduler_adapter.py`.

cimport cython

from schedsvc_lab.sim.runner cimport Report

cdef int CANCELLED, COMPLETED, EXPIRED, GRANTED
cdef object progress_all, promised_tokens

cdef class Verdict:
    cdef readonly Py_ssize_t request, pool
    cdef readonly int outcome

cdef class Telemetry:
    cdef readonly long long running, waiting, used_tokens, preemptions

cdef class SchedulerAdapter:
    cdef readonly bint listens
    cdef public long long expired

    cpdef arrive(self, long long now_ns, Py_ssize_t index)
    cpdef progress(self, long long now_ns, Report report)
    cpdef complete(
        self, long long now_ns, Py_ssize_t index, bint served=*, long long cached_tokens=*
    )
    cpdef telemetry(self, long long now_ns, Py_ssize_t pool, Telemetry told)
    cpdef list poll(self, long long now_ns)
    cpdef long long next_ns(self) except? -2
    cpdef reserved_tokens(self, long long now_ns)
    cpdef check(self, long long now_ns, bint ended)

cdef class CoreAdapter(SchedulerAdapter):
    cdef readonly object core
    cdef object _core_poll, _core_next
    cdef list _epochs
    cdef readonly object _requests
    cdef object _prompt_tokens, _output_tokens, _contents, _flows, _told, _deadlines, _sessions
    cdef long long _output_tokens_max
    cdef bint _prefixes
    cdef dict _classes
    cdef readonly dict _leases
    cdef tuple _reported
    cdef bytes _reported_leases
    cdef list _refused

    cpdef long long _admit(
        self, long long now_ns, long long flow, Py_ssize_t index, bytes request_class
    ) except? -2
    cdef bytes _adapter(self, Py_ssize_t index)
    cdef bytes _session(self, Py_ssize_t index)
    cdef tuple _hashes(self, Py_ssize_t index)
    cdef bytes _class_of(self, Py_ssize_t index)

cdef class DirectAdapter(SchedulerAdapter):
    cdef object _runners
    cdef list _added, _verdicts
    cdef dict _pool_of
