# C types for `lockstep.py`.

cimport cython

from schedsvc_lab.engine.blocks cimport BlockPool
from schedsvc_lab.engine.sequence cimport Clock, Sequence

cdef Clock STILL

cdef class Lockstep:
    cdef readonly Clock clock
    cdef readonly list members
    cdef readonly long long changes
    cdef BlockPool _pool
    cdef long long _size, _bases
    cdef list _ends, _phases

    cpdef join(self, Sequence sequence)
    @cython.locals(sequence=Sequence)
    cpdef dissolve(self)
    @cython.locals(sequence=Sequence)
    cpdef take(self, long long steps)
    @cython.locals(sequence=Sequence, ended=list)
    cpdef list advance(self, long long steps)
    cpdef long long steps_left(self) except -1
    cpdef long long kv_tokens(self)
    cpdef long long blocks_ahead(self, long long steps) except -1
    cpdef long long steps_within(self, long long steps, long long blocks) except? -1
    @cython.locals(sequence=Sequence)
    cdef _leave(self, Sequence sequence)
    cdef Py_ssize_t _begin(self)
    cdef Py_ssize_t _end(self, long long steps, Py_ssize_t begin)
    cdef Py_ssize_t _wrapped(self, long long steps, Py_ssize_t begin)
    @cython.locals(middle=Py_ssize_t, phases=list, at=cython.longlong)
    cdef Py_ssize_t _place(self, long long phase, Py_ssize_t low, Py_ssize_t high)
    @cython.locals(sequence=Sequence)
    cdef _hand_out(self, Py_ssize_t begin, Py_ssize_t end)
    cdef long long _phase(self, Sequence sequence)
    cdef _part(self, Sequence sequence)
