# Nodes of the tree of shares, in the rows that outlive the process. A node of a group that is gone,
# or has no weight any more, is left out.

cdef bytes node_value(Core core, int32_t node):
    """Return the value of a node's row."""
    cdef Writer w = core.writer
    write_positions(core, w, node)
    w.varint(2, core.flows.family_of(node).level)
    w.varint(1, core.flows.items[node].vtc)
    return w.take()


cdef int restore_node(Core core, bytes name, Cursor* c, bint applies) except -1:
    """Check a node's row, or take it over; 1 if there is a place for it. O(levels + classes)."""
    cdef int64_t v[2]
    cdef int32_t cls, group, node
    cdef int64_t size
    cdef Cursor again = c[0]
    read_numbers(c, v, 2)
    check_range("counter", v[0], 0, VTC_MAX)
    check_range("level", v[1], 0, VTC_MAX)
    check_range("name", len(name), 2, 2 + 2 * NAME_BYTES_MAX)
    size = (name[0] << 8 | name[1]) + 2
    check_range("name", len(name), size + 1, 2 + 2 * NAME_BYTES_MAX)
    if not applies or core.flows.order != ORDER_COUNTER:
        read_positions(core, NONE, &again, False)
        return 0
    cls = core.classes.find_slice(
        <const uint8_t*><const char*>name + 2, size - 2
    ) if size > 2 else 0
    group = core.quota_names.get(name[size:], NONE)
    if cls == NONE or group == NONE or core.quotas.nodes[group].weight_milli == 0:
        return 0
    node = node_in_class(core, group, cls)
    place_flow(core, node)
    core.flows.items[node].vtc = v[0]
    core.flows.family_of(node).level = v[1]
    read_positions(core, node, &again, True)
    return 1
