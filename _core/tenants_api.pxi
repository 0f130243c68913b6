# The part of the public class that is about tenants which the configuration does not list, and
# about those that an operator lists and deletes.

cdef class TenantsApi(Core):
    def set_unknown(self, int32_t flow, bint refused=False, bint own=False):
        if flow != NONE:
            known_tenant(self, flow)
        self.unknown_flow = flow
        self.unknown_refused = refused
        self.unknown_own = own and flow != NONE

    def set_no_tenant_rules(self, int64_t now_ns, bint dry_run=False):
        enter(self, now_ns)
        self.tenant_rules = []
        self.default_rule = any_rule(dry_run)

    def set_tenant_rule(
        self, int64_t now_ns, bytes pattern, int64_t weight_milli=BORN_WEIGHT_MILLI,
        int32_t default_class=0, named=(), bint dry_run=False, int32_t parent=NONE,
        bint refuse=False, int64_t requests=0, int64_t input_tokens=0, int64_t output_tokens=0,
        int64_t total_tokens=0, int64_t concurrency=0, int64_t max_wait_ns=0,
    ):
        cdef TenantRule rule = any_rule(dry_run)
        enter(self, now_ns)
        rule.limits = checked_quota(
            requests, input_tokens, output_tokens, total_tokens, concurrency
        )
        add_share(&rule.limits, 0, NONE, NONE)
        add_max_wait(&rule.limits, max_wait_ns)
        check_range("weight_milli", weight_milli, 1, WEIGHT_MILLI_MAX)
        rule.pattern, rule.weight_milli = pattern, <int32_t>weight_milli
        rule.default_class, rule.named_classes = default_class, tuple(named)
        rule.parent, rule.refuses = parent, refuse
        add_rule(self, rule)

    def set_rules_followed(self, int64_t now_ns):
        enter(self, now_ns)
        follow_rules(self)

    def flow_keys(self, int32_t first, int32_t end, int32_t principal=NONE):
        cdef int32_t f, count = self.flows.count
        # Those that wait are never cut off for what others were served long ago.
        return end if end < count else 0, [
            (self.flows.items[f].queued > 0, service_of(self, f), -f)
            for f in range(max(0, first), min(end, count))
            if not is_node(self.flows, f)
            and sees_tenant(self, principal, <bytes>self.flow_list[f])
        ]

    def may_see_tenant(self, int32_t principal, bytes name):
        return sees_tenant(self, principal, name)

    def may_see_pool(self, int32_t principal, bytes name):
        return bool(self.principals.sees_pool(principal, name))

    def unlisted_stats(self):
        return unlisted_row(self)

    def first_sight(self, int64_t now_ns, bytes name):
        cdef Slice text, key
        cdef int32_t flow
        enter(self, now_ns)
        text.at, text.size = <const uint8_t*><const char*>name, len(name)
        memset(&key, 0, sizeof(Slice))
        check_text("tenant", &text, 1, NAME_BYTES_MAX)
        flow = flow_of(self, &text, &key)
        return flow_at_sight(self, &text, NONE) if is_born(self, flow, &text, 1) else flow

    def set_retired(self, int64_t now_ns, bytes name):
        enter(self, now_ns)
        retire_tenant(self, name)

    def set_key_gone(self, bytes api_key_sha256):
        self.keys.pop(api_key_sha256, None)

    def is_known(self, bytes name):
        known = self.flow_names.get(name)
        return known is not None and is_named(self, known)

    def class_index(self, bytes name):
        return self.classes.find(name)

    def quota_index(self, bytes name):
        return self.quota_names.get(name, NONE)

    def born_tenants(self, int32_t start, int32_t scan_max):
        cdef int32_t flow, end = self.flows.count
        check_range("start", start, 0, 1 << 30)
        check_range("scan_max", scan_max, 1, 1 << 20)
        if scan_max < end - start:
            end = start + scan_max
        found = [
            self.flow_list[flow] for flow in range(start, end)
            if self.flows.items[flow].born and self.flows.items[flow].base == flow
        ]
        return (0 if end >= self.flows.count else end), found
