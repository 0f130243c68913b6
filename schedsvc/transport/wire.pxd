# C types for `wire.py`.

cpdef tuple metadata_of(tuple fields)
cpdef tuple status_fields(long code, str message, metadata=*)
cpdef bytes length_prefix(Py_ssize_t size)
