# Structures that know nothing of scheduling, and the bounds of all numbers.

include "base/prelude.pxi"      # libc, CPython's objects, bounds of numbers, times without end
include "base/settings.pxi"     # Settings, PoolLimits, their ranges; generated from spec/
include "base/errors.pxi"       # CallerError, InvariantError, Fuse, invalid()
include "base/arrays.pxi"       # grow(), extend(), larger(), doubled(): arrays that grow
include "base/hash.pxi"         # sip128(), mix(): keyed hashes of names and ids
include "base/table.pxi"        # Table: a hash table of 128-bit keys
include "base/heap.pxi"         # Heap: an indexed 4-ary heap; best_first() of two heaps
include "base/index_set.pxi"    # IndexSet: small numbers as bits
include "base/min_tree.pxi"     # MinTree: the least of the keys of small numbers
include "base/slab.pxi"         # SlabAllocator: records of one size that never move
include "base/dirty_queue.pxi"  # DirtyQueue: what has changed since it was saved last
include "base/sketch.pxi"       # Sketch: quantiles of lengths over a sliding window
include "base/treap.pxi"        # Treaps: an order with places and sums, for many queues at once
