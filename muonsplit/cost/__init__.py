"""What a sharded step costs on paper: operations and bytes of every rank. Nothing is run."""

from muonsplit.cost.count import ACCELERATOR, AT_ONCE, Counter, Load, Weight, load
from muonsplit.cost.recipe import Grid, stages
from muonsplit.cost.step import Cost, Row, Spread, Stage, cost, spread

__all__ = [
    "ACCELERATOR",
    "AT_ONCE",
    "Cost",
    "Counter",
    "Grid",
    "Load",
    "Row",
    "Spread",
    "Stage",
    "Weight",
    "cost",
    "load",
    "spread",
    "stages",
]
