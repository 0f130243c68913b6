# Views show and check the state. They change nothing that is decided.

include "view/sessions.pxi"    # sessions of agents, as dictionaries, and their invariants
include "view/stats.pxi"       # Stats, as dictionaries
include "view/unlisted_sums.pxi"  # sums over tenants at first sight
include "view/groups.pxi"      # the tree of shares, as dictionaries
include "view/histograms.pxi"  # histograms, as dictionaries
include "view/session_stories.pxi"  # why a session of an agent waits
include "view/explain.pxi"     # why a request waits
include "view/adapter_invariants.pxi"  # verifies rare fields of requests, and their adapters
include "view/pool_order_invariants.pxi"  # verifies which pools may be left out
include "view/tree_invariants.pxi"  # verifies the tree of shares
include "view/set_invariants.pxi"  # verifies the sets of pools that requests name
include "view/invariants.pxi"  # verifies every invariant from the records
