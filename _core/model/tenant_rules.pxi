# Rules for tenants that the configuration does not list: a pattern of names, and what a tenant gets
# whose name fits it. The first rule that fits counts.

@cython.final
cdef class TenantRule:
    cdef bytes pattern
    cdef int32_t weight_milli, parent, default_class
    cdef tuple named_classes
    cdef bint refuses, dry_runs
    cdef QuotaLimits limits


cdef TenantRule rule_for(list rules, bytes name):
    """Return the first rule that a name fits; None: no rule does. O(rules * name)."""
    cdef TenantRule rule
    for rule in rules:
        if matches(
            <const uint8_t*>PyBytes_AS_STRING(rule.pattern), PyBytes_GET_SIZE(rule.pattern),
            <const uint8_t*>PyBytes_AS_STRING(name), PyBytes_GET_SIZE(name),
        ):
            return rule
    return None
