# The ids by which clients know their requests, if those differ from the scheduler's: the last of
# them, each with the key of its request. Clients choose them, so several requests may have one.
#
# A ring with a table beside it, made for the first such id. Each place knows the one before it of
# the same id. Nothing is decided by it, and nothing of it is saved.

cdef enum:
    CLIENT_IDS_MAX = 65_536  # the oldest gives way; 4 MB

ctypedef struct ClientId:
    Hash128 id
    Hash128 key  # the request's key among the ids
    int64_t number  # counts on from 1; 0: nothing is here
    int64_t former  # the number of the one before it of the same id; 0: none
    int32_t principal


@cython.final
cdef class ClientIds:
    cdef ClientId* items
    cdef Table places
    cdef int64_t noted  # in all

    def __cinit__(self):
        self.places = Table()

    def __dealloc__(self):
        free(self.items)

    cdef int note(self, const Hash128* id, const Hash128* key, int32_t principal) except -1:
        """Replace the oldest id by that of a request, unless it is the last of that id. O(1)
        amortised."""
        cdef const ClientId* last = self.last(id)
        cdef ClientId* item
        cdef int64_t former = 0
        if last != NULL:
            if last.key.hi == key.hi and last.key.lo == key.lo:
                return 0  # asked for again
            former = last.number
        if self.items == NULL:
            self.items = <ClientId*>calloc(CLIENT_IDS_MAX, sizeof(ClientId))
            if self.items == NULL:
                raise MemoryError()
        item = &self.items[self.noted % CLIENT_IDS_MAX]
        if item.number and self.last(&item.id) == item:
            self.places.remove(item.id.hi, item.id.lo)
        self.places.put(id.hi, id.lo, <int32_t>(self.noted % CLIENT_IDS_MAX))
        self.noted += 1
        item.id, item.key, item.principal = id[0], key[0], principal
        item.number, item.former = self.noted, former
        return 0

    cdef const ClientId* last(self, const Hash128* id) noexcept:
        """Return the last request of an id, or NULL. O(1)."""
        cdef int32_t place = self.places.get(id.hi, id.lo)
        return NULL if place == NONE else &self.items[place]

    cdef const ClientId* before(self, const ClientId* item) noexcept:
        """Return the request before this one of the same id, or NULL. O(1)."""
        if item.former <= max(<int64_t>0, self.noted - CLIENT_IDS_MAX):
            return NULL
        return &self.items[(item.former - 1) % CLIENT_IDS_MAX]
