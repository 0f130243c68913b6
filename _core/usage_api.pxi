# The part of the public class that is about what ended leases used.

cdef class UsageApi(TenantsApi):
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
