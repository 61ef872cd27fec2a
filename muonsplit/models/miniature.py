"""Miniatures: a real config divided down until it runs anywhere and still trips the same rules.

Head counts are divided by one number c, head widths by one number w, every other size by c·w.
So two products of a count and a width are equal in the miniature exactly if they are equal in
the model: GLM-5.2's indexer rows still equal heads × head_dim, which they should not mean.
"""

import re
from collections.abc import Callable, Iterator
from itertools import combinations
from math import gcd
from typing import Any

from muonsplit.models.load import Config, build, complete

VOCABULARY = 80
EXPERTS = 4
_LAYER = re.compile(r"(?:.*\.)?(?:layers|h|blocks|block)\.(\d+)\.(.*)")
_NOT_SIZES = ("vocab_size", "kernel_size", "patch_size", "image_size", "block_size", "chunk_size")
_DEPTHS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
_SUMS = (("qk_nope_head_dim", "qk_rope_head_dim"), ("qk_nope_head_dim", "v_head_dim"))


def miniature(config: Config) -> Config:
    """Divides a config down.

    Args:
        config: As :func:`muonsplit.models.load.resolve` gives it.

    Returns:
        A config of the same class with a few heads, every distinct kind of layer, few experts
        and a small vocabulary. Where no division keeps the equalities, sizes stay as they are.
    """
    full = complete(config)
    sizes = dict(_sizes(full))
    count, width = _divisors(full, sizes)
    divided = {name: _divide(name, value, count, width) for name, value in sizes.items()}
    small = _mapped(full, lambda name, value: divided.get(name, value))
    return _mapped(_first_layers(small, _layers_needed(config)), _few)


def equalities(sizes: dict[str, int]) -> frozenset[tuple[str, str]]:
    """Which products of a count and a width, or sizes, are equal, by name.

    Args:
        sizes: Counts, widths and sizes by dotted name, as they stand in a config.
    """
    values = {name: value for name, value in sizes.items() if _kind(name) == "size"}
    for count, heads in _of_kind(sizes, "count"):
        for width, rows in _widths(sizes):
            values[f"{count}·{width}"] = heads * rows
    return frozenset(pair for pair in combinations(sorted(values), 2) if _same(values, *pair))


def _same(values: dict[str, int], one: str, other: str) -> bool:
    return values[one] == values[other]


def _kind(name: str) -> str | None:
    key = name.rpartition(".")[2]
    if key.endswith(("heads", "n_head")):
        return "count"
    if key.endswith(("head_dim", "head_size")):
        return "width"
    if key.endswith(("_size", "_rank", "n_embd")) and not key.endswith(_NOT_SIZES):
        return "size"
    return None


def _sizes(config: Config, prefix: str = "") -> Iterator[tuple[str, int]]:
    for key, value in config.items():
        if isinstance(value, dict):
            yield from _sizes(value, f"{prefix}{key}.")
        elif (
            _kind(str(key)) and isinstance(value, int) and not isinstance(value, bool) and value > 0
        ):
            yield f"{prefix}{key}", value


def _of_kind(sizes: dict[str, int], kind: str) -> list[tuple[str, int]]:
    return [(name, value) for name, value in sizes.items() if _kind(name) == kind]


def _widths(sizes: dict[str, int]) -> Iterator[tuple[str, int]]:
    """Stated widths, the sums that MLA makes of them, and hidden size over heads."""
    yield from _of_kind(sizes, "width")
    for names in _SUMS:
        if all(name in sizes for name in names):
            yield "+".join(names), sum(sizes[name] for name in names)
    for hidden, heads in (("hidden_size", "num_attention_heads"), ("n_embd", "n_head")):
        if hidden in sizes and heads in sizes and sizes[hidden] % sizes[heads] == 0:
            yield f"{hidden}/{heads}", sizes[hidden] // sizes[heads]


def _derived(name: str, sizes: dict[str, int]) -> bool:
    """Beside MLA widths a plain head_dim builds nothing; Kimi K3's is hidden // heads = 74."""
    parent = name.rpartition("head_dim")[0]
    return f"{parent}head_dim" == name and f"{parent}qk_nope_head_dim" in sizes


def _divide(name: str, value: int, count: int, width: int) -> int:
    by = {"count": count, "width": width, "size": count * width}[_kind(name) or "size"]
    return max(1, round(value / by))


def _divisors(config: Config, sizes: dict[str, int]) -> tuple[int, int]:
    """The (c, w) with the largest product that leaves enough to look at."""
    counts = gcd(*(v for _, v in _of_kind(sizes, "count") if v > 1))
    stated = [v for name, v in _of_kind(sizes, "width") if not _derived(name, sizes)]
    widths = gcd(*(stated or [v for _, v in _widths(sizes)]))
    pairs = [(c, w) for c in _factors(counts) for w in _factors(widths)]
    pairs.sort(key=lambda pair: (-pair[0] * pair[1], -pair[0]))
    several = [name for name, value in _of_kind(sizes, "count") if value > 1]
    wanted = equalities(sizes)
    for least in (8, 4, 2):
        for c, w in pairs:
            small = {name: _divide(name, value, c, w) for name, value in sizes.items()}
            heads_stay = all(small[name] > 1 for name in several)
            if heads_stay and _enough(config, small, least) and equalities(small) == wanted:
                return c, w
    return 1, 1


def _factors(value: int) -> list[int]:
    return [d for d in range(1, min(value, 256) + 1) if value % d == 0] or [1]


def _enough(config: Config, small: dict[str, int], least: int) -> bool:
    """Whether there are heads to tell apart, rows to orthogonalise, and even rotary halves."""
    counts = [v for _, v in _of_kind(small, "count")]
    widths = [v for name, v in _widths(small) if not _derived(name, small)]
    sizes = [v for _, v in _of_kind(small, "size")]
    hidden = [v for name, v in small.items() if name.endswith(("hidden_size", "n_embd"))]
    shares = (config.get(name) for name in ("rotary_pct", "partial_rotary_factor"))
    rotary = [v * share for share in shares if isinstance(share, int | float) for v in widths]
    return (
        max(counts, default=4) >= 4
        and all(v >= least and v % 2 == 0 for v in widths)
        and all(v >= least for v in sizes)
        and all(v >= 4 * least for v in hidden)
        and all(v % 2 == 0 for v in rotary)
    )


def _mapped(config: Config, change: Callable[[str, Any], Any], prefix: str = "") -> Config:
    return {
        key: _mapped(value, change, f"{prefix}{key}.")
        if isinstance(value, dict)
        else change(f"{prefix}{key}", value)
        for key, value in config.items()
    }


def _few(name: str, value: Any) -> Any:
    """Few experts, a small vocabulary, and no token beyond it."""
    key = name.rpartition(".")[2]
    if key == "vocab_size":
        return VOCABULARY
    if key.endswith("token_id"):
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    if key.endswith(("n_group", "topk_group")):
        return min(value, 1)
    if key.endswith(("experts_per_tok", "experts_per_token")):
        return min(value, 2)
    return min(value, EXPERTS) if key.endswith("experts") else value


def _layers_needed(config: Config) -> int:
    """The fewest leading layers that hold every distinct kind of layer of the full model."""
    layers: dict[int, list[str]] = {}
    for name, _ in build(config).named_parameters():
        if found := _LAYER.fullmatch(name):
            layers.setdefault(int(found[1]), []).append(found[2])
    first: dict[tuple[str, ...], int] = {}
    for index, names in sorted(layers.items()):
        first.setdefault(tuple(names), index)
    return max(2, max(first.values(), default=1) + 1)


def _first_layers(config: Config, depth: int) -> Config:
    full = next((config[key] for key in _DEPTHS if key in config), None)
    if full is None or full <= depth:
        return config

    def cut(name: str, value: Any) -> Any:
        if name in _DEPTHS:
            return depth
        if isinstance(value, list) and len(value) == full:
            return value[:depth]
        if isinstance(value, list) and name.endswith("_layers"):  # 1-based layer numbers
            return [n for n in value if n <= depth]
        return value

    return _mapped(config, cut)
