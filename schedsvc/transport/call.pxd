# C types for `call.py`.

cimport cython

from schedsvc.transport.link cimport Link

cdef class Call:
    cdef Link _connection
    cdef readonly long stream_id
    cdef readonly tuple fields
    cdef readonly object method, handler
    cdef readonly bint is_over
    cdef readonly double over_s
    cdef bint _is_unary, _is_ended, _wrote_headers, _has_data
    cdef bytearray _buffer
    cdef bytes _message
    cdef Py_ssize_t _messages, _unread
    cdef object _reader, _writer, _task, _deadline_s, _expiry, _held, _status, _trailing
    cdef tuple _metadata, _initial

    cpdef open(self, handler, timeout_s)
    @cython.locals(message=bytes)
    cpdef receive(self, bytes data, bint is_last)
    cdef _receive_unary(self, bint is_last)
    cpdef closed(self)
    cpdef fail(self, long code, message)
    cpdef resume(self)
    @cython.locals(buffer=bytearray, size=Py_ssize_t, most=Py_ssize_t, end=Py_ssize_t)
    cdef bytes _next_message(self)
    cdef _give_window(self, Py_ssize_t size)
    @cython.locals(data=bytes)
    cdef _begin_unary(self)
    cdef _set_expiry(self)
    cdef _answer(self, answer)
    cdef _run(self, work)
    cdef _on_error(self, error)
    cdef _stop_handler(self)
    cdef _begin_answer(self)
    cdef _send(self, bytes data)
    cdef _finish(self, long code, message, metadata)
    cdef _send_held(self)
    cpdef end(self)
    cdef bytes _read(self)

@cython.locals(size=Py_ssize_t)
cdef bytes _only_message(bytes data, Py_ssize_t most)

cdef class Details:
    cdef Call _call
