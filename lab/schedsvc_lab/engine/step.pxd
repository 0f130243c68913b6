# C types for `step.py`.

cdef class Step:
    cdef readonly long long duration_ns
    cdef readonly list sequences, preempted
    cdef readonly long long prompt_tokens, decodes, kv_tokens, transfer_ns, together

cdef class DecodeRun:
    cdef readonly long long steps, duration_ns, decodes, kv_tokens

cdef class StepResult:
    cdef readonly long long duration_ns, tokens
    cdef readonly list produced, finished, preempted, started
