# Used by every file: libc, CPython's objects, and the bounds of all numbers.

from collections import OrderedDict, namedtuple
from heapq import nlargest
from cpython.ref cimport Py_INCREF
from cpython.tuple cimport PyTuple_SET_ITEM
from libc.stdint cimport int8_t, int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memcmp, memcpy, memmove, memset

cdef extern from *:
    """
    #if defined(__GNUC__)
    /* Without the empty asm GCC takes a function that only prefetches for one that does
       nothing, and leaves its calls out. */
    #define prefetch_line(p) do { __builtin_prefetch(p); __asm__ volatile (""); } while (0)
    #else
    #define prefetch_line(p) ((void)(p))
    #endif
    typedef __int128 wide;
    #ifndef SCHEDSVC_CORE_FLAGS
    #define SCHEDSVC_CORE_FLAGS ""
    #endif
    """
    ctypedef long long wide  # 128 bits
    void prefetch_line(const void* p) noexcept nogil
    # As C has it: Cython's own declaration takes any object, of which compilers complain.
    object PyType_GenericAlloc(type cls, Py_ssize_t count)
    const char* SCHEDSVC_CORE_FLAGS

cdef enum:
    NONE = -1
    PROMPT_TOKENS_MAX = 1 << 24
    SEQUENCES_MAX = 1024
    WEIGHT_MILLI_MAX = 1_000_000_000
    POOLS_ORDERED = 64  # with more of them, what may run anywhere stands in one line for all
    SET_POOLS_MAX = POOLS_ORDERED  # that a request may name
    POOLS_REUSED = 64  # from this number on, a free place is used before a new one
    NAME_BYTES_MAX = 256
    ID_BYTES_MAX = 128

BUILD_FLAGS = SCHEDSVC_CORE_FLAGS.decode()
cdef int64_t LEASE_ID_MAX = <int64_t>1 << 62

# Names of flows and adapters, and ids of requests, have the same key, as different kinds.
cdef uint64_t NAME_SALT = <uint64_t>0xA5A5A5A5A5A5A5A5
cdef uint64_t SESSION_SALT = <uint64_t>0x73657373696F6E73
cdef uint64_t ADAPTER_SALT = <uint64_t>0x5A5A5A5A5A5A5A5A
# Places of leases and of tags in their tables.
cdef uint64_t LEASE_SALT = <uint64_t>0x6C656173655F6964
cdef uint64_t CLIENT_ID_SALT = <uint64_t>0x636C69656E745F69
cdef uint64_t OWN_ID_SALT = <uint64_t>0x7072696E63697061
cdef uint64_t PLACE_SALT = <uint64_t>0x706C616365736F66
cdef uint64_t TAG_SALT = <uint64_t>0x7265717565737473
cdef int64_t NS_PER_MS = 1_000_000
cdef int64_t NS_PER_S = 1_000_000_000
cdef int64_t NEVER = <int64_t>1 << 62


cdef inline void prefetch_record(const void* record, size_t size) noexcept nogil:
    """Fetch the lines of a record that is looked at soon."""
    cdef size_t at
    for at in range(0, size, 64):
        prefetch_line(<const uint8_t*>record + at)


cdef inline object new_row(type cls, Py_ssize_t fields):
    """Return a named tuple, every field of which `put_item()` has to fill. It is made without a
    Python frame of its own, and without another tuple before it."""
    return PyType_GenericAlloc(cls, fields)


cdef inline void put_item(object row, Py_ssize_t place, object value) noexcept:
    Py_INCREF(value)  # which the row keeps
    PyTuple_SET_ITEM(row, place, value)
