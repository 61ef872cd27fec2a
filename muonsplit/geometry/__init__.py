"""The plan: leaf → candidates → confirm. Needs torch alone, and never runs a model."""

from muonsplit.geometry.plan import Decision, Plan, plan

__all__ = ["Decision", "Plan", "plan"]
