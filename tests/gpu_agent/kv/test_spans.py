from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from catenary_agent.kv import (
    CacheReceiveProgress,
    CacheSendProgress,
    CacheSpan,
    array_of_payload,
    datatype_of,
    pieces,
    to_bfloat16,
    to_float32,
)
from catenary_services.errors import InvalidInput


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 5),
    st.integers(1, 9),
    st.integers(0, 50),
    st.integers(1, 90),
    st.integers(1, 64),
    st.integers(1, 5000),
)
def test_pieces_are_bounded_and_come_in_order_without_gap(first, blocks, start, tokens, row, most):
    span = CacheSpan(first, first + blocks, start, start + tokens)
    waits = CacheReceiveProgress(first, first + blocks, start + tokens)
    if start:
        waits.add(CacheSpan(first, first + blocks, 0, start))
    for piece in pieces(span, row, most):
        assert piece.blocks * piece.tokens * row <= max(most, row)
        waits.check(piece)
        assert not waits.is_complete
        waits.add(piece)
    assert waits.is_complete
    assert waits.missing_block is None


@pytest.mark.parametrize(
    "span",
    [
        CacheSpan(0, 3, 0, 4),  # blocks that are not waited for
        CacheSpan(2, 9, 0, 4),
        CacheSpan(4, 4, 0, 4),
        CacheSpan(2, 4, 0, 11),  # more tokens than there are
        CacheSpan(2, 4, 1, 4),  # a gap
        CacheSpan(5, 6, 0, 2),  # a repetition
        CacheSpan(4, 6, 0, 2),  # a repetition in one of two blocks
        CacheSpan(2, 4, 0, 0),
    ],
)
def test_an_intake_refuses_what_does_not_come_next(span):
    waits = CacheReceiveProgress(2, 6, 10)
    waits.add(CacheSpan(5, 6, 0, 2))
    with pytest.raises(InvalidInput):
        waits.check(span)


def test_an_intake_names_the_first_block_that_lacks_tokens():
    waits = CacheReceiveProgress(2, 5, 4)
    waits.add(CacheSpan(2, 4, 0, 4))
    assert waits.missing_block == 4
    assert not waits.is_complete


def test_an_outlet_gives_every_row_once_as_tokens_are_cached():
    cache_send = CacheSendProgress(7, "d-0", 1, 4)
    waits = CacheReceiveProgress(1, 4, 25)
    for cached in (10, 10, 25):
        cache_send.extend(cached)
        while cache_send.has_more:
            for span in cache_send.take(8, 100):
                waits.check(span)
                waits.add(span)
    assert waits.is_complete
    assert cache_send.is_empty
    cache_send.unsettled += 1
    assert not cache_send.is_empty


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9), st.integers(1, 60), st.integers(1, 900), st.integers(-5, 4000))
def test_frames_that_are_exported_together_are_those_that_came_alone(blocks, tokens, most, room):
    alone, together = (CacheSendProgress(7, "d-0", 2, 2 + blocks) for _ in range(2))
    alone.extend(tokens)
    together.extend(tokens)
    single = [alone.take(8, most) for _ in range(10_000) if alone.has_more]
    runs = []
    while together.has_more:
        runs.append(together.take(8, most, room))
    assert all(len(run) == 1 for run in single)
    assert [span for run in runs for span in run] == [span for (span,) in single]
    for run in runs:
        assert len({(span.first_token, span.last_token) for span in run}) == 1
        assert all(a.last_block == b.first_block for a, b in pairwise(run))
        assert sum(span.blocks * span.tokens * 8 for span in run[:-1]) < max(room, 1)


def test_bfloat16_is_rounded_to_nearest_and_back_without_loss():
    torch = pytest.importorskip("torch")
    values = np.random.default_rng(3).normal(size=(2, 2, 3, 2, 8)).astype(np.float32)
    values.flat[:6] = [0.0, -0.0, np.inf, -np.inf, np.nan, 3.3895314e38]
    bits = to_bfloat16(values)
    expected = torch.from_numpy(values).to(torch.bfloat16)
    assert np.array_equal(to_float32(bits), expected.float().numpy(), equal_nan=True)
    assert to_bfloat16(bits) is bits
    assert to_float32(values) is values
    assert (datatype_of(values), datatype_of(bits)) == ("FP32", "BF16")


def test_a_payload_is_read_where_it_lies_and_must_be_what_its_header_says():
    span = CacheSpan(3, 5, 8, 11)
    rows = np.arange(2 * 2 * 3 * 2 * 4, dtype=np.float32).reshape(2, 2, 3, 2, 4)
    payload = memoryview(rows.tobytes())
    seen = array_of_payload(payload, "FP32", span, (2, 4))
    assert np.array_equal(seen, rows)
    assert not seen.flags.owndata
    assert not seen.flags.writeable
    with pytest.raises(InvalidInput, match="bytes"):
        array_of_payload(payload[4:], "FP32", span, (2, 4))
    with pytest.raises(InvalidInput, match="datatype"):
        array_of_payload(payload, "FP64", span, (2, 4))
    with pytest.raises(InvalidInput, match="empty"):
        array_of_payload(payload[:0], "FP32", CacheSpan(3, 3, 0, 1), (2, 4))


def test_parts_that_come_back_are_taken_again_before_all_others():
    sending = CacheSendProgress(1, "b", 0, 4)
    sending.extend(10)
    first, second = sending.take(8, 40, 80), sending.take(8, 40, 80)
    sending.take_back(second)
    sending.take_back(first)
    assert [*sending.take(8, 40, 80), *sending.take(8, 40, 80)] == [*first, *second]
    sending.stop()
    sending.take_back(first)
    assert not sending.has_more
