"""Truth: where a model's own computation puts its heads. Reads no leaf name and no config."""

from muonsplit.truth.answer import Run, State, Truth

__all__ = ["Run", "State", "Truth"]
