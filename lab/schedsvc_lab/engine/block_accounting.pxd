# C types for `block_accounting.py`.

cimport cython

from schedsvc_lab.engine.blocks cimport BlockPool
from schedsvc_lab.engine.lockstep cimport Lockstep
from schedsvc_lab.engine.sequence cimport Clock, Sequence
from schedsvc_lab.engine.waiting cimport SwappedQueue, WaitingQueue

cdef Clock STILL
cdef int ABORTED, FINISHED, HELD, RUNNING, SWAPPED, WAITING

cdef class BlockAccounting:
    cdef readonly object config, cache, adapters
    cdef long long _size, _sequences_max, _step_tokens_max
    cdef readonly BlockPool pool, host
    cdef readonly list running
    cdef readonly Lockstep lockstep
    cdef readonly WaitingQueue waiting
    cdef readonly SwappedQueue swapped
    cdef readonly dict requests
    cdef readonly long long seats_held, groups_running, preemptions, swapped_blocks
    cdef public long long copied_blocks
    cdef object front

    cpdef long long blocks_for(self, long long tokens) except? -1
    cpdef long long seats_free(self) except? -1
    cpdef bint must_copy(self, Sequence sequence) except -1
    cpdef seat(self, Sequence sequence)
    @cython.locals(sequence=Sequence, together=Py_ssize_t, place=Py_ssize_t, running=list)
    cpdef Py_ssize_t gather(self) except -1
    cdef bint _only_decodes(self, Sequence sequence) except -1
    @cython.locals(left=list)
    cpdef finish(self, Sequence sequence)
    cpdef bint use_adapter(self, Sequence sequence, free_min) except -1
    @cython.locals(last=Sequence, sequence=Sequence)
    cpdef list throw_out(self)
    @cython.locals(sequence=Sequence)
    cpdef requeue(self, list units)
    cpdef swap_in(self, list unit)
    cdef _unseat(self, Sequence sequence)
    cdef _enter(self, Sequence sequence)
    @cython.locals(
        other=Sequence, low=Py_ssize_t, high=Py_ssize_t, middle=Py_ssize_t, running=list
    )
    cdef Py_ssize_t _place(self, Sequence sequence) except -1
    cdef _leave_adapter(self, Sequence sequence)
