# The part of the public class that is about other members of a cluster.

cdef enum:
    LEADERSHIP_BYTES_MAX = 512

cdef class ClusterApi(UsageApi):
    def set_shared(self, int64_t now_ns):
        enter(self, now_ns)
        share_service(self)

    def take_served(self, int64_t rows_max):
        check_range("rows_max", rows_max, 1, <int64_t>1 << 30)
        return take_served(self, rows_max)

    def set_remote_service(self, int64_t now_ns, list rows):
        enter(self, now_ns)
        check_remote(self, rows)
        applied = 0
        for tenant, cls, domain, charged, refunded in rows:
            applied += charge_remote(self, tenant, cls, domain, charged, refunded)
        return applied

    def set_escrow(self, int64_t now_ns, int64_t share=0):
        enter(self, now_ns)
        put_escrow(self, share)

    def set_escrow_away(self, int64_t now_ns, bint away):
        enter(self, now_ns)
        self.quotas.store_away = away

    def set_escrow_grants(self, int64_t now_ns, list rows):
        enter(self, now_ns)
        check_grants(rows)
        return [
            grant_chunk(self, key, amounts, dues_ns, left, ends_ns)
            for key, amounts, dues_ns, left, ends_ns in rows
        ]

    def escrow_is_wanted(self):
        return self.quotas.is_wanted

    def escrow_wants(self):
        return escrow_wants(self)

    def escrow_drawn(self, int64_t rows_max):
        check_range("rows_max", rows_max, 1, <int64_t>1 << 30)
        return escrow_drawn(self, rows_max)

    def escrow_levels(self, list keys):
        return escrow_levels(self, keys)

    def set_slots(self, int64_t now_ns, list rows):
        enter(self, now_ns)
        check_slots(rows)
        for key, slots, left, ends_ns in rows:
            put_slots(self, key, slots, left, ends_ns)

    def slot_wants(self):
        return slot_wants(self)

    def slot_rows(self, list keys):
        return slot_rows(self, keys)

    def set_term_begun(self, int64_t now_ns, list places, bint cold=False):
        enter(self, now_ns)
        begin_term(self, places, cold)

    def take_places(self, int64_t rows_max):
        check_range("rows_max", rows_max, 1, <int64_t>1 << 30)
        return told_places(self, rows_max)

    def set_leadership(self, int64_t now_ns, bytes leadership):
        enter(self, now_ns)
        check_range("leadership", len(leadership), 0, LEADERSHIP_BYTES_MAX)
        self.leadership = leadership

    def forgiven_micro(self):
        return self.flows.positions.forgiven
