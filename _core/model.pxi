# The records and their own invariants. Nothing here decides which request goes first.

include "model/classes.pxi"        # Class, Classes, Line: priority classes and the heads of each
include "model/predictor.pxi"      # Predictor: output lengths by tenant and adapter
include "model/principals.pxi"     # Principal, Principals: what each caller may name and hold
include "model/pool_sets.pxi"      # PoolSets: the sets of pools that requests name
include "model/requests.pxi"       # Request, Lease, Requests, Chain: every request and its state
include "model/prices.pxi"         # price_of(): what a request costs
include "model/wait_times.pxi"     # how long a request has waited, and for what
include "model/rejection_log.pxi"  # RejectionLog: the last requests that were refused
include "model/recent_ids.pxi"     # RecentIds: the ids of the last requests, for people
include "model/client_ids.pxi"     # ClientIds: the ids by which clients know their requests
include "model/places.pxi"         # Places: of queued requests, for the next leader
include "model/token_bucket.pxi"   # Bucket: tokens that are refilled at a rate
include "model/guarantees.pxi"     # Guarantee, Guarantees: what a group is owed of a saturated pool
include "model/budgets.pxi"        # Budget: tokens of a calendar day or month
include "model/escrow.pxi"         # Escrow: buckets that all members of a cluster share
include "model/quotas.pxi"         # Quota, Quotas, Bill: limits of tenants, groups and models
include "model/tenant_rules.pxi"   # TenantRule: what tenants get that nothing lists
include "model/rates.pxi"          # Rate, ShedAccuracy: averages and rates over time
include "model/histograms.pxi"     # TimeHistogram, FlowTimes: times that requests waited
include "model/prefixes.pxi"       # PrefixIndex, Prefixes: which prompts a pool's cache may hold
include "model/settings.pxi"       # Ask, policies, orders, checked(): what a scheduler is made with
include "model/positions.pxi"      # Position, Positions: where flows stand in each of several pools
include "model/pool_order.pxi"     # PoolOrder: which pools a dispatch looks at, the emptiest first
include "model/tree.pxi"           # Family: the children of a node in the tree of shares
include "model/agent_sessions.pxi"  # AgentSessions: sessions of agents, and what they hold
include "model/vouchers.pxi"       # Vouchers: whose requests wait in a queue that principals share
include "model/flow.pxi"           # Flow, Queue: the records of a tenant in a class
include "model/flows.pxi"          # Flows: tenants' counters and queues
include "model/flow_averages.pxi"  # what flows learn from their requests, and forget
include "model/served_rows.pxi"    # ServedRows: what flows were served, for other members
include "model/adapters.pxi"       # Adapters: names of LoRA adapters and who uses them
include "model/loras.pxi"          # Loras: the adapters that are active in a pool
include "model/peak_usage.pxi"     # GrowingLeases: the peak that growing leases will reach together
include "model/pool.pxi"           # Pool: one pool's figures, limits and promises
include "model/ledger.pxi"         # Ledger: what each pool has promised
include "model/usage_rows.pxi"     # UsageRows: what ended leases used, for a ledger
include "model/core_state.pxi"     # Core: the state of one scheduler; known_*(), check_invariant()
include "model/session_state.pxi"  # SessionState: what a stream owns and has not sent yet
include "model/saved_rows.pxi"     # the rows in which the state outlives the process
