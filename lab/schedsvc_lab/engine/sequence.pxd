# C types for `sequence.py`.

cdef class EngineRequest:
    cdef readonly object request_id, priority, seed, adapter
    cdef readonly long long prompt_tokens
    cdef readonly tuple output_tokens
    cdef readonly bint beam
    cdef readonly long long returned
    cdef readonly object prefix_keys

cdef class Clock:
    cdef public long long steps

cdef class Sequence:
    cdef readonly EngineRequest request
    cdef readonly long long index
    cdef readonly object key  # priority * 2**64 + arrival
    cdef public object place
    cdef readonly long long arrival_ns
    cdef readonly object group
    cdef readonly long long output_tokens
    cdef public object prefix_keys
    cdef public long long prefill_end_tokens
    cdef public list blocks
    cdef public Clock clock
    cdef public long long computed_base, produced_base, scheduled_tokens
    cdef public long long cached_tokens, registered_blocks, preemptions
    cdef public int state
