# The part of the public class that is about quotas and budgets, and what ended leases used.

cdef class UsageApi(TenantsApi):
    def set_quota(
        self, int64_t now_ns, bytes name, int32_t parent=NONE, int64_t requests=0,
        int64_t input_tokens=0, int64_t output_tokens=0, int64_t total_tokens=0,
        int64_t concurrency=0, int64_t share=0, int64_t lends=NONE, int64_t borrows=NONE,
        int64_t day_tokens=0, int64_t month_tokens=0, int64_t weight_milli=0,
    ):
        cdef QuotaLimits limits
        enter(self, now_ns)
        limits = checked_quota(requests, input_tokens, output_tokens, total_tokens, concurrency)
        add_share(&limits, share, lends, borrows)
        add_budgets(&limits, day_tokens, month_tokens)
        return set_named_quota(self, name, parent, &limits, weight_milli)

    def set_flow_quota(
        self, int64_t now_ns, int32_t flow, int32_t parent=NONE, bint refuse=False,
        int64_t requests=0, int64_t input_tokens=0, int64_t output_tokens=0,
        int64_t total_tokens=0, int64_t concurrency=0, int64_t share=0, int64_t lends=NONE,
        int64_t borrows=NONE, int64_t day_tokens=0, int64_t month_tokens=0, int64_t max_wait_ns=0,
    ):
        cdef QuotaLimits limits
        enter(self, now_ns)
        limits = checked_quota(requests, input_tokens, output_tokens, total_tokens, concurrency)
        add_share(&limits, share, lends, borrows)
        add_budgets(&limits, day_tokens, month_tokens)
        add_max_wait(&limits, max_wait_ns)
        limit_flow(self, flow, parent, refuse, &limits)

    def set_budget_period(
        self, int64_t now_ns, bytes name, int which, int64_t period, int64_t ends_ns,
        int64_t spent=0,
    ):
        enter(self, now_ns)
        turn_budget(self, name, which, period, ends_ns, spent)

    def set_budget_elsewhere(
        self, int64_t now_ns, bytes name, int which, int64_t period, int64_t spent
    ):
        enter(self, now_ns)
        spend_elsewhere(self, name, which, period, spent)

    def budget_spent(self, bytes name, int which):
        return self.quotas.nodes[budget_node(self, name, which)].budgets[which].spent

    def set_budget_refund(self, int64_t now_ns, bytes tenant, int64_t tokens):
        enter(self, now_ns)
        refund_budgets(self, tenant, tokens)

    def set_usage_kept(self, int64_t now_ns, bint kept):
        enter(self, now_ns)
        self.usage_rows.is_kept = kept

    def set_usage_saved(self, int64_t now_ns, int64_t row):
        cdef SessionState session
        enter(self, now_ns)
        check_range("row", row, self.usage_rows.saved, self.usage_rows.count)
        self.usage_rows.saved = row
        for session in self.sessions:
            if session is not None and session.unsaved and session.unsaved[0][1] <= row:
                session.wake()

    def take_usage(self):
        return self.usage_rows.take()
