# C types for `world.py`.

cimport cython

from schedsvc_lab.sim.runner cimport EngineRunner, Report
from schedsvc_lab.sim.scheduler_adapter cimport SchedulerAdapter, Telemetry, Verdict

cdef int GRANTED, REJECTED_TOO_LARGE

cdef class Occupancy:
    cdef readonly long long at_ns, used
    cdef readonly object reserved

cdef class World:
    cdef readonly object requests, outcomes
    cdef readonly list occupancy
    cdef public long long now_ns, ended
    cdef readonly SchedulerAdapter _adapter
    cdef readonly list _runners
    cdef object _contents, _arrival_times
    cdef Py_ssize_t _count, _arrived, _check_samples
    cdef readonly long long _progress_ns
    cdef long long _delay_ns, _sampling_ns
    cdef bint _listens, _rounds
    cdef public long long _tick_ns
    cdef long long _arrival_ns, _sample_ns
    cdef dict _cached
    cdef readonly object _reports
    cdef object _telemetry

    @cython.locals(runner=EngineRunner, next_ns=cython.longlong, works=bint, deadline_ns=cython.longlong)
    cpdef long long _next_ns(self) except? -1
    cdef long long _next_arrival_ns(self) except? -1
    @cython.locals(runner=EngineRunner, decides=bint)
    cpdef _step(self, long long now_ns)
    cdef _hear(self)
    cdef _finish(self, EngineRunner runner)
    @cython.locals(runner=EngineRunner, report=Report, pool=Py_ssize_t, due_ns=cython.longlong, waits=bint, told=Telemetry)
    cpdef _tick(self)
    cpdef _tell(self, report)
    cdef _report(self, report)
    @cython.locals(
        runner=EngineRunner, verdicts=list, verdict=Verdict, index=Py_ssize_t, outcome=int,
        pool=Py_ssize_t,
    )
    cdef _decide(self)
    cpdef _end(self, long long index)
    @cython.locals(runner=EngineRunner, used=cython.longlong)
    cpdef _sample(self)
