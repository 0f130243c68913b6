# Under which key a request is found by its id.
#
# An id belongs to a principal and a tenant, so no caller can use up another one's ids. Nearly
# always one principal asks for a tenant, so its requests take the tenant's key while that is free.
# Another principal that uses the same id gets a key of its own, and keeps it.

cdef Hash128 tenant_key(
    Core core, int32_t flow, uint64_t tenant, const uint8_t* request_id, size_t size
) noexcept:
    """Return the key of an id of a tenant; `tenant` separates those that share a flow."""
    if core.flows.has_salts:  # else the hash need not wait until the flow is in the cache
        tenant ^= core.flows.items[flow].salt
    return sip128(core.k0, core.k1 ^ <uint64_t>flow ^ tenant, request_id, size)


cdef Hash128 own_key(Core core, const Hash128* key, int32_t principal) noexcept:
    """Return the key of the same id that only this principal has."""
    cdef uint64_t words[3]
    words[0], words[1], words[2] = key.hi, key.lo, <uint64_t>principal
    return sip128(core.k0, core.k1 ^ OWN_ID_SALT, <const uint8_t*>words, sizeof(words))


cdef Hash128 client_key(Core core, const uint8_t* id, size_t size) noexcept:
    """Return the key of an id that a client has chosen, of any tenant and principal."""
    return sip128(core.k0, core.k1 ^ CLIENT_ID_SALT, id, size)


cdef int note_client_id(Core core, const Ask* ask, const Slice* id) except -1:
    """Let people find a request, or its refusal, by the id of its client, if it states one. O(1)
    amortised."""
    cdef Hash128 key
    if id.size == 0:
        return 0
    key = client_key(core, id.at, <size_t>id.size)
    return core.client_ids.note(&key, &ask.key, ask.principal)


cdef int32_t find_request(Core core, Ask* ask) noexcept:
    """Return the index of the request that has the id of an ask, or -1. O(1).

    If the principal has a key of its own for the id, or needs one, the ask gets it.
    """
    cdef int32_t i = core.ids.get(ask.key.hi, ask.key.lo), mine
    cdef Hash128 own
    ask.has_own_key = False
    if i == NONE and core.own_ids == 0:
        return NONE
    if i != NONE and core.requests.items[i].principal == ask.principal:
        return i
    own = own_key(core, &ask.key, ask.principal)
    mine = core.ids.get(own.hi, own.lo)
    if i == NONE and mine == NONE:
        return NONE
    ask.key, ask.has_own_key = own, True
    return mine


cdef int put_id(Core core, int32_t i, const Ask* ask) except -1:
    """Make a request findable by its id, after find_request() has not found the id. O(1)."""
    cdef Request* r = &core.requests.items[i]
    r.key_hi, r.key_lo = ask.key.hi, ask.key.lo
    r.has_own_key = ask.has_own_key
    core.own_ids += ask.has_own_key
    return core.ids.put_new(r.key_hi, r.key_lo, i)


cdef void drop_id(Core core, int32_t i) noexcept:
    """Let a request's id be free again. O(1)."""
    cdef Request* r = &core.requests.items[i]
    core.own_ids -= r.has_own_key
    core.ids.remove(r.key_hi, r.key_lo)
