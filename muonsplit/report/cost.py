"""What a sharded step costs, as tables and sentences."""

from collections.abc import Iterator, Sequence

from muonsplit.cost import Cost, Row, Stage, spread
from muonsplit.report.tables import Table, table
from muonsplit.report.text import counted, shown_shape

_PREFIXES = ("", "k", "M", "G", "T", "P", "E")
_SPREAD = ("total", "most on a rank", "mean", "mean / most")


def cost_tables(model: str, dialect: str, cost: Cost) -> list[Table]:
    """The whole model, its stages if there are several, and a row a leaf."""
    title = f"{model} under {dialect} on {counted(cost.grid.ranks, 'rank')}: {cost.grid}"
    rows = [
        ("Newton–Schulz operations", *_spread(cost.flop, "FLOP")),
        ("sent to owners", *_spread(cost.there, "B")),
        ("sent back", *_spread(cost.back, "B")),
    ]
    shown = [table(title, ("of one step", *_SPREAD), rows, _owned(cost))]
    if len(cost.stages) > 1:
        columns = ("stage", "weights", "most operations", "most to owners", "most back", "calls")
        stages = [(i, *_stage(stage)) for i, stage in enumerate(cost.stages)]
        shown.append(table("pipeline stages", columns, stages))
    columns = ("count", "weight", "shape", "blocks of one", "placed", "blocks", "cut")
    columns += ("operations", "redundant", "to owners", "back")
    return [*shown, table("by leaf", columns, map(_leaf, cost.rows))]


def cost_summary(cost: Cost) -> Iterator[str]:
    """What the tables do not say, a sentence a line."""
    cut = sum(row.cut for row in cost.rows)
    redundant = sum(row.redundant for row in cost.rows)
    calls = max(stage.load.calls for stage in cost.stages)
    yield f"{cost.blocks - cut} blocks are whole on one rank, {cut} are cut and put together"
    yield f"{amount(cost.sent, 'B')} are sent; the least possible is {amount(cost.least, 'B')}"
    yield f"{amount(redundant, 'FLOP')} are redundant, on replicas of weights"
    yield f"{cost.idle} of {counted(cost.grid.ranks, 'rank')} orthogonalise nothing"
    yield f"a rank takes part in at most {counted(calls, 'all-to-all call')}"
    for row in cost.rows:
        if row.cut_by_tp:
            heads = f"{row.cut_by_tp} of {row.blocks} heads of {row.owner}.{row.leaf}"
            yield f"tp={cost.grid.tp} cuts {heads}; they are put together for the step"


def amount(value: float, unit: str) -> str:
    """A number with three digits and a decimal prefix: ``1.27 PFLOP``."""
    power = 0
    while float(f"{value:.3g}") >= 1000 and power + 1 < len(_PREFIXES):
        value, power = value / 1000, power + 1
    return f"{float(f'{value:.3g}'):g} {_PREFIXES[power]}{unit}"


def _owned(cost: Cost) -> str:
    every = "every block has one owner" if cost.owned == cost.blocks else "NOT EVERY block is owned"
    return f"{every}: {cost.owned} of {cost.blocks}"


def _spread(values: Sequence[int], unit: str) -> tuple[str, ...]:
    found = spread(values)
    balance = "" if found.balance is None else f"{found.balance:.3g}"
    return (*(amount(x, unit) for x in (found.total, found.most, found.mean)), balance)


def _stage(stage: Stage) -> tuple[object, ...]:
    load = stage.load
    return (
        stage.weights,
        amount(max(load.flop), "FLOP"),
        amount(max(load.there), "B"),
        amount(max(load.back), "B"),
        load.calls,
    )


def _leaf(row: Row) -> tuple[object, ...]:
    whole = "whole" if len(row.shape) == 2 else "whole, each expert"
    return (
        f"×{row.count}",
        f"{row.owner}.{row.leaf}",
        shown_shape(row.shape),
        row.layout or whole,
        row.placements,
        row.blocks,
        row.cut,
        amount(row.flop, "FLOP"),
        amount(row.redundant, "FLOP") if row.redundant else "",
        amount(row.there, "B"),
        amount(row.back, "B"),
    )
