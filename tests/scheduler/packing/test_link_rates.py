"""The rate of a link follows what was sent over it, not the odd sample."""

from catenary_scheduler.packing.transfers.link_rates import LinkRate

MIB = 1 << 20
MS = 1_000_000


def test_the_first_sample_is_the_rate() -> None:
    rate = LinkRate()
    assert rate.bytes_per_second == 0
    assert rate.add(MIB, 10 * MS)
    assert rate.bytes_per_second == 100 * MIB


def test_an_odd_sample_changes_nothing() -> None:
    rate = LinkRate()
    for _ in range(5):
        rate.add(MIB, 10 * MS)
    assert not rate.add(MIB, 1000 * MS)
    assert not rate.add(MIB, 1 * MS)
    assert rate.bytes_per_second == 100 * MIB


def test_a_link_that_has_changed_is_believed() -> None:
    rate = LinkRate()
    for _ in range(40):
        rate.add(MIB, 10 * MS)
    for _ in range(9):
        rate.add(MIB, 20 * MS)
    assert rate.bytes_per_second == 50 * MIB


def test_a_few_rows_tell_nothing() -> None:
    rate = LinkRate()
    assert not rate.add(4096, 5 * MS)
    assert not rate.add(MIB, 0)
    assert rate.bytes_per_second == 0


def test_what_was_known_before_counts_as_little_as_can_be() -> None:
    rate = LinkRate(7)
    assert rate.bytes_per_second == 7
    rate.add(MIB, 10 * MS)
    assert rate.bytes_per_second == 100 * MIB


def test_one_long_session_is_not_all_that_counts() -> None:
    rate = LinkRate()
    rate.add(1 << 40, 1 << 40)
    for _ in range(3):
        rate.add(16 * MIB, 10 * MS)
    assert rate.bytes_per_second == 1600 * MIB
