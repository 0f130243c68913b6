# cython: language_level=3
# cython: boundscheck=False
# cython: wraparound=False
# cython: cdivision=True
# cython: initializedcheck=False
"""Structures of the core are held here for Python, without a scheduler around them."""

cimport cython

include "base.pxi"
include "wire.pxi"
include "model.pxi"


cdef class ProbeHeap:
    cdef Heap heap

    def __init__(self):
        self.heap = Heap()

    def put(self, int32_t id, int64_t key, int64_t tie):
        self.heap.put(id, key, tie)

    def remove(self, int32_t id):
        self.heap.remove(id)

    def __len__(self):
        return self.heap.count

    def __contains__(self, int32_t id):
        return self.heap.has(id)

    def key_of(self, int32_t id):
        return self.heap.key_of(id)

    def first(self):
        return self.heap.nodes[0].key, self.heap.nodes[0].tie, self.heap.nodes[0].id

    def is_valid(self):
        return self.heap.valid()

    def first_key(self, int64_t other):
        return first_key(<void*>self.heap, other)

    def best_first(self, ProbeHeap other):
        cdef int32_t found[LOOKAHEAD]
        cdef bint of_other[LOOKAHEAD]
        cdef int32_t count = best_first(self.heap, other.heap, 0, found, of_other, 0)
        return [(found[k], of_other[k]) for k in range(count)]


cdef class ProbeIndexSet:
    cdef IndexSet held

    def __init__(self):
        set_clear(&self.held, POOLS_MAX + 1)

    def add(self, int32_t number):
        set_add(&self.held, number)

    def remove(self, int32_t number):
        set_remove(&self.held, number)

    def clear(self, int32_t count):
        set_clear(&self.held, count)

    def __contains__(self, int32_t number):
        return set_has(&self.held, number)


cdef class ProbeMinTree:
    cdef MinTree tree

    def __init__(self):
        self.tree = MinTree()

    def put(self, int32_t number, int64_t key):
        self.tree.put(number, key)

    def remove(self, int32_t number):
        self.tree.remove(number)

    def first(self):
        return self.tree.first()

    def is_valid(self):
        return self.tree.valid()


cdef class ProbeTable:
    cdef Table table

    def __init__(self, key=None):
        self.table = Table()
        if key is not None:
            self.table.set_key(key[0], key[1])

    def __setitem__(self, key, int32_t value):
        self.table.put(key[0], key[1], value)

    def put_new(self, key, int32_t value):
        self.table.put_new(key[0], key[1], value)

    def __getitem__(self, key):
        return self.table.get(key[0], key[1])

    def __delitem__(self, key):
        self.table.remove(key[0], key[1])

    def __len__(self):
        return self.table.count

    @property
    def places(self):
        return self.table.mask + 1

    def home(self, uint64_t hi, uint32_t lo):
        return self.table._home(hi, lo) & self.table.mask

    @property
    def is_moving(self):
        return self.table.former != NULL

    @property
    def moves(self):
        return self.table.moves


cdef class ProbeTreaps:
    cdef Treaps treaps

    def __init__(self, uint64_t salt):
        self.treaps = Treaps()
        self.treaps.salt = salt

    def insert(self, root, i, key, seq, work, arrival_ns):
        return self.treaps.insert(root, i, key, seq, work, arrival_ns)

    def remove(self, root, i):
        return self.treaps.remove(root, i)

    def before(self, i):
        return self.treaps.before(i)

    def place(self, i):
        return self.treaps.place(i)

    def work_until(self, root, key):
        return self.treaps.work_until(root, key)

    def work_before(self, i):
        return self.treaps.work_before(i)

    def sums(self, int32_t root):
        cdef Branch* b = &self.treaps.items[root]
        return b.count, b.work, b.oldest_ns

    def is_valid(self, int32_t root):
        return self.treaps.valid(root)

    def depth(self, int32_t root):
        if root == NONE:
            return 0
        cdef Branch* b = &self.treaps.items[root]
        return 1 + max(self.depth(b.left), self.depth(b.right))


cdef class ProbeSketch:
    cdef Sketch sketch

    def __init__(self, int32_t ledger_ppm, int32_t median_ppm):
        memset(&self.sketch, 0, sizeof(Sketch))
        self.sketch.level_ppm[LEDGER] = ledger_ppm
        self.sketch.level_ppm[MEDIAN] = median_ppm

    def add(self, int64_t length):
        sketch_add(&self.sketch, length)

    def steer(self, int32_t level_ppm):
        self.sketch.level_ppm[LEDGER] = level_ppm
        sketch_settle(&self.sketch, LEDGER)

    def buckets(self):
        return self.sketch.at[LEDGER], self.sketch.at[MEDIAN]

    def beyond(self, int64_t produced):
        return sketch_beyond(&self.sketch, produced)

    @property
    def mass(self):
        return self.sketch.mass

    @property
    def counts(self):
        return {k: self.sketch.counts[k] for k in range(BUCKETS) if self.sketch.counts[k]}


cdef class ProbeSlab:
    cdef SlabAllocator slab
    cdef size_t size

    def __init__(self, size_t size):
        self.slab = SlabAllocator(size)
        self.size = size

    def alloc(self):
        return <size_t>self.slab.alloc()

    def free(self, size_t record):
        self.slab.free(<void*>record)

    def write(self, size_t record, uint8_t byte):
        memset(<void*>record, byte, self.size)

    def read(self, size_t record):
        return (<uint8_t*>record)[:self.size]


cdef class ProbeQueue:
    cdef DirtyQueue queue

    def __init__(self, bint on):
        self.queue = DirtyQueue()
        self.queue.on = on

    def reserve(self, int32_t numbers):
        self.queue.reserve(numbers)

    def mark(self, int32_t number):
        self.queue.mark(number)

    def take(self):
        return self.queue.take()


cdef class ProbePeak:
    """Holds the growing leases of one pool."""

    cdef Requests requests
    cdef GrowingLeases runs
    cdef int64_t block

    def __init__(self, int64_t block):
        self.requests = Requests(Principals())
        self.block = block
        memset(&self.runs, 0, sizeof(self.runs))

    def __dealloc__(self):
        free(self.runs.items)

    cdef GrowingLease _figures(self, each, left, width, whole):
        cdef GrowingLease run
        memset(&run, 0, sizeof(run))
        run.tokens_left, run.width, run.whole = left, width, whole
        set_growth(&run, each, self.block)
        return run

    def open(self, int64_t each, int64_t left, int64_t width, int64_t whole):
        cdef int32_t id = self.requests.allocate()
        self.requests.open_lease(id)
        growing_add(&self.runs, self.requests, id)
        self.report(id, each, left, width, whole)
        return id

    def report(self, int32_t id, int64_t each, int64_t left, int64_t width, int64_t whole):
        cdef GrowingLease run = self._figures(each, left, width, whole)
        growing_put(&self.runs, self.requests.items[id].lease.growing_at, &run)

    def close(self, int32_t id):
        growing_remove(&self.runs, self.requests, id)
        self.requests.release(id)

    def hold(self, int64_t fixed_tokens):
        self.runs.fixed_tokens = fixed_tokens

    def peak(self, one_more=None):
        cdef GrowingLease run
        if one_more is None:
            return growing_peak(&self.runs, self.requests, NULL, self.block)
        run = self._figures(one_more[0], one_more[1], one_more[2], one_more[3])
        return growing_peak(&self.runs, self.requests, &run, self.block)

    def project(self, head, int64_t room, bint by_peak):
        cdef int64_t left, spare
        cdef GrowingLease run = self._figures(head[0], head[1], head[2], head[3])
        left = growing_project(&self.runs, self.requests, &run, room, by_peak, &spare)
        return (None if left == NEVER else left), spare


def hash_of(bytes key, bytes data):
    cdef uint64_t k[2]
    memcpy(k, <const uint8_t*>key, 16)
    cdef Hash128 found = sip128(k[0], k[1], data, len(data))
    return found.hi.to_bytes(8, "little") + found.lo.to_bytes(8, "little")


def place_hash(uint64_t k0, uint64_t k1, uint64_t hi, uint64_t lo):
    return sip64(k0, k1, hi, lo)


def bucket_and_middle(int64_t length):
    cdef int32_t bucket = bucket_of(length)
    return bucket, bucket_middle(bucket)


def size_for(int32_t size, int32_t number):
    return larger(size, number)


def earlier_of(int64_t a, int64_t b):
    return earlier(a, b)
