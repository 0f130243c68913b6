# C types for `cost.py`. Whoever multiplies beyond 63 bits gets an OverflowError.

cimport cython

cdef class StepCost:
    cdef readonly long long step_ns, prefill_ns, prefill_token_ns, decode_kv_token_ns
    cdef readonly tuple decode_table_ns
    cdef readonly long long swap_token_ns, copy_token_ns, adapter_load_ns

    cpdef long long swap_ns(self, long long tokens) except? -1
    cpdef long long copy_ns(self, long long tokens) except? -1
    @cython.locals(
        table=tuple, prefill=cython.longlong, shared=cython.longlong, decode=cython.longlong
    )
    cpdef long long duration_ns(
        self, long long prompt_tokens, Py_ssize_t decodes, long long kv_tokens
    ) except? -1
    @cython.locals(reads=cython.longlong, fixed=cython.longlong)
    cpdef long long decode_run_ns(
        self, long long steps, Py_ssize_t decodes, long long kv_tokens
    ) except? -1
    @cython.locals(
        square=cython.longlong, fixed=cython.longlong, first_ns=cython.longlong,
        half=cython.double, linear=cython.double, steps=cython.longlong,
    )
    cpdef long long decode_steps_done(
        self, long long elapsed_ns, Py_ssize_t decodes, long long kv_tokens
    ) except? -1
    cpdef long long decode_steps_until(
        self, long long duration_ns, Py_ssize_t decodes, long long kv_tokens
    ) except? -1
