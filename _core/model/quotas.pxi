# Quotas: token buckets, each a limit a minute, and a cap on concurrent requests.
#
# A node holds the buckets of a tenant, of a group or of a model; its parent is the next level up. A
# bucket of R units a minute holds at most R. Its level is kept in millionths: every tick of 60 us
# it gains exactly R of them, so that no rounding adds up and the moment at which it will hold
# enough is known exactly. The ticks of a full bucket begin with the next take.
#
# A bill states the tokens that a request took, and from which nodes. Prompt and predicted output
# are taken before it runs, corrected when more is reported, and settled when it ends. Only bills
# and time change a level, so the concurrent requests of a node overshoot it at most by the tokens
# that they used beyond their bills. Once they have ended, a bucket owes at most one minute of its
# limit and one request: it forgives the rest.

cdef enum:
    LIMITS_TOLD = RATES + 1 + BUDGETS  # kinds: the rates, concurrency, the budgets
    QUOTA_DEPTH = 6  # nodes that one request can be subject to

QUOTA_LEVELS_MAX = QUOTA_DEPTH - 1  # a tenant and the groups above it; the last is the model's
QUOTA_LIMIT_MAX = 1_000_000_000_000

# The longest Retry-After: some clients ignore more than two minutes, spread of 10 % included.
cdef int64_t RETRY_MAX_NS = 109_000_000_000

ctypedef struct Quota:
    int64_t rate[RATES]  # units a minute; 0: no limit
    int64_t level[RATES]  # millionths of a unit; below 0: overshot
    int64_t at_ns[RATES]  # start of the tick that runs
    Escrow* escrow  # NULL: the buckets are this scheduler's alone
    int64_t concurrency, live  # 0: no cap; bills that name this node
    int64_t open_input, open_output  # tokens on those bills
    int64_t owed_requests, owed_input, owed_output  # debts from before a restart, see restore
    int64_t lift[CLASSES_MAX]  # what the waiting flows of a class were lifted by in all, see gate
    Budget budgets[BUDGETS]
    int32_t parent
    int32_t weight_milli  # weight of a group in the tree of shares; 0: it is not in it
    int32_t node  # its flow in the default class; -1: it was never needed

ctypedef struct Bill:
    int64_t input_tokens, output_tokens
    int32_t nodes[QUOTA_DEPTH]
    int32_t count
    int32_t next_free
    int64_t share_tokens  # what a share has paid of it, see guarantees.pxi
    int32_t share_node, share_source, lender

# The amounts that a request takes, in millionths.
ctypedef struct Take:
    int64_t input_tokens, output_tokens
    int64_t micro[RATES]

# A limit and what is left of it, for people.
ctypedef struct Told:
    int64_t limit, left  # 0: no limit
    int64_t reset_ms  # until it is whole again


cdef inline Take take_of(int64_t input_tokens, int64_t output_tokens) noexcept nogil:
    cdef Take t
    t.input_tokens = input_tokens
    t.output_tokens = output_tokens
    t.micro[RATE_REQUESTS] = MICRO
    t.micro[RATE_INPUT] = input_tokens * MICRO
    t.micro[RATE_OUTPUT] = output_tokens * MICRO
    t.micro[RATE_TOTAL] = (input_tokens + output_tokens) * MICRO
    return t


cdef void refill(Quota* n, int which, int64_t now_ns) noexcept nogil:
    """Bring a level up to the present. O(1)."""
    cdef int64_t rate = n.rate[which]
    if rate == 0:
        return
    if is_held(n.escrow):
        if now_ns >= n.escrow.ends_ns:
            n.level[which] = min(n.level[which], <int64_t>0)
        return
    fill(
        rate, most_of(n.escrow, rate), tick_of(n.escrow), &n.level[which], &n.at_ns[which], now_ns
    )


cdef inline int64_t filled_ns(const Quota* n, int which, int64_t missing, int64_t now_ns) noexcept:
    """Return when a bucket that was filled up to the present will hold `missing` more. O(1)."""
    cdef int64_t ticks = ticks_for(missing, n.rate[which])
    if n.escrow != NULL:
        return escrow_due_ns(n.escrow, which, n.at_ns[which], ticks, now_ns)
    return n.at_ns[which] + ticks * QUOTA_TICK_NS


@cython.final
cdef class Quotas:
    cdef Quota* nodes
    cdef int32_t count, size
    cdef Bill* bills  # 0 stands for none
    cdef int32_t bill_count, bill_size, first_free
    cdef list waiting  # for each node, a line of the flows that wait for it
    cdef Heap wakes  # nodes that flows wait for, by the time when they will hold enough
    cdef Heap asking  # flows whose heads have no bill yet
    cdef Heap ready  # nodes whose waiters have to be looked at
    cdef bint has_budgets
    cdef int64_t budget_until_ns  # when what a budget refused last fits; 0: none refused it
    cdef int spent_budget  # which that is: 1 + BUDGET_*
    cdef bint has_work, is_new  # there is something for run_quotas(); limits are new
    cdef DirtyQueue changed  # nodes whose levels or bills are new
    cdef DirtyQueue drawn, wanting  # nodes in escrow that were drawn from, or that flows wait for
    cdef bint in_escrow, is_wanted  # `wanting` has news for the member's task
    cdef bint store_away  # nothing can be got from it: a tenant that refuses does not wait for it
    cdef bint asks_store  # what was looked at last lacks only chunks, and may get them at once
    cdef int64_t escrow_share  # as in Escrow
    cdef int64_t now_ns
    cdef int64_t refused_until_ns  # when the last that was refused would have fitted
    cdef Requests requests
    cdef Classes classes
    cdef Guarantees guarantees
    cdef Fuse fuse

    def __cinit__(self, Requests requests, Classes classes, Fuse fuse):
        self.requests = requests
        self.classes = classes
        self.guarantees = Guarantees(classes)
        self.fuse = fuse
        self.waiting = []
        self.wakes = Heap()
        self.asking, self.ready = Heap(), Heap()
        self.bill_count = 1
        self.changed, self.drawn, self.wanting = DirtyQueue(), DirtyQueue(), DirtyQueue()

    def __dealloc__(self):
        cdef int32_t node
        for node in range(self.count):
            free(self.nodes[node].escrow)
        free(self.nodes)
        free(self.bills)

    cdef int32_t add(self) except -1:
        """A node without limits. O(1) amortised."""
        cdef int32_t size
        if self.count == self.size:
            size = doubled(self.size, 0, 16)
            self.nodes = <Quota*>grow(self.nodes, self.size, size, sizeof(Quota))
            self.size = size
        self.nodes[self.count].parent = self.nodes[self.count].node = NONE
        self.waiting.append(None)
        self.count += 1
        self.changed.reserve(self.count)
        self.drawn.reserve(self.count)
        self.wanting.reserve(self.count)
        return self.count - 1

    cdef void limit(self, int32_t node, int which, int64_t rate) noexcept:
        """Give a bucket another limit: what was taken from it stays taken."""
        cdef Quota* n = &self.nodes[node]
        self.changed.mark(node)
        self.refill(n, which)
        if is_held(n.escrow):  # the store gives its bucket the other limit
            n.level[which] = min(n.level[which], rate * MICRO) if n.rate[which] else 0
        else:
            n.level[which] += (rate - n.rate[which]) * MICRO
            if n.rate[which] == 0:
                n.level[which] = rate * MICRO
                n.at_ns[which] = self.now_ns
        n.rate[which] = rate
        self.cap_debt(node, which, 1, 0)

    cdef void cap_debt(self, int32_t node, int which, int windows, int64_t more) noexcept:
        """Let a bucket owe at most `windows` minutes of its limit, and `more` units. O(1).

        The tokens of open bills come on top, because they may still be given back.
        """
        cdef Quota* n = &self.nodes[node]
        cdef wide owes = <wide>n.rate[which] * windows + more
        if n.rate[which] == 0:
            return
        if which == RATE_REQUESTS:
            owes += n.live + n.owed_requests
        if which == RATE_INPUT or which == RATE_TOTAL:
            owes += n.open_input + n.owed_input
        if which == RATE_OUTPUT or which == RATE_TOTAL:
            owes += n.open_output + n.owed_output
        if -<wide>n.level[which] > owes * MICRO:
            self.refill(n, which)
            n.level[which] = max(n.level[which], <int64_t>(-owes * MICRO))

    cdef inline void refill(self, Quota* n, int which) noexcept:
        refill(n, which, self.now_ns)

    cdef int64_t due(self, int32_t node, const Take* t) noexcept:
        """Return when the node will hold enough if nothing else happens: now or earlier if it does
        already, -1 if that depends on the end of a request. A bucket that is smaller than the
        amount, which a reload can bring about, has to be full. O(1)."""
        cdef Quota* n = &self.nodes[node]
        cdef int64_t missing, latest = 0
        cdef int k
        if self.lacks_slot(n):
            return NONE
        for k in range(RATES):
            if n.rate[k]:
                self.refill(n, k)
                missing = min(t.micro[k], most_of(n.escrow, n.rate[k])) - n.level[k]
                if missing > 0:
                    latest = max(latest, filled_ns(n, k, missing, self.now_ns))
        return max(latest, self.budget_due(node, t)) if self.has_budgets else latest

    cdef inline bint lacks_slot(self, const Quota* n) noexcept:
        return n.concurrency > 0 and n.live >= slots_of(n.escrow, n.concurrency, self.now_ns)

    cdef int64_t budget_due(self, int32_t node, const Take* t) noexcept:
        """Return when the budgets of a node have room for this much; 0: now. O(1)."""
        cdef int64_t latest = 0, due_ns
        cdef int k
        for k in range(BUDGETS):
            due_ns = budget_due_ns(
                &self.nodes[node].budgets[k], t.input_tokens + t.output_tokens, self.now_ns
            )
            if due_ns > latest:
                latest, self.spent_budget = due_ns, 1 + k
        return latest

    cdef void turn(
        self, int32_t node, int which, int64_t period, int64_t ends_ns, int64_t spent
    ) except *:
        """A budget's period has begun, or ends at another time. O(1)."""
        cdef Quota* n = &self.nodes[node]
        if budget_turn(
            &n.budgets[which], period, ends_ns, spent + n.open_input + n.open_output
        ):
            self.mark_ready(node)

    cdef inline bint fits(self, int32_t node, const Take* t) noexcept:
        cdef int64_t due_ns = self.due(node, t)
        return 0 <= due_ns <= self.now_ns

    cdef bint may_get_chunk(self, int32_t node, const Take* t) noexcept:
        """Return whether a node may lack nothing but a chunk or a slot that the store has. O(1)."""
        cdef const Quota* n = &self.nodes[node]
        cdef bint is_short = False
        cdef int k
        if self.store_away or not is_held(n.escrow):
            return False
        if self.lacks_slot(n):
            is_short = True
            if not may_get_slot(n.escrow, n.concurrency, n.live, self.now_ns):
                return False
        for k in range(RATES):
            if n.rate[k] and min(t.micro[k], n.rate[k] * MICRO) > n.level[k]:
                is_short = True
                if n.escrow.due_ns[k] > self.now_ns:
                    return False
        return is_short

    cdef bint can_hold(self, int32_t node, const Take* t) noexcept:
        """Return whether this much can ever be taken at once."""
        cdef int k
        for k in range(RATES):
            if self.nodes[node].rate[k] and t.micro[k] > self.nodes[node].rate[k] * MICRO:
                return False
        for k in range(BUDGETS):
            if 0 < self.nodes[node].budgets[k].limit < t.input_tokens + t.output_tokens:
                return False
        return True

    cdef void draw(self, int32_t node, int64_t input_tokens, int64_t output_tokens) noexcept:
        """Take tokens from a node's buckets and budgets; negative: give back. O(1)."""
        cdef int k
        for k in range(BUDGETS):
            self.nodes[node].budgets[k].spent += input_tokens + output_tokens
        self.draw_buckets(node, input_tokens, output_tokens)

    cdef void draw_buckets(
        self, int32_t node, int64_t input_tokens, int64_t output_tokens
    ) noexcept:
        cdef Quota* n = &self.nodes[node]
        cdef int64_t micro
        cdef int k
        self.changed.mark(node)
        self.drawn.mark(node)
        for k in range(RATE_INPUT, RATES):
            if n.rate[k]:
                micro = 0
                if k != RATE_OUTPUT:
                    micro += input_tokens * MICRO
                if k != RATE_INPUT:
                    micro += output_tokens * MICRO
                self.refill(n, k)
                n.level[k] = min(n.level[k] - micro, n.rate[k] * MICRO)

    cdef void draw_request(self, int32_t node, int64_t requests) noexcept:
        cdef Quota* n = &self.nodes[node]
        self.changed.mark(node)
        self.drawn.mark(node)
        if n.rate[RATE_REQUESTS]:
            self.refill(n, RATE_REQUESTS)
            n.level[RATE_REQUESTS] = min(
                n.level[RATE_REQUESTS] - requests * MICRO, n.rate[RATE_REQUESTS] * MICRO
            )

    cdef void tightest_limits(self, int32_t node, int32_t end, int64_t now_ns, Told* told) noexcept:
        """Find the tightest limit of each kind (the rates, concurrency, the budgets) along a chain
        up to `end`: the one of which the least is left, at this time or later. Changes nothing.
        O(levels)."""
        cdef Quota n
        cdef int64_t left
        cdef int k, at
        memset(told, 0, LIMITS_TOLD * sizeof(Told))
        while node != end:
            n = self.nodes[node]
            for k in range(RATES):
                if n.rate[k]:
                    refill(&n, k, max(now_ns, self.now_ns))
                    if is_held(n.escrow):  # held by all members together
                        n.level[k] = could_hold(
                            n.escrow, k, n.rate[k], n.level[k], max(now_ns, self.now_ns)
                        )
                    left = max(<int64_t>0, n.level[k] // MICRO)
                    if told[k].limit == 0 or left < told[k].left:
                        told[k].limit, told[k].left = n.rate[k], left
                        left = n.rate[k] * MICRO - n.level[k]
                        left = ticks_for(left, n.rate[k]) * QUOTA_TICK_NS
                        told[k].reset_ms = (left + NS_PER_MS - 1) // NS_PER_MS
            left = max(<int64_t>0, slots_of(n.escrow, n.concurrency, self.now_ns) - n.live)
            if is_held(n.escrow):
                left = min(left + n.escrow.slots_left, max(<int64_t>0, n.concurrency - n.live))
            if n.concurrency and (told[RATES].limit == 0 or left < told[RATES].left):
                told[RATES].limit, told[RATES].left = n.concurrency, left
            for k in range(BUDGETS):
                left = budget_left(&n.budgets[k])
                at = RATES + 1 + k
                if n.budgets[k].limit and (told[at].limit == 0 or left < told[at].left):
                    told[at].limit, told[at].left = n.budgets[k].limit, left
                    left = max(<int64_t>0, n.budgets[k].ends_ns - max(now_ns, self.now_ns))
                    told[at].reset_ms = (left + NS_PER_MS - 1) // NS_PER_MS
            node = n.parent

    cdef int bill(self, int32_t i, const Take* t, int32_t node) except -1:
        """Take from one node, and write it on the request's bill. O(1)."""
        cdef Request* r = &self.requests.items[i]
        cdef int32_t size
        cdef Bill* b
        if r.bill == 0:
            if self.first_free:
                r.bill = self.first_free
                self.first_free = self.bills[r.bill].next_free
            else:
                if self.bill_count >= self.bill_size:
                    size = larger(self.bill_size, self.bill_count)
                    self.bills = <Bill*>extend(self.bills, size, sizeof(Bill))
                    memset(self.bills, 0, sizeof(Bill))
                    self.bill_size = size
                r.bill = self.bill_count
                self.bill_count += 1
            self.bills[r.bill].count = 0
            self.bills[r.bill].share_source = -2  # not yet
            self.bills[r.bill].share_tokens = 0
            self.bills[r.bill].input_tokens = t.input_tokens
            self.bills[r.bill].output_tokens = t.output_tokens
        b = &self.bills[r.bill]
        if b.count == QUOTA_DEPTH:
            raise self.fuse.blow("quota: a bill of too many levels")
        b.nodes[b.count] = node
        b.count += 1
        self.nodes[node].live += 1
        self.nodes[node].open_input += b.input_tokens
        self.nodes[node].open_output += b.output_tokens
        self.draw_request(node, 1)
        self.draw(node, b.input_tokens, b.output_tokens)
        return 0

    cdef int correct(self, int32_t i, int64_t input_tokens, int64_t output_tokens) except -1:
        """Let a bill be about exactly so much. O(1)."""
        cdef Bill* b = &self.bills[self.requests.items[i].bill]
        cdef int64_t more_input = input_tokens - b.input_tokens
        cdef int64_t more_output = output_tokens - b.output_tokens
        cdef int k
        if more_input or more_output:
            for k in range(b.count):
                self.draw(b.nodes[k], more_input, more_output)
                self.nodes[b.nodes[k]].open_input += more_input
                self.nodes[b.nodes[k]].open_output += more_output
                if more_input < 0 or more_output < 0:
                    self.mark_ready(b.nodes[k])
            b.input_tokens = input_tokens
            b.output_tokens = output_tokens
        return 0

    cdef int settle(self, int32_t i, bint has_run) except -1:
        """Close a bill; one that stands for nothing that ran is given back whole. O(1)."""
        cdef Request* r = &self.requests.items[i]
        cdef Bill* b = &self.bills[r.bill]
        cdef Take t
        cdef int k, which
        if not has_run:
            self.correct(i, 0, 0)
        t = take_of(b.input_tokens, b.output_tokens)
        for k in range(b.count):
            if not has_run:
                self.draw_request(b.nodes[k], -1)
            self.nodes[b.nodes[k]].live -= 1
            self.nodes[b.nodes[k]].open_input -= b.input_tokens
            self.nodes[b.nodes[k]].open_output -= b.output_tokens
            for which in range(RATES):
                self.cap_debt(b.nodes[k], which, 1, t.micro[which] // MICRO)
            self.changed.mark(b.nodes[k])
            if self.nodes[b.nodes[k]].live < 0:
                raise self.fuse.blow("quota: more bills closed than written")
            self.mark_ready(b.nodes[k])
        b.next_free = self.first_free
        self.first_free = r.bill
        r.bill = 0
        return 0

    cdef int resume(self, int32_t bill) except -1:
        """Give back what a bill has in common with those of before a restart: the restored levels
        lack it already. O(levels)."""
        cdef Bill* b = &self.bills[bill]
        cdef Quota* n
        cdef int64_t requests, input_tokens, output_tokens
        cdef int k
        for k in range(b.count):
            n = &self.nodes[b.nodes[k]]
            requests = min(n.owed_requests, <int64_t>1)
            input_tokens = min(n.owed_input, b.input_tokens)
            output_tokens = min(n.owed_output, b.output_tokens)
            n.owed_requests -= requests
            n.owed_input -= input_tokens
            n.owed_output -= output_tokens
            self.draw_request(b.nodes[k], -requests)
            self.draw_buckets(b.nodes[k], -input_tokens, -output_tokens)
            self.mark_ready(b.nodes[k])
        return 0

    cdef int mark_ready(self, int32_t node) except -1:
        """Have the node's waiters looked at before the next grant."""
        if self.waiting[node] is not None or (
            node == self.guarantees.root and self.guarantees.throttled
        ):
            self.has_work = True
            self.ready.put(node, node, 0)
        return 0

    cdef Line queue_at(self, int32_t node):
        if self.waiting[node] is None:
            self.waiting[node] = Line(self.classes)
        return <Line>self.waiting[node]

    cdef inline bint is_awaited(self, int32_t node):
        return self.waiting[node] is not None and (<Line>self.waiting[node]).count > 0

    cdef int run_timers(self, int64_t work_max) except -1:
        """Stir the nodes that hold enough now, at most `work_max`, and return their number. O(log
        n) each."""
        cdef int64_t work = 0
        cdef int32_t node
        while self.wakes.count and self.wakes.nodes[0].key <= self.now_ns and work < work_max:
            node = self.wakes.nodes[0].id
            self.wakes.remove(node)
            self.mark_ready(node)
            work += 1
        return <int>work

    cdef void fill_up(self) noexcept:
        """Fill all buckets, less what open bills hold. O(nodes + bills)."""
        cdef int32_t node, i
        cdef int k
        cdef Bill* b
        self.changed.mark_all(self.count)
        for node in range(self.count):
            for k in range(RATES):
                if is_held(self.nodes[node].escrow):  # its open bills are the store's already
                    continue
                self.nodes[node].level[k] = self.nodes[node].rate[k] * MICRO
                self.nodes[node].at_ns[k] = self.now_ns
            if self.waiting[node] is not None:
                (<Line>self.waiting[node]).aged = False
            self.mark_ready(node)
        for i in range(self.requests.used):
            if self.requests.items[i].state != FREE and self.requests.items[i].bill:
                b = &self.bills[self.requests.items[i].bill]
                for k in range(b.count):
                    if not is_held(self.nodes[b.nodes[k]].escrow):
                        self.draw_request(b.nodes[k], 1)
                        self.draw_buckets(b.nodes[k], b.input_tokens, b.output_tokens)


ctypedef struct QuotaLimits:
    int64_t rates[RATES]
    int64_t concurrency
    int64_t share, lends, borrows  # see guarantees.pxi
    int64_t budgets[BUDGETS]
    int64_t max_wait_ns  # of a tenant's requests in the queue; 0: no limit of its own
