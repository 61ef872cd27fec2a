"""Fused projections: in which order the heads of queries, keys and values stand.

A shape does not tell the order. Where every head has one width the blocks are the same whatever
their order, so any fused weight can be cut by heads; which of them are Q, K and V is known for the
owners listed here alone.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from muonsplit.layout import Layout, Segment

Order = Callable[[int, int, int], Layout | None]


def _interleaved(queries: int, keys: int, width: int) -> Layout | None:
    if queries != keys:
        return None
    return Layout(tuple(Segment(role, 1, width) for role in "qkv"), queries)


def _concatenated(queries: int, keys: int, width: int) -> Layout | None:
    counts = zip("qkv", (queries, keys, keys), strict=True)
    return Layout(tuple(Segment(role, count, width) for role, count in counts))


def _grouped(queries: int, keys: int, width: int) -> Layout | None:
    if queries % keys:
        return None
    counts = zip("qkv", (queries // keys, 1, 1), strict=True)
    return Layout(tuple(Segment(role, count, width) for role, count in counts), keys)


def _slabs(queries: int, keys: int, width: int) -> Layout | None:
    """CodeGen: four slabs, one a shard of the machine it was trained on, each q, v, k."""
    if queries % 4 or queries != keys:
        return None
    return Layout(tuple(Segment(role, queries // 4, width) for role in "qvk"), 4)


def _falcon(owner: Any) -> Order:
    if _flag(owner, "new_decoder_architecture"):
        return _grouped
    return _concatenated if _flag(owner, "multi_query") else _interleaved


def _bigcode(owner: Any) -> Order:
    return _concatenated if _flag(owner, "multi_query") else _interleaved


def _always(order: Order) -> Callable[[Any], Order]:
    return lambda owner: order


# Owner class → its order. The truth of a model of each is a golden.
ORDERS: dict[str, Callable[[Any], Order]] = {
    "GPTNeoXAttention": _always(_interleaved),
    "GPTNeoXJapaneseAttention": _always(_interleaved),
    "BloomAttention": _always(_interleaved),
    "PersimmonAttention": _always(_interleaved),
    "MiniMaxLightningAttention": _always(_interleaved),
    "FalconAttention": _falcon,
    "GPTBigCodeAttention": _bigcode,
    "Phi3Attention": _always(_concatenated),
    "Phi4MultimodalAttention": _always(_concatenated),
    "MptAttention": _always(_concatenated),
    "DbrxAttention": _always(_concatenated),
    "GPT2Attention": _always(_concatenated),
    "MultiheadAttention": _always(_concatenated),
    "CodeGenAttention": _always(_slabs),
}


def fused(owner: Any, queries: int, keys: int, width: int) -> Iterator[Layout]:
    """The layouts a fused weight of these heads may have.

    Args:
        owner: The module that holds it.
        queries: Query heads.
        keys: Key heads, as many as value heads.
        width: Rows of a head.
    """
    known = ORDERS.get(type(owner).__name__)
    if known is not None:
        layout = known(owner)(queries, keys, width)
        if layout is not None:
            yield layout
    else:
        yield Layout.heads("qkv", queries + 2 * keys, width)
    yield Layout((Segment("k", keys, width), Segment("v", keys, width)))


def _flag(owner: Any, name: str) -> bool:
    with suppress(Exception):  # a property may raise anything
        return getattr(owner, name, False) is True
    return False
