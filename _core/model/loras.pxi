# LoRA adapters that are active in a pool: those with which leases run that hold a reservation
# there. Each takes a part of the cache for as long (4 tokens for each of its rank in S-LoRA, arXiv
# 2311.03285, where adapters share the pages; 0 where the engine keeps them elsewhere).

ctypedef struct Loras:
    int32_t* leases  # leases by number of the adapter
    int32_t size, active
    int64_t tokens  # that the active ones take


cdef inline bint lora_is_active(const Loras* loras, int32_t adapter) noexcept nogil:
    return adapter < loras.size and loras.leases[adapter] > 0


cdef inline int64_t lora_tokens(Adapters adapters, int32_t adapter, int64_t usual) noexcept:
    """Return the tokens that an adapter takes of a pool, by the usual figure of the pool. O(1)."""
    return adapters.items[adapter].tokens if adapters.items[adapter].tokens >= 0 else usual


cdef int lora_enter(Loras* loras, Adapters adapters, int32_t adapter, int64_t usual) except -1:
    """Count one lease more that runs with it. O(1) amortised."""
    cdef int32_t size
    if adapter == NONE:
        return 0
    if adapter >= loras.size:
        size = doubled(loras.size, adapter, 16)
        loras.leases = <int32_t*>grow(loras.leases, loras.size, size, sizeof(int32_t))
        loras.size = size
    loras.leases[adapter] += 1
    if loras.leases[adapter] == 1:
        loras.active += 1
        loras.tokens += lora_tokens(adapters, adapter, usual)
    return 0


cdef void lora_leave(Loras* loras, Adapters adapters, int32_t adapter, int64_t usual) noexcept:
    """One lease less runs with it. O(1)."""
    if adapter == NONE:
        return
    loras.leases[adapter] -= 1
    if loras.leases[adapter] == 0:
        loras.active -= 1
        loras.tokens -= lora_tokens(adapters, adapter, usual)


cdef void lora_weigh(Loras* loras, Adapters adapters, int64_t usual) noexcept:
    """Apply other sizes of adapters. O(adapters)."""
    cdef int32_t i
    loras.tokens = 0
    for i in range(loras.size):
        if loras.leases[i]:
            loras.tokens += lora_tokens(adapters, i, usual)
