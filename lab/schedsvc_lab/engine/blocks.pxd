# C types for `blocks.py`.

cdef class BlockPool:
    cdef readonly Py_ssize_t total, block_size_tokens
    cdef readonly object cache
    cdef list _free
    cdef dict _extra

    cpdef Py_ssize_t count_free(self) except -1
    cpdef bint allocate(self, Py_ssize_t count, list table) except -1
    cpdef free_up(self, Py_ssize_t count)
    cpdef take_one(self, list table)
    cpdef share(self, table)
    cpdef bint is_shared(self, block) except -1
    cpdef reuse(self, block)
    cpdef bint copy_last(self, list table) except -1
    cpdef release(self, list table)
    cpdef trim(self, list table, Py_ssize_t count)
    cpdef _drop(self, block)
