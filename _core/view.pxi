# View shows, saves and checks the state. It decides nothing.

include "view/stats.pxi"       # Stats, as dictionaries
include "view/explain.pxi"     # why a request waits
include "view/save.pxi"        # rows of what has changed
include "view/invariants.pxi"  # verifies every invariant from the records
