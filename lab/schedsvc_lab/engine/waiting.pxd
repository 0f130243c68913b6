# C types for `waiting.py`.

from schedsvc_lab.engine.sequence cimport Sequence

cdef int WAITING

cdef class WaitingQueue:
    cdef readonly list _heap, _parked
    cdef Py_ssize_t _live

    cpdef push(self, Sequence sequence)
    cpdef Sequence peek(self)
    cpdef pop(self)
    cpdef park(self)
    cpdef unpark(self)
    cpdef forget(self)

cdef class SwappedQueue:
    cdef list _units

    cpdef push(self, list unit)
    cpdef list peek(self)
    cpdef pop(self)
    cpdef remove(self, Sequence sequence)
