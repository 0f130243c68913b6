# C types for `engine.py`.

cimport cython

from schedsvc_lab.engine.block_accounting cimport BlockAccounting
from schedsvc_lab.engine.blocks cimport BlockPool
from schedsvc_lab.engine.cost cimport StepCost
from schedsvc_lab.engine.lockstep cimport Lockstep
from schedsvc_lab.engine.planner cimport Planner
from schedsvc_lab.engine.runs cimport Runs
from schedsvc_lab.engine.sequence cimport EngineRequest, Sequence
from schedsvc_lab.engine.step cimport DecodeRun, Step, StepResult

cdef int HELD, RUNNING

cdef class Engine:
    cdef readonly object config
    cdef readonly StepCost cost
    cdef long long _size, _context_tokens_max
    cdef bint _by_priority
    cdef readonly BlockAccounting _accounting
    cdef Planner _planner
    cdef Runs _runs
    cdef set _prompts_open
    cdef Step _step
    cdef long long _arrivals, _prompt_tokens, _generation_tokens, _steps

    @cython.locals(sequence=Sequence, sequences=list, index=Py_ssize_t)
    cpdef list add(self, EngineRequest request, long long now_ns=*)
    cpdef Step plan_step(self, long long now_ns=*)
    @cython.locals(
        step=Step, sequences=list, produced=list, finished=list, started=list,
        sequence=Sequence, begin=Py_ssize_t, place=Py_ssize_t, computed=cython.longlong,
    )
    cpdef StepResult finish_step(self)
    cpdef DecodeRun plan_decodes(self, long long steps_max, duration_max_ns=*, long long now_ns=*)
    @cython.locals(finished=list, running=list, sequence=Sequence)
    cpdef list advance_decodes(self, DecodeRun run, long long steps)
    cpdef long long blocks_ahead(self, long long steps) except -1
    @cython.locals(outputs=tuple, longest=object, total=object)
    cdef _check_request(self, EngineRequest request, bint forks)
    cdef _register(self, Sequence sequence)
    cdef _produce(self, Sequence sequence, list started)
