# C types for `planner.py`.

cimport cython

from schedsvc_lab.engine.block_accounting cimport BlockAccounting
from schedsvc_lab.engine.blocks cimport BlockPool
from schedsvc_lab.engine.cost cimport StepCost
from schedsvc_lab.engine.lockstep cimport Lockstep
from schedsvc_lab.engine.sequence cimport Sequence
from schedsvc_lab.engine.step cimport Step

cdef int RUNNING, SWAPPED

cdef class Admission:
    cdef readonly Sequence sequence
    cdef readonly long long tokens
    cdef readonly list found

cdef class Planner:
    cdef BlockAccounting _accounting
    cdef object _config
    cdef StepCost _cost
    cdef long long _size, _step_tokens_max, _delay_factor_ppm
    cdef bint _separate
    cdef long long _prompt_step_ns, _transfer_ns
    cdef readonly long long cache_query_tokens, cache_hit_tokens

    @cython.locals(
        planned=list, preempted=list, together=cython.longlong, prompt_tokens=cython.longlong,
        decodes=cython.longlong, kv_tokens=cython.longlong, sequence=Sequence, place=Py_ssize_t,
        budget=cython.longlong,
    )
    cpdef Step plan(self, long long now_ns)
    @cython.locals(sequence=Sequence)
    cpdef Admission next_admission(self, long long budget, long long now_ns)
    @cython.locals(first=Sequence)
    cpdef long long delay_left_ns(self, long long now_ns) except -1
    @cython.locals(first=Sequence)
    cpdef list next_return(self, long long budget)
    @cython.locals(lockstep=Lockstep)
    cdef Py_ssize_t _plan_lockstep(self, list planned) except -1
    @cython.locals(
        sequence=Sequence, running=list, pool=BlockPool, budget=cython.longlong, computed=cython.longlong,
        end=cython.longlong, count=cython.longlong, copies=bint, place=Py_ssize_t, thrown_out=list,
    )
    cdef long long _plan_running(
        self, list planned, list preempted, Py_ssize_t position
    ) except? -1
    cdef _take(self, Sequence sequence, long long count, bint copies)
    @cython.locals(sequence=Sequence)
    cdef long long _plan_swapped(self, list planned, long long budget) except? -1
    @cython.locals(admission=Admission)
    cdef _plan_waiting(self, list planned, long long budget, long long now_ns)
    @cython.locals(target=cython.longlong, tokens=cython.longlong, free=cython.longlong, need=cython.longlong, found=list)
    cdef Admission _admissible(self, Sequence sequence, long long budget)
    @cython.locals(sequence=Sequence, tokens=cython.longlong, found=list, need=cython.longlong)
    cdef _admit(self, Admission admission)

cdef long long _target(Sequence sequence) except? -1
