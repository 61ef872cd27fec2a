"""Fused projections: in which order the heads of queries, keys and values stand.

A shape does not tell the order. Where every head has one width the blocks are the same whatever
their order, so any fused weight can be cut by heads; which of them are Q, K and V is known for the
owners listed here alone.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from muonsplit.layout import Segment

# What a weight holds, and how often.
Parts = tuple[tuple[Segment, ...], int]
Order = Callable[[int, int, int], Parts | None]

_WITHOUT_QUERIES = frozenset({"kv_proj", "kv", "to_kv"})


def _interleaved(queries: int, keys: int, width: int) -> Parts | None:
    if queries != keys:
        return None
    return tuple(Segment(role, 1, width) for role in "qkv"), queries


def _concatenated(queries: int, keys: int, width: int) -> Parts | None:
    counts = zip("qkv", (queries, keys, keys), strict=True)
    return tuple(Segment(role, count, width) for role, count in counts), 1


def _grouped(queries: int, keys: int, width: int) -> Parts | None:
    if queries % keys:
        return None
    counts = zip("qkv", (queries // keys, 1, 1), strict=True)
    return tuple(Segment(role, count, width) for role, count in counts), keys


def _slabs(queries: int, keys: int, width: int) -> Parts | None:
    """CodeGen: four slabs, one a shard of the machine it was trained on, each q, v, k."""
    if queries % 4 or queries != keys:
        return None
    return tuple(Segment(role, queries // 4, width) for role in "qvk"), 4


def _falcon(owner: Any) -> Order:
    if _flag(owner, "new_decoder_architecture"):
        return _grouped
    return _concatenated if _flag(owner, "multi_query") else _interleaved


def _bigcode(owner: Any) -> Order:
    return _concatenated if _flag(owner, "multi_query") else _interleaved


def _always(order: Order) -> Callable[[Any], Order]:
    return lambda owner: order


# Owner class → its order, read from the class's forward pass; the sweep holds the cut of each
# against the truth.
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
    "GPT2Attention": _always(_concatenated),
    "MultiheadAttention": _always(_concatenated),
    "CodeGenAttention": _always(_slabs),
}


def fused(owner: Any, leaf: str, queries: int, keys: int, width: int) -> Iterator[Parts]:
    """What a fused weight of these heads may hold.

    Args:
        owner: The module that holds it; a wrapper's subclass is read as what it wraps.
        leaf: Name of the leaf.
        queries: Query heads.
        keys: Key heads, as many as value heads.
        width: Rows of a head.
    """
    if leaf in _WITHOUT_QUERIES or _flag(owner, "is_cross_attention"):
        yield (Segment("k", keys, width), Segment("v", keys, width)), 1
        if keys == 1:  # DeepSeek-V4: the one head is key and value at once
            yield (Segment("kv", 1, width),), 1
        return
    known = next((ORDERS[c.__name__] for c in type(owner).__mro__ if c.__name__ in ORDERS), None)
    if known is None:
        yield (Segment("qkv", queries + 2 * keys, width),), 1
    elif (parts := known(owner)(queries, keys, width)) is not None:
        yield parts


def _flag(owner: Any, name: str) -> bool:
    with suppress(Exception):  # a property may raise anything
        return getattr(owner, name, False) is True
    return False
