# C types for `runner.py`.

cimport cython

from schedsvc_lab.engine.blocks cimport BlockPool
from schedsvc_lab.engine.engine cimport Engine
from schedsvc_lab.engine.lockstep cimport Lockstep
from schedsvc_lab.engine.sequence cimport Clock, Sequence
from schedsvc_lab.engine.step cimport DecodeRun, Step, StepResult

cdef dict _FORMS

cdef class Report:
    cdef readonly tuple requests
    cdef readonly bytes bases
    cdef readonly long long ahead, used_tokens

cdef class EngineRunner:
    cdef readonly Engine engine
    cdef public dict live
    cdef public dict cached
    cdef Lockstep _lockstep
    cdef long long _size
    cdef bytes _bases
    cdef long long _changes
    cdef public tuple _indices
    cdef public long long end_ns
    cdef long long _start_ns
    cdef DecodeRun _run
    cdef long long _round_steps, _decodes

    cpdef add(
        self, long long now_ns, long long index, long long prompt_tokens, long long output_tokens,
        tuple keys=*, adapter=*,
    )
    cpdef plan(self, long long now_ns)
    @cython.locals(
        first=list, finished=list, ended=list, sequence=Sequence, result=StepResult,
        steps=cython.longlong,
    )
    cpdef tuple finish(self)
    cpdef bint is_between(self) except -1
    cpdef bint round_is_due(self) except -1
    cpdef round_done(self)
    @cython.locals(done=cython.longlong, ahead=cython.longlong, lockstep=Lockstep, s=Sequence)
    cpdef Report report(self, long long now_ns)
    @cython.locals(sequence=Sequence, clock=Clock, outputs=list, base=cython.longlong)
    cdef list _outputs(self, long long ahead)
    cpdef long long used_tokens(self, long long now_ns) except -1
    @cython.locals(pool=BlockPool, blocks=cython.longlong)
    cdef long long _used_tokens(self, long long done) except -1
    cpdef long long _steps_done(self, long long now_ns) except -1
    @cython.locals(run=DecodeRun, done=cython.longlong, duration_ns=cython.longlong)
    cpdef _cut(self, long long now_ns)
    @cython.locals(step=Step)
    cpdef _plan_step(self, long long now_ns)
cdef bytes _packed(list numbers)
