# Which blocks of prompts pools were lately given, so that what shares a prefix can go where that is
# cached. Callers name the blocks by chained hashes, each of which stands for the whole prefix.
#
# An index of a pool forgets the blocks that were given longest ago, as the engine's cache does, and
# holds no more tokens than the pool. The deepest block of a request is noted first. So a block is
# always younger than the blocks behind it, the known blocks of a prompt are its first ones, and
# their number is found by bisection. For hashes that are no chain, the match may have any length
# between none and all of them, which harms only the request that sent them.

cdef enum:
    PREFIX_KEPT_MAX = 512  # hashes of one request; what lies beyond is not looked for
    PREFIX_QUEUED_MAX = 1 << 22  # hashes of all queued requests, 32 MiB; later requests have none

# The prefix of a queued request.
ctypedef struct Kept:
    uint64_t* keys  # keys of its first blocks; NULL: none
    int32_t count
    int32_t tokens  # in each block

ctypedef struct Block:
    uint64_t key
    int32_t newer, older  # in order of the last use; `older` also links free records
    int32_t tokens


@cython.final
cdef class PrefixIndex:
    """Holds the blocks that one pool was given lately."""

    cdef Table places
    cdef Block* blocks
    cdef int32_t size, used, first_free, newest, oldest
    cdef int64_t tokens
    cdef int64_t asked_tokens, matched_tokens  # sums over all requests granted with hashes

    def __cinit__(self):
        self.forget()

    def __dealloc__(self):
        free(self.blocks)

    cdef int forget(self) except -1:
        """The cache is empty. O(1)."""
        free(self.blocks)
        self.blocks = NULL
        self.size = self.used = 0
        self.tokens = 0
        self.first_free = self.newest = self.oldest = NONE
        self.places = Table()
        return 0

    cdef int32_t match(self, const Kept* kept) noexcept:
        """Return how many blocks of a request are here, from the first on. O(log blocks of it)."""
        cdef int32_t low = 0, high = kept.count, middle
        if self.places.count == 0 or self.places.get(kept.keys[0], 0) == NONE:
            return 0
        low = 1
        while low < high:
            middle = (low + high + 1) >> 1
            if self.places.get(kept.keys[middle - 1], 0) != NONE:
                low = middle
            else:
                high = middle - 1
        return low

    cdef int take(self, const Kept* kept, int64_t blocks_max, int64_t tokens_max) except -1:
        """The pool is given a request's blocks. O(blocks of it) amortised."""
        cdef int32_t k
        for k in range(kept.count - 1, -1, -1):
            self._touch(kept.keys[k], kept.tokens)
        return self.trim(blocks_max, tokens_max)

    cdef int trim(self, int64_t blocks_max, int64_t tokens_max) except -1:
        """Forget the oldest until the rest fits both bounds. O(blocks forgotten)."""
        cdef int32_t k
        while self.oldest != NONE and (
            <int64_t>self.places.count > blocks_max or self.tokens > tokens_max
        ):
            k = self.oldest
            self._unlink(k)
            self.places.remove(self.blocks[k].key, 0)
            self.tokens -= self.blocks[k].tokens
            self.blocks[k].older = self.first_free
            self.first_free = k
        return 0

    cdef int _touch(self, uint64_t key, int32_t tokens) except -1:
        cdef int32_t k = self.places.get(key, 0), size
        if k != NONE:
            self._unlink(k)
        else:
            if self.first_free != NONE:
                k = self.first_free
                self.first_free = self.blocks[k].older
            else:
                if self.used == self.size:
                    size = doubled(self.size, 0, 256)
                    self.blocks = <Block*>grow(self.blocks, self.size, size, sizeof(Block))
                    self.size = size
                k = self.used
                self.used += 1
            self.blocks[k].key = key
            self.blocks[k].tokens = tokens
            self.places.put(key, 0, k)
            self.tokens += tokens
        self.blocks[k].newer = NONE
        self.blocks[k].older = self.newest
        if self.newest == NONE:
            self.oldest = k
        else:
            self.blocks[self.newest].newer = k
        self.newest = k
        return 0

    cdef void _unlink(self, int32_t k) noexcept:
        cdef Block* b = &self.blocks[k]
        if b.newer == NONE:
            self.newest = b.older
        else:
            self.blocks[b.newer].older = b.older
        if b.older == NONE:
            self.oldest = b.newer
        else:
            self.blocks[b.older].newer = b.newer


@cython.final
cdef class Prefixes:
    """Keeps the prefixes of queued requests, and the index of each pool."""

    cdef uint64_t k0, k1
    cdef Kept* kept  # for each record of a request
    cdef int32_t size
    cdef int64_t queued  # hashes that are kept
    cdef list pools

    def __cinit__(self, uint64_t k0, uint64_t k1):
        self.k0, self.k1 = k0, k1
        self.pools = []

    def __dealloc__(self):
        cdef int32_t i
        for i in range(self.size):
            free(self.kept[i].keys)
        free(self.kept)

    cdef inline PrefixIndex index(self, int32_t pool):
        return <PrefixIndex>self.pools[pool]

    cdef inline const Kept* of(self, int32_t i) noexcept:
        """Return the prefix of a request; NULL: it has none. O(1)."""
        return &self.kept[i] if i < self.size and self.kept[i].keys != NULL else NULL

    cdef inline uint64_t key(self, uint64_t hash, uint64_t adapter) noexcept:
        """Return the name of a block, which no caller can guess; each adapter has blocks of its
        own."""
        return mix(mix(self.k0 ^ adapter, hash), self.k1)

    cdef Kept* keep(self, int32_t i, int64_t count, int64_t prompt_tokens) except? NULL:
        """Make place for the hashes of request i; NULL: there is no room, or it has one already.
        O(1) amortised."""
        cdef Kept* kept
        cdef int32_t size
        if i >= self.size:
            size = doubled(self.size, i, 256)
            self.kept = <Kept*>grow(self.kept, self.size, size, sizeof(Kept))
            self.size = size
        kept = &self.kept[i]
        if kept.keys != NULL or self.queued + min(count, PREFIX_KEPT_MAX) > PREFIX_QUEUED_MAX:
            return NULL
        # Blocks are powers of two, and the full ones of a prompt take more than half of it: so
        # this is their size.
        kept.tokens = 1
        while 2 * kept.tokens <= prompt_tokens // count:
            kept.tokens *= 2
        count = min(count, <int64_t>PREFIX_KEPT_MAX)
        kept.keys = <uint64_t*>malloc(count * sizeof(uint64_t))
        if kept.keys == NULL:
            raise MemoryError()
        kept.count = <int32_t>count
        self.queued += count
        return kept

    cdef void drop(self, int32_t i) noexcept:
        """Request i is not queued any more. O(1)."""
        if i < self.size and self.kept[i].keys != NULL:
            self.queued -= self.kept[i].count
            free(self.kept[i].keys)
            self.kept[i].keys = NULL


cdef void read_hashes(Prefixes prefixes, Kept* kept, Cursor c, uint64_t adapter) noexcept:
    """Read as many of the first hashes of a checked AdmitRequest as there is room for. O(bytes)."""
    cdef Cursor packed
    cdef int64_t tag
    cdef int32_t k = 0
    while k < kept.count:
        tag = read_tag(&c)
        if tag == 8 << 3 | LENGTH:
            packed = read_message(&c)
            while packed.at < packed.end and k < kept.count:
                kept.keys[k] = prefixes.key(read_fixed64(&packed), adapter)
                k += 1
        elif tag == 8 << 3 | FIXED64:
            kept.keys[k] = prefixes.key(read_fixed64(&c), adapter)
            k += 1
        else:
            skip(&c, tag)
