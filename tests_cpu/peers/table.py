"""The table of agreement as the docs carry it."""

from collections.abc import Iterator

from tests_cpu.peers.compare import Peer
from tests_cpu.peers.drivers import PEERS


def table() -> str:
    """One row a peer, from what the tests assert."""
    head = ("peer", "dialect", "float32", "bfloat16", "")
    rows = [head, ("---",) * len(head), *map(_row, PEERS)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _row(peer: Peer) -> tuple[str, ...]:
    return (peer.name, f"`{peer.dialect}`", *_figures(peer), peer.why)


def _figures(peer: Peer) -> Iterator[str]:
    for figure in peer.figures.values():
        if figure is None:
            yield "refused"
        else:
            yield "0" if figure == 0 else f"< {figure:g}"


if __name__ == "__main__":
    print(table())
