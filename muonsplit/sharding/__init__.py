"""What a rank holds of a weight, and where the heads are in it. Needs torch alone."""

from muonsplit.sharding.exchange import agree, swap
from muonsplit.sharding.held import Region, Shard, column_parallel, flat, of_parameter, region
from muonsplit.sharding.holding import Holding, holding
from muonsplit.sharding.local import CutHeads, Local, sharded
from muonsplit.sharding.members import Members, aligned, local_of, members, on_mesh
from muonsplit.sharding.pieces import owners

__all__ = [
    "CutHeads",
    "Holding",
    "Local",
    "Members",
    "Region",
    "Shard",
    "agree",
    "aligned",
    "column_parallel",
    "flat",
    "holding",
    "local_of",
    "members",
    "of_parameter",
    "on_mesh",
    "owners",
    "region",
    "sharded",
    "swap",
]
