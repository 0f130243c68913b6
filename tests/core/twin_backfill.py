"""Decides which request may pass the head of a pool of the twin."""

from .twin_pick_next import Choice, Plan
from .twin_prices import price_of, weighted_by
from .twin_types import Request

NEVER = 1 << 62


class Backfill(Choice):
    """Finds the lead, the surplus, and the projected start of a head by trying all of them."""

    def who_may_pass(self, pool: int, head: Request, plan: Plan) -> tuple[Request, Plan] | None:
        """Return the first of the next heads that fits now, is near enough behind the head, and
        leaves its start unchanged, unless it is light."""
        if not self.backfills or self.classes.is_exempt(head.flow):
            return None
        if not self.positions.by_counter and self.has_been_passed(head):
            return None
        for r in self.line(pool, head):
            if r is head or r.due_ns <= self.now_ns or not self.can_hold(pool, r):
                continue
            if not self._may_pass_if_it_fits(pool, r, head, plan):
                continue
            its = self.plan(pool, r)
            self.wake_for(pool, its.reason)
            if its.reason != "NONE":
                continue
            light = not its.above and self._is_light(r, head, plan)
            if not light and not self._leaves_start(pool, r, its, head, plan):
                continue
            if self.quotas.shares.has_to_be_held(r) or not self.quotas.model_allows(r, pool):
                continue
            self._note_pass(pool, r, head, light)
            return r, its
        return None

    def has_been_passed(self, head: Request) -> bool:
        if not head.bypassed:
            return self.limits["bypass_max"] == 0
        late = self.now_ns - head.bypassed_ns >= self.limits["bypass_ns"]
        return late or head.bypassed >= self.limits["bypass_max"]

    def work_micro(self, r: Request) -> int:
        """Return a request's charge at weight 1, by the average of its flow, else the median."""
        each = self.flows[r.flow].average_milli // 1000
        each = each or self.predictor.median(self.asked(r)) or 0
        if not 0 < each <= r.output_max_tokens:
            each = r.output_max_tokens
        return price_of(self.limits, r, r.prompt_tokens, 0, each * r.sequences)

    def lead_allowed(self, head: Request) -> int:
        charge = weighted_by(self.work_micro(head), self.flows[head.flow].weight_milli)
        return max(charge, self.grain) if self.policy == "dlpm" else charge

    def earn_surplus(self, pool: int, head: Request) -> None:
        p, part = self.pools[pool], self.limits["backfill_surplus_ppm"]
        if part:
            work = self.work_micro(head)
            p.surplus_micro = min(work, p.surplus_micro + work * part // 10**6)

    def _may_pass_if_it_fits(self, pool: int, r: Request, head: Request, plan: Plan) -> bool:
        its, first = self.flows[r.flow].cls, self.flows[head.flow].cls
        if its == first:
            if r.flow == head.flow or not self.positions.by_counter:
                return True
            counter_at = self.positions.counter_at
            lead = counter_at(r.flow, pool) - counter_at(head.flow, pool)
            return lead <= self.lead_allowed(head)
        if self.classes.place(its) < self.classes.place(first):
            return True
        return self.pools[pool].surplus_micro >= self.work_micro(r)

    def _is_light(self, r: Request, head: Request, plan: Plan) -> bool:
        """Return whether it may move the head's start unless its flow would be above its share."""
        alone = len(self.queued(lambda q: q.flow == r.flow)) == 1
        same = self.flows[r.flow].cls == self.flows[head.flow].cls
        return same and alone and plan.above and not self.has_been_passed(head)

    def _note_pass(self, pool: int, r: Request, head: Request, light: bool) -> None:
        if light or not self.positions.by_counter:
            head.bypassed_ns = head.bypassed_ns if head.bypassed else self.now_ns
            head.bypassed += 1
        its, first = self.flows[r.flow].cls, self.flows[head.flow].cls
        if its == first:
            if self.positions.by_counter and r.flow != head.flow:
                self.lead_given = max(self.lead_given, self.lead_allowed(head))
        elif self.classes.place(first) < self.classes.place(its):
            self.pools[pool].surplus_micro -= self.work_micro(r)

    def _leaves_start(self, pool: int, r: Request, its: Plan, head: Request, plan: Plan) -> bool:
        when, spare = self._start(pool, head, plan)
        if self._whole(pool, r, its) <= spare or when == NEVER:
            return True
        return r.reports_progress and its.output <= when

    def _whole(self, pool: int, r: Request, plan: Plan) -> int:
        """Return the load that a request adds: its blocks, and an adapter that is not active."""
        more = self.adapter_tokens(pool, r.adapter) - self.adapter_tokens(pool)
        return plan.blocks * self.pools[pool].block_size + more

    def _start(self, pool: int, head: Request, plan: Plan) -> tuple[int, int]:
        """Return after how many tokens of each sequence the head fits, and what is then spare."""
        p = self.pools[pool]
        whole = plan.blocks * p.block_size
        room = self.limit(pool, plan.above) - p.beyond_tokens - self.adapter_tokens(pool)
        room -= self._whole(pool, head, plan) - whole
        its_left, _, its_width = self.figures(pool, head, plan.blocks, plan.output)
        leases = [
            (left, width, r.reserved_blocks * p.block_size)
            for r in self.leases_of(pool)
            for left, _, width in [self.figures(pool, r)]
        ]
        fixed = sum(size for _, width, size in leases if not width)
        growing = sorted((lease for lease in leases if lease[1]), reverse=True)

        def load(start: int) -> int:
            runs = [lease for lease in growing if lease[0] > start]
            if self.form == "sum":
                return fixed + whole + sum(size for _, _, size in runs)
            if its_width:
                runs.append((start + its_left, its_width, whole))
            peaks = [
                sum(size - width * (left - at) for left, width, size in runs if left >= at)
                for at, _, _ in runs
            ]
            return fixed + max(peaks, default=0) + (0 if its_width else whole)

        starts = [left for left, _, _ in growing] + [0]
        if load(starts[0]) > room:
            return NEVER, 0
        low, high = 0, len(growing)
        while low < high:
            middle = (low + high + 1) // 2
            if load(starts[middle]) <= room:
                low = middle
            else:
                high = middle - 1
        return starts[low], room - load(starts[low])
