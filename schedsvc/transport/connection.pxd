# C types for `connection.py`.

cimport cython

from schedsvc.transport.call cimport Call
from schedsvc.transport.link cimport Link

cdef class Connection(Link):
    cdef object _find, _ended, _h2, _transport, _asked_s, _timer
    cdef dict _calls
    cdef set _half_open
    cdef list _answering
    cdef bint _is_paused, _is_receiving, _is_greeted, _is_draining, _is_drained
    cdef double _began_s, _heard_s, _used_s, _widened_s, _look_s

    @cython.locals(data=bytes)
    cdef _write(self)
    cdef _reset(self, Call call, code)
    @cython.locals(wider=bint, events=list)
    cdef _take_events(self)
    @cython.locals(call=Call, stream_id=long)
    cdef _on_request(self, event)
    @cython.locals(call=Call)
    cdef _on_data(self, long stream_id, bytes data, bint is_last)
    @cython.locals(call=Call)
    cdef _on_closed(self, long stream_id)
    cdef _on_connection_closed(self)
    cdef _look_now(self)
    @cython.locals(call=Call)
    cdef _drop_stalled(self, double before_s)
    cpdef drain(self)
    cdef _last_goaway(self)
    cpdef close(self)
    cpdef abort(self)

@cython.locals(name=bytes, value=bytes)
cdef tuple _head_of(tuple fields)
