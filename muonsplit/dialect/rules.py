"""Which rows are one block, and the dialect that puts it together with an arithmetic."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Literal

from muonsplit.dialect.arithmetic import Arithmetic
from muonsplit.dialect.fields import check

# Asks a whole-matrix dialect per head.
PER_HEAD = "+per-head"


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitRule:
    """Which rows of a weight are one block.

    Attributes:
        heads_per_block: Heads orthogonalised together; None keeps every weight whole.
        mla_key_value: Whether a head's K and V rows of an MLA up-projection are one block.
        fused_qkv: What a fused QKV weight is cut into.
        gated_query: Whether a head's queries and output gate in one projection are one block.
        cut_heads: What happens to a shard that cuts a head.
    """

    heads_per_block: int | None = 1
    mla_key_value: Literal["joint", "apart"] = "joint"
    fused_qkv: Literal["whole", "projections", "heads"] = "whole"
    gated_query: Literal["joint", "apart"] = "joint"
    cut_heads: Literal["drop", "raise", "gather"] = "drop"

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, slots=True)
class Dialect:
    """A split rule and an arithmetic under one name.

    Attributes:
        name: Name in the registry.
        split: Which rows are one block.
        arithmetic: What is computed on one.
        sources: Where each field of both was read.
    """

    name: str
    split: SplitRule
    arithmetic: Arithmetic
    sources: Mapping[str, str] = field(repr=False, hash=False)

    @property
    def per_head(self) -> bool:
        """Whether the dialect cuts weights by heads at all."""
        return self.split.heads_per_block is not None

    def asked_per_head(self) -> "Dialect":
        """This dialect's arithmetic under the default per-head split, unless it already splits."""
        if self.per_head:
            return self
        asked = "asked per head; the dialect itself is whole-matrix"
        sources = {**self.sources, **{f.name: asked for f in fields(SplitRule)}}
        return Dialect(self.name + PER_HEAD, SplitRule(), self.arithmetic, sources)
