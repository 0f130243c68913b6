# What is shown, saved and checked. Nothing is decided by it.

include "view/stats.pxi"       # Stats, as dictionaries
include "view/explain.pxi"     # why a request waits
include "view/save.pxi"        # rows of what has changed
include "view/invariants.pxi"  # every invariant, verified anew
