"""Miniatures: a real config divided down until it runs anywhere and still trips the same rules.

Head counts are divided by one number c, head widths by one number w, every other size by c·w.
So two products of a count and a width are equal in the miniature exactly if they are equal in
the model: GLM-5.2's indexer rows still equal heads × head_dim, which they should not mean.
"""

import re
from collections.abc import Callable, Iterator
from fractions import Fraction
from itertools import combinations
from math import gcd
from typing import Any, cast

from muonsplit.errors import ConfigError
from muonsplit.models.load import Config, build, complete

VOCABULARY = 80
EXPERTS = 4
_LAYER = re.compile(r"(?:.*\.)?(?:layers|h|layer|blocks|block)\.(\d+)\.(.*)")
_WIDTHS = ("head_dim", "head_size", "d_head", "dim_head", "headdim", "d_kv", "rotary_dim")
_SIZES = (
    "_size",
    "_rank",
    "n_embd",
    "d_model",
    "ffn_dim",
    "d_ff",
    "d_inner",
    "n_inner",
    "d_ssm",
    "emb_dim",
    "dim_ff",
    "dff",
)
_NOT_SIZES = (
    *("vocab_size", "kernel_size", "patch_size", "image_size", "block_size", "chunk_size"),
    *("group_size", "window_size", "step_size", "state_size", "time_step_rank", "dt_rank"),
)
_DEPTHS = (
    *("num_hidden_layers", "num_layers", "n_layer", "n_layers", "depth", "num_blocks"),
    *("encoder_layers", "decoder_layers", "num_encoder_layers", "num_decoder_layers"),
)
_HIDDEN = (
    *(("hidden_size", "num_attention_heads"), ("n_embd", "n_head"), ("d_model", "n_heads")),
    *(("d_model", "num_heads"), ("hidden_size", "num_heads"), ("d_model", "n_head")),
    *(("d_model", "encoder_attention_heads"), ("d_model", "decoder_attention_heads")),
    *(("emb_dim", "n_heads"), ("d_model", "num_attention_heads")),
)
# A miniature wider than this is divided by less strict rules; lengths of time by none.
_WIDE = 128
_CHUNK = 16
_SMALL, _LEAST = 16, 4
_SUMS = (("qk_nope_head_dim", "qk_rope_head_dim"), ("qk_nope_head_dim", "v_head_dim"))


def miniature(config: Config, task: str | None = None) -> Config:
    """Divides a config down.

    Args:
        config: As :func:`muonsplit.models.load.resolve` gives it.
        task: As :func:`muonsplit.models.load.build` takes it.

    Returns:
        A config of the same class with a few heads, every distinct kind of layer, few experts
        and a small vocabulary. Where no division keeps every equality and is small enough, one
        is taken that keeps most (:func:`loosely`).
    """
    full = complete(config)
    sizes = dict(_sizes(full))
    count, width = _divisors(full, sizes)
    divided = {name: _divide(name, value, count, width) for name, value in sizes.items()}
    if max((v for _, v in _of_kind(divided, "size")), default=0) > 4 * _WIDE or _is_wide(divided):
        divided = loosely(full, sizes)
    narrower = _narrower(sizes, divided)

    def small_value(name: str, value: Any) -> Any:
        if name.endswith("mrope_section") and isinstance(value, list):
            return _sections(cast(list[int], value), narrower)
        return divided.get(name, value)

    small = _mapped(full, small_value)
    return _accepted(_mapped(_first_layers(small, _layers_needed(config, task)), _few), full)


def _narrower(sizes: dict[str, int], divided: dict[str, int]) -> Fraction:
    """What the first width, of text if there is one, was multiplied by."""
    before, after = dict(_widths(sizes)), dict(_widths({**sizes, **divided}))
    names = sorted((n for n in before if n in after), key=lambda name: "vision" in name)
    return next((Fraction(after[n], before[n]) for n in names), Fraction(1))


def _sections(sections: list[int], narrower: Fraction) -> list[int]:
    """Parts of a rotary half, for time, height and width: they add up to one of another width."""
    most = round(sum(sections) * narrower)
    ends = [round(sum(sections[: i + 1]) * narrower) for i in range(len(sections) - 1)]
    return [b - a for a, b in zip([0, *ends], [*ends, most], strict=True)]


def _is_wide(sizes: dict[str, int]) -> bool:
    hidden = {name for name, _ in _HIDDEN}
    return any(v > _WIDE for n, v in sizes.items() if n.rpartition(".")[2] in hidden)


def _accepted(small: Config, full: Config) -> Config:
    """With the token ids that its class insists on, inside the small vocabulary."""
    try:
        complete(small)
    except ConfigError:
        given = dict(_leaves(full))

        def told(name: str, value: Any) -> Any:
            was = given.get(name)
            if name.endswith("token_id") and isinstance(was, int):
                return min(was, VOCABULARY - 1)
            return value

        return _mapped(small, told)
    return small


def _leaves(config: Config, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


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
    if key.endswith(_WIDTHS):
        return "width"
    if key.endswith(_SIZES) and not key.endswith(_NOT_SIZES):
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
    for prefix in dict.fromkeys(name[: name.rfind(".") + 1] for name in sizes):
        for names in (tuple(prefix + name for name in names) for names in _SUMS):
            if all(name in sizes for name in names):
                yield "+".join(names), sum(sizes[name] for name in names)
        for hidden, heads in ((prefix + hidden, prefix + heads) for hidden, heads in _HIDDEN):
            if hidden in sizes and heads in sizes and sizes[hidden] % sizes[heads] == 0:
                yield f"{hidden}/{heads}", sizes[hidden] // sizes[heads]


def _derived(name: str, sizes: dict[str, int]) -> bool:
    """Beside MLA widths a plain head_dim builds nothing; Kimi K3's is hidden // heads = 74."""
    parent = name.rpartition("head_dim")[0]
    return f"{parent}head_dim" == name and f"{parent}qk_nope_head_dim" in sizes


def _divide(name: str, value: int, count: int | Fraction, width: int) -> int:
    by = {"count": count, "width": width, "size": count * width}[_kind(name) or "size"]
    return max(1, round(value / by))


def _divisors(config: Config, sizes: dict[str, int]) -> tuple[int, int]:
    """The (c, w) with the largest product that leaves enough to look at."""
    counts = gcd(*(v for _, v in _of_kind(sizes, "count") if v > 1))
    stated = [v for name, v in _of_kind(sizes, "width") if not _derived(name, sizes)]
    widths = gcd(*(stated or [v for _, v in _widths(sizes)]))
    pairs = [(c, w) for c in _factors(counts) for w in _factors(widths)]
    pairs.sort(key=lambda pair: (-pair[0] * pair[1], -pair[0]))
    sizes = _distinct(sizes)
    several = [name for name, value in _of_kind(sizes, "count") if value > 1]
    wanted = equalities(sizes)
    for least in (8, 4, 2):
        for c, w in pairs:
            small = {name: _divide(name, value, c, w) for name, value in sizes.items()}
            heads_stay = all(small[name] > 1 for name in several)
            if heads_stay and _enough(config, small, least) and equalities(small) == wanted:
                return c, w
    return 1, 1


def loosely(config: Config, sizes: dict[str, int]) -> dict[str, int]:
    """Divides where no division keeps every equality, or leaves every size large enough.

    Small sizes stay; one head is one head, whatever its product equals; a prime number of heads
    becomes a smaller one, and all others with it. Of what is left, as many equalities as can be.

    Args:
        config: The whole config.
        sizes: Its counts, widths and sizes by dotted name.

    Returns:
        The divided ones; what has no division stays as it is.
    """
    names = {n for n, v in sizes.items() if _kind(n) != "size" or v >= 4 * _SMALL}
    moved = _distinct({n: v for n, v in sizes.items() if n in names})
    counted = {n: v for n, v in moved.items() if _kind(n) != "count" or v > 1}
    counts = gcd(*(v for _, v in _of_kind(counted, "count"))) or 1
    stated = [v for n, v in _of_kind(moved, "width") if not _derived(n, sizes)]
    widths = gcd(*(stated or [v for _, v in _widths(moved)] or moved.values())) or 1
    best, by = (True, 1 << 30, 0, 0), (Fraction(1), 1)
    wanted = equalities(counted)
    for left in range(1, min(counts, 2 * _SMALL) + 1):
        for w in _factors(widths):
            c = Fraction(counts, left)
            small = {n: _divide(n, v, c, w) for n, v in moved.items()}
            found = equalities({n: small[n] for n in counted})
            inexact = sum(v % (c * w) != 0 for n, v in moved.items() if _kind(n) == "size")
            wide = max(small.values()) > 4 * _WIDE
            score = (wide, len(found ^ wanted) + inexact, max(small.values()), left)
            if score < best and _works(config, moved, small):
                best, by = score, (c, w)
    return {n: _divide(n, sizes[n], *by) for n in names}


def _distinct(sizes: dict[str, int]) -> dict[str, int]:
    """One of the sizes that layers or towers state again under one name."""
    first: dict[tuple[str, int], str] = {}
    for name, value in sizes.items():
        first.setdefault((name.rpartition(".")[2], value), name)
    return {name: value for (_, value), name in first.items()}


def _works(config: Config, full: dict[str, int], small: dict[str, int]) -> bool:
    """Whether heads can be told apart, rotary halves are even, and heads divide what they did."""
    stated = {n: v for n, v in _of_kind(small, "width") if not _derived(n, small)}
    # What hidden // heads gives is a width only where none is stated.
    widths = stated or dict(_widths(small))
    shares = (config.get(name) for name in ("rotary_pct", "partial_rotary_factor"))
    rotary = [v * s for s in shares if isinstance(s, int | float) for v in widths.values()]
    counts = dict(_of_kind(small, "count"))
    return (
        all(counts[n] > 1 for n, v in _of_kind(full, "count") if v > 1)
        and max(counts.values(), default=_LEAST) >= _LEAST
        and (bool(stated) or widths.keys() == dict(_widths(full)).keys())
        and all(v >= _LEAST and v % 2 == 0 for v in widths.values())
        and all(v >= 2 * _LEAST and v % 2 == 0 for _, v in _of_kind(small, "size"))
        and all(v % 2 == 0 for v in rotary)
    )


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
    if "vocab_size" in key and isinstance(value, int):
        return min(value, VOCABULARY)
    if key.endswith("token_id"):
        return _token(key, value)
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    if key.endswith("chunk_size") and "attention" not in key:
        return min(value, _CHUNK)
    if key.endswith(("state_size", "d_state")):
        return min(value, _SMALL // 2)
    if key.endswith(("n_groups", "ngroups", "o_groups")):
        return min(value, 2)
    if key.endswith(("n_group", "topk_group", "expert_group")):
        return min(value, 1)
    if key.endswith(("experts_per_tok", "experts_per_token", "moe_k", "moe_top_k", "moe_topk")):
        return min(value, 2)
    return min(value, EXPERTS) if key.endswith(("experts", "expert_num")) else value


def _token(key: str, value: Any) -> Any:
    """No token beyond the vocabulary: none at all where that is allowed."""
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    if key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        return value if key[0] == "p" and 0 <= value < VOCABULARY else None
    return min(value, VOCABULARY - 1)


def _layers_needed(config: Config, task: str | None) -> int:
    """The fewest leading layers that hold every distinct kind of layer of the full model."""
    layers: dict[tuple[str, int], list[tuple[str, tuple[int, ...]]]] = {}
    for name, weight in build(config, task=task).named_parameters():
        if found := _LAYER.fullmatch(name):
            layer = (name[: found.start(1)], int(found[1]))
            layers.setdefault(layer, []).append((found[2], tuple(weight.shape)))
    first: dict[tuple[str, tuple[Any, ...]], int] = {}
    for (stack, index), weights in sorted(layers.items(), key=lambda item: item[0][1]):
        first.setdefault((stack, tuple(weights)), index)
    return max(2, max(first.values(), default=1) + 1)


def _first_layers(config: Config, depth: int) -> Config:
    depths = {key: config[key] for key in _DEPTHS if isinstance(config.get(key), int)}
    full = next(iter(depths.values()), 0)

    def cut(key: str, value: Any) -> Any:
        if key in depths:
            return min(value, depth)
        if isinstance(value, list) and len(value) == full > depth:
            return value[:depth]
        if isinstance(value, list) and key.endswith("_layers"):  # 1-based layer numbers
            return [n for n in value if n <= depth]
        if isinstance(value, dict) and value and all(str(n).isdigit() for n in value):
            return {n: kept for n, kept in value.items() if int(n) < depth}
        return _first_layers(value, depth) if isinstance(value, dict) else value

    return {key: cut(str(key), value) for key, value in config.items()}
