# C types for `link.py`.

cdef class Link:
    cdef public object loop, bounds, peer
    cdef public dict auth_context
    cdef public set writers

    cpdef consumed(self, long stream_id, Py_ssize_t size)
    cpdef send_headers(self, long stream_id, tuple fields)
    cpdef send_data(self, long stream_id, bytes data)
    cpdef finish(
        self, long stream_id, bint is_half_open, long code, message, metadata, bint has_headers
    )
    cpdef Py_ssize_t room(self, long stream_id) except -1
    cpdef flush(self)
