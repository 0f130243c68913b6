# Flow and Queue: the records of one tenant in one class. See flows.pxi for what they stand for.

ctypedef struct Flow:
    # An Admit looks at the fields up to `served`. They lie together, so that a flow that is not in
    # the processor's cache costs few of its lines.
    int64_t vtc
    int64_t average_milli  # moving average of its outputs, in thousandths of a token
    int64_t granted_at_ns  # -1: never
    int64_t received
    uint64_t salt  # salt of request ids, if its number does not name the tenant; 0: it does
    Refusals* refusals  # NO_REFUSALS until the first
    int32_t weight_milli
    int32_t queued, live
    int32_t first_queue
    int64_t queued_tokens, queued_work  # queued input; the charge to expect for it
    int64_t linger_until_ns  # 0: it does not linger
    int32_t linger_next, linger_prev  # among the flows that were active lately
    int64_t held_tokens  # input of the requests that `held` counts
    int32_t held  # requests that wait for a cap of sessions, and are in no queue
    int32_t cls  # its class
    int32_t default_class  # class of requests that name none; the rest are fields of the base
    uint32_t named_classes  # that requests may name beside its own, as bits
    int32_t quota, own_quota  # first node of its chain; the node of its own limits; -1: none
    int32_t waits_at  # node whose quota it waits for; -1: none
    int32_t wait_head, wait_slot  # the request it waits with; its place among the waiters
    int32_t throttled  # queues that are held to its share, see borrowing
    int32_t guarantee  # first node with a share on its chain; -1: none
    int32_t first_position  # in pools, while there are several; -1: none
    int32_t parent  # its node in the tree of shares, of the same class; -1: none, see tree.pxi
    # Of a node: the number of its Family, and its tokens and `granted` are those of flows that were
    # below it and are not any more; -1: it is a tenant's flow.
    int32_t family
    int32_t place  # in the family of its parent
    int32_t depth  # nodes above it
    int32_t agents  # the number of its FlowSessions; 0: it has no sessions of agents
    int32_t voucher  # the principal whose queued requests have no Voucher
    uint8_t resumed  # active before a restart, and so for a while after it
    uint8_t refuses  # it would rather be refused than wait for its quotas
    uint8_t dry_runs  # its requests are decided and counted, and all granted at once
    uint8_t exempt  # its class is
    uint8_t limited, born  # held to its share, it may not borrow; made at first sight
    int16_t in_sets  # its queues of sets of pools that stand in lines
    Rate served  # while it is backlogged
    # The rest, of grants, reports and ends.
    int64_t interval_ns  # moving average of the time between two grants
    int64_t promised_tokens, posted_tokens
    int64_t input_tokens, cached_tokens, output_tokens, input_before, cached_before  # forgotten
    int64_t kv_steps  # token-steps of the KV cache that it was charged for
    int64_t granted, completed, cancelled, expired
    FlowTimes* times  # where its times are counted: its own, or its class's other_times
    FlowTimes* own_times  # NULL until its tenant is shown, see histograms.pxi
    int64_t wait_lift, throttled_lift  # lifts of the node and the desk when it began to wait there
    int64_t open_charged  # what the counter carries for its leases
    int64_t owed  # what it carries for those of before a restart, see restore
    int64_t next_retry_at_ns  # when the last refused request may retry
    int64_t wait_error_ns, waits_judged  # moving average of the error of estimated waits
    int64_t too_long_ns, too_long_at_ns  # by which these estimates exceed waits; when learned
    int64_t gave_up_ns  # when the last that was expected in time left its queue without a grant
    int64_t first_us, forecast_first_us, first_judged  # to the first token: as it was, as forecast
    int64_t max_wait_ns  # of its requests in the queue, of the base; 0: no limit of its own
    int32_t base, sibling  # the tenant's flow in the default class; another one of it, -1: none
    ShedAccuracy shed_accuracy  # see deadline_shedding.pxi
    int32_t answers  # that are stored
    int64_t watched  # pools rest that a charge of it would stir, see rest.pxi
    int32_t maker  # made at first sight: 1 + the principal that named it; 0: not known
    int32_t group  # quota node of the group that the tenant is in; -1: none
    int32_t vouchers, vouched  # other principals: their number; what they have queued
    int64_t vouched_tokens  # input that they have queued

ctypedef struct Queue:
    Chain chain
    int32_t head  # that stands for it; without sessions the first of the chain; -1: it is empty
    int32_t line  # the number of its SessionLine; 0: it has none
    int32_t flow
    int32_t target
    int32_t next_queue
    int64_t work_in  # that was queued here, ever
    int32_t ordinal  # ordinal of the next arrival
    int32_t root  # root of its treap
    bint by_deadline
    bint in_tree  # it has a treap: its requests do not come in the order of the queue
    bint throttled  # its head is beyond the share of its flow while that binds
    int64_t key  # of its head, where a function gives keys
    bint stands  # it is in the line of its target, or in those of the pools of its set
    int32_t position  # its flow's position in its pool, once known; -1: not yet, or for any pool
