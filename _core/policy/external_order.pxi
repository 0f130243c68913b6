# The order from outside, under the policy `external`: functions of a simulation's policy give keys.
#
# key(tag, charged_micro, queued, now_ns) is the key of a head: what its flow was charged by weight,
# and how many requests it has queued. It is asked when a queue gets another head, and at each
# charge of its flow, which are the moments at which the head gets its place. The least key is
# first, ties go by arrival. place(tag) is the place of a request in its queue, asked at its
# arrival; without that function the queue goes by arrival or deadline, as for all policies.
#
# The key takes the place of the counter and of nothing else: classes, quotas, guarantees and the
# ledger decide as ever. A function must return the same for the same calls, else no run is like
# another. An exception that it raises ends the simulation.

cdef int64_t KEY_MAX = (<int64_t>1 << 60) - 1


cdef int64_t from_outside(str field, value) except? -1:
    """Check what a function returned. O(1)."""
    if type(value) is not int or not -KEY_MAX <= value <= KEY_MAX:
        invalid(field, f"must be an int from -2^60 + 1 to 2^60 - 1, not {value!r}")
    return value


cdef int ask_key(Flows flows, int32_t q) except -1:
    """Ask for the key of the head of a queue. O(1), and what the function takes."""
    cdef Queue* queue = &flows.queues[q]
    cdef const Flow* f = &flows.items[queue.flow]
    key = flows.key_from(
        flows.requests.items[queue.head].tag, f.vtc, f.queued, flows.now_ns
    )
    queue.key = from_outside("key", key)
    return 0


cdef int64_t asked_place(Flows flows, const Request* r) except? -1:
    """Ask for the place of a request in its queue. O(1), and what the function takes."""
    return from_outside("place", flows.place_from(r.tag))
