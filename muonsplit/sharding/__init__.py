"""What a rank holds of a weight, and where the heads are in it. Needs torch alone."""

from muonsplit.sharding.held import Region, Shard, column_parallel, flat, of_parameter, region
from muonsplit.sharding.local import CutHeads, Local, sharded

__all__ = [
    "CutHeads",
    "Local",
    "Region",
    "Shard",
    "column_parallel",
    "flat",
    "of_parameter",
    "region",
    "sharded",
]
