"""Tests the prompts that pools probably have cached, and the placement by them."""

import random
from collections import OrderedDict

import pytest
from schedsvc_client.v1 import scheduler_pb2 as pb

from schedsvc import _core as core

from .support import SECOND, admit, admit_message, make, pool
from .test_placement import place, two

CHAIN = tuple(range(100, 200))


def hashes(count: int, other: int = 0) -> tuple[int, ...]:
    """The first blocks of a prompt; the last `other` are its own."""
    return CHAIN[: count - other] + tuple(other * 1_000 + k for k in range(other))


def known(s: core.Scheduler, now_ns: int = 0, which: int = 0) -> tuple[int, int, int, int]:
    row = s.stats(now_ns)["pools"][which]
    keys = ("prefix_blocks", "prefix_tokens", "prefix_asked_tokens", "prefix_matched_tokens")
    return tuple(row[key] for key in keys)  # type: ignore[return-value]


def test_a_pool_knows_what_it_was_granted() -> None:
    s = make(capacity=1_000, block=4)
    assert place(s, 0, "a", 40, prefix_block_hashes=hashes(10)) == 0
    assert known(s) == (10, 40, 40, 0)
    place(s, 0, "b", 50, prefix_block_hashes=hashes(12, other=4))  # 8 blocks of 4 are the same
    assert known(s) == (14, 56, 90, 32)
    place(s, 0, "c", 50)
    assert known(s) == (14, 56, 90, 32)
    s.check()


@pytest.mark.parametrize("size", [1, 2, 16, 64, 512])
@pytest.mark.parametrize("rest", [0, 1])
def test_the_size_of_a_block_is_read_off_the_number_of_full_ones(size: int, rest: int) -> None:
    for count in (1, 3, 50):
        s = make(capacity=10**6)
        prompt = size * count + rest * (size - 1)
        place(s, 0, "a", prompt, prefix_block_hashes=hashes(count))
        assert known(s)[:2] == (count, size * count)


def test_oldest_prefix_is_forgotten_from_its_end() -> None:
    s = make(capacity=1_000, prefix_blocks_max=12)
    place(s, 0, "a", 10, prefix_block_hashes=hashes(10))
    place(s, 0, "b", 5, prefix_block_hashes=tuple(range(5)))
    assert known(s)[0] == 12
    place(s, 0, "a again", 10, prefix_block_hashes=hashes(10))
    assert known(s)[3] == 7
    s.check()


def test_a_pool_knows_no_more_than_its_cache_holds() -> None:
    s = make(capacity=100, prefix_blocks_max=1_000)
    for k in range(4):
        d = s.poll(k)
        admit(s, k, f"r{k}", 60, 10, prefix_block_hashes=tuple(range(60 * k, 60 * k + 60)))
        [d] = s.poll(k)
        s.complete(k, d.lease_id, 1, output_tokens=1)
        assert known(s, k)[1] == min(100, 60 * (k + 1))
    s.check()


def test_each_adapter_has_blocks_of_its_own() -> None:
    s = make(capacity=1_000)
    place(s, 0, "x", 10, prefix_block_hashes=hashes(10), adapter=b"x")
    place(s, 0, "y", 10, prefix_block_hashes=hashes(10), adapter=b"y")
    assert known(s)[3] == 0
    place(s, 0, "x again", 10, prefix_block_hashes=hashes(10), adapter=b"x")
    assert known(s)[3] == 10


def test_a_new_epoch_has_an_empty_cache() -> None:
    s = make(capacity=1_000)
    place(s, 0, "a", 10, prefix_block_hashes=hashes(10))
    s.set_pool(0, b"p", 2, 1_000, 1)
    assert known(s) == (0, 0, 10, 0)


def test_a_request_that_leaves_the_queue_takes_its_hashes_along() -> None:
    s = make(capacity=20)
    place(s, 0, "runs", 10)
    handle = admit(s, 0, "waits", 10, 10, prefix_block_hashes=hashes(10))
    admit(s, 0, "late", 10, 10, prefix_block_hashes=hashes(10), queue_ttl_ns=SECOND)
    s.cancel(0, handle)
    s.check()
    s.poll(SECOND)
    s.check()
    assert known(s, SECOND)[0] == 0


def test_the_message_says_the_same_packed_and_not() -> None:
    found = []
    for packed in (True, False):
        s = make(capacity=1_000)
        for k in range(2):
            message = admit_message(f"r{k}", (10,), prefix_block_hashes=CHAIN[:5])
            data = message.SerializeToString()
            if not packed:
                message.ClearField("prefix_block_hashes")
                data = message.SerializeToString()
                for h in CHAIN[:5]:
                    data += bytes((8 << 3 | 1,)) + h.to_bytes(8, "little")
                assert pb.AdmitRequest.FromString(data).prefix_block_hashes == list(CHAIN[:5])
            s.admit_wire(0, 0, data)
        found.append(known(s))
    assert found == [(5, 10, 20, 10)] * 2


def test_only_the_first_hashes_of_a_long_prompt_count() -> None:
    s = make(capacity=10**6)
    message = admit_message("r", (65_536,), prefix_block_hashes=range(4_096))
    s.admit_wire(0, 0, message.SerializeToString())
    assert known(s)[:2] == (512, 512 * 16)


def test_off_nothing_is_kept_and_a_reload_turns_it_off() -> None:
    s = two(prefix_blocks_max=0)
    place(s, 0, "a", 10, prefix_block_hashes=hashes(10))
    assert known(s) == (0, 0, 0, 0)
    s.set_options(0, prefix_blocks_max=100)
    place(s, 0, "b", 10, pool=0, prefix_block_hashes=hashes(10))
    assert known(s)[0] == 10
    s.set_options(0, prefix_blocks_max=4)
    assert known(s)[0] == 4
    s.set_options(0, prefix_blocks_max=0)
    assert known(s)[0] == 0
    s.check()


def test_a_request_goes_where_most_of_its_prompt_is_up_to_so_much_fuller() -> None:
    s = two(prefix_affinity_ppm=150_000)
    assert place(s, 0, "a", 40, prefix_block_hashes=hashes(20)) == 0  # 5 %
    assert place(s, 0, "other", 10) == 1  # 2 %
    assert place(s, 0, "b", 40, prefix_block_hashes=hashes(20, other=10)) == 0  # 10 %
    assert place(s, 0, "fills", 80, pool=0) == 0  # 19 %, beside 2 %
    assert place(s, 0, "moves on", 40, prefix_block_hashes=hashes(20)) == 1
    assert place(s, 0, "there it is now", 40, prefix_block_hashes=hashes(20)) == 1


def test_the_longest_match_wins() -> None:
    s = two(prefix_affinity_ppm=1_000_000)
    assert place(s, 0, "some", 40, pool=0, prefix_block_hashes=hashes(20, other=10)) == 0
    assert place(s, 0, "most", 80, pool=1, prefix_block_hashes=hashes(20, other=5)) == 1
    assert place(s, 0, "all", 40, prefix_block_hashes=hashes(20)) == 1


def test_without_affinity_prefixes_do_not_matter() -> None:
    s = two(prefix_affinity_ppm=0)
    assert place(s, 0, "a", 40, prefix_block_hashes=hashes(20)) == 0
    assert place(s, 0, "b", 40, prefix_block_hashes=hashes(20)) == 1


def test_it_does_not_wait_for_its_prefix() -> None:
    s = two(prefix_affinity_ppm=1_000_000)
    assert place(s, 0, "a", 900, prefix_block_hashes=hashes(20)) == 0
    assert place(s, 0, "too large beside it", 400, prefix_block_hashes=hashes(20)) == 1


def test_its_adapter_comes_first() -> None:
    s = two(prefix_affinity_ppm=1_000_000, adapter_affinity_ppm=1_000_000)
    x = {"adapter": b"x", "prefix_block_hashes": hashes(20)}
    assert place(s, 0, "prefix", 40, pool=0, **x) == 0
    s.complete(0, 1, 1, output_tokens=1)  # the prefix stays, the adapter does not
    assert place(s, 0, "adapter", 40, pool=1, adapter=b"x") == 1
    assert place(s, 0, "both", 40, **x) == 1


def test_hashes_that_are_no_chain_do_no_harm() -> None:
    rnd = random.Random(1)
    s = two(capacity=500, prefix_blocks_max=50)
    running: list[int] = []
    for k in range(400):
        drawn = tuple(rnd.randrange(40) for _ in range(rnd.randrange(1, 30)))
        admit(s, k, f"r{k}", rnd.randrange(1, 40), 5, prefix_block_hashes=drawn)
        running += [d.lease_id for d in s.poll(k)]
        while len(running) > 8:
            s.complete(k, running.pop(rnd.randrange(len(running))), 1, output_tokens=1)
        s.check()
    for which in (0, 1):
        blocks, _, asked, matched = known(s, 400, which)
        assert blocks <= 50
        assert 0 <= matched <= asked


def test_matched_prefix_equals_that_of_a_list() -> None:
    rnd = random.Random(2)
    s = make(capacity=10**6, prefix_blocks_max=200)
    book: OrderedDict[int, None] = OrderedDict()
    matched = 0
    for k in range(300):
        # A conversation grows by a block at a turn; there are fifty of them.
        who, turns = rnd.randrange(50), rnd.randrange(1, 20)
        chain = [1_000 * who + turn for turn in range(turns)]
        matched += next((n for n, h in enumerate(chain) if h not in book), turns)
        for h in reversed(chain):
            book.pop(h, None)
            book[h] = None
        while len(book) > 200:
            book.popitem(last=False)
        admit(s, k, f"r{k}", turns, 1, prefix_block_hashes=tuple(chain))
        [d] = s.poll(k)
        s.complete(k, d.lease_id, 1, output_tokens=1)
        assert known(s, k)[3] == matched
    assert pool(s, 300)["prefix_blocks"] == 200


def test_hashes_of_the_queue_are_bounded() -> None:
    s = make(capacity=600, queue_max=20_000, flow_queue_max=20_000, prefix_affinity_ppm=0)
    place(s, 0, "runs", 590)
    chain = tuple(range(512))
    first = [admit(s, 0, f"r{k}", 512, 1, prefix_block_hashes=chain) for k in range(8_192)]
    admit(s, 0, "one too many", 512, 1, prefix_block_hashes=chain)
    for handle in first:
        s.cancel(0, handle)
    s.complete(0, 1, 1, output_tokens=1)
    found = [d.outcome for _ in range(3) for d in s.poll(0)]  # verdicts come in several polls
    assert found.count(core.GRANTED) == 1
    assert known(s) == (0, 0, 0, 0)
    s.check()
