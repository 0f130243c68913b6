# C types for `runs.py`.

cimport cython

from schedsvc_lab.engine.block_accounting cimport BlockAccounting
from schedsvc_lab.engine.cost cimport StepCost
from schedsvc_lab.engine.lockstep cimport Lockstep
from schedsvc_lab.engine.planner cimport Planner
from schedsvc_lab.engine.sequence cimport Sequence
from schedsvc_lab.engine.step cimport DecodeRun

cdef class Runs:
    cdef BlockAccounting _accounting
    cdef Planner _planner
    cdef StepCost _cost
    cdef long long _sequences_max, _step_tokens_max
    cdef bint _separate

    @cython.locals(
        lockstep=Lockstep, count=Py_ssize_t, steps=cython.longlong, kv_tokens=cython.longlong,
        held_ns=cython.longlong,
    )
    cpdef DecodeRun plan(self, long long steps_max, duration_max_ns, long long now_ns)
    cpdef list apply(self, long long steps)
    @cython.locals(count=Py_ssize_t, budget=cython.longlong)
    cdef bint _only_decodes(self, long long now_ns) except -1
    @cython.locals(first=Sequence)
    cdef long long _free(self) except -1
