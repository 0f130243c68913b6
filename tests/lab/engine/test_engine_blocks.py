import pytest

from schedsvc_lab.engine import BlockPool, EngineInvariantError


def test_allocates_all_or_nothing():
    pool = BlockPool(4, 16)
    table: list[int] = []
    assert pool.allocate(3, table)
    assert len(set(table)) == 3
    assert not pool.allocate(2, table)
    assert len(table) == 3
    assert (pool.free, pool.used) == (1, 3)
    pool.check([table])


def test_released_blocks_are_reused_first():
    pool = BlockPool(8, 16)
    first: list[int] = []
    pool.allocate(3, first)
    before = list(first)
    pool.release(first)
    assert first == []
    assert pool.free == 8
    again: list[int] = []
    pool.allocate(3, again)
    assert again == before


def test_check_sees_a_lost_a_shared_and_an_unknown_block():
    pool = BlockPool(4, 16)
    table: list[int] = []
    pool.allocate(2, table)
    with pytest.raises(EngineInvariantError, match="2 of 4 blocks are lost"):
        pool.check([])
    with pytest.raises(EngineInvariantError, match=r"block \d is held 2 times, and 1 are counted"):
        pool.check([table, [table[0]]])
    with pytest.raises(EngineInvariantError, match="block 9 is unknown"):
        pool.check([table, [9]])
