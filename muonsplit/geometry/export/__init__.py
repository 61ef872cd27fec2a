"""The plan, written the way each framework wants it.

A form says where the blocks are and which parameters are Muon's; learning rates and everything
else stay with the framework. What a form cannot say is an error, never an approximation.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from muonsplit.errors import UsageError
from muonsplit.geometry.export.axes import optax_dimensions
from muonsplit.geometry.export.groups import (
    FUNCTIONS,
    bind_groups,
    dion_groups,
    gram_newton_schulz_groups,
    muonium_groups,
    optimuon_groups,
    split_functions,
)
from muonsplit.geometry.export.tags import (
    apply_tags,
    by_parameter,
    deepspeed_tags,
    megatron_tags,
    prime_rl_partitions,
    xtuner_split_sizes,
)
from muonsplit.geometry.plan import Plan

__all__ = [
    "FORMS",
    "FUNCTIONS",
    "Form",
    "apply_tags",
    "bind_groups",
    "by_parameter",
    "deepspeed_tags",
    "dion_groups",
    "export",
    "gram_newton_schulz_groups",
    "megatron_tags",
    "muonium_groups",
    "optax_dimensions",
    "optimuon_groups",
    "prime_rl_partitions",
    "split_functions",
    "xtuner_split_sizes",
]


@dataclass(frozen=True, slots=True)
class Form:
    """How one framework is told where the heads are.

    Attributes:
        key: What the form is called in the framework.
        source: Version or commit it was read in.
        write: Makes it of a plan, in plain values; raises ``LayoutError`` for a weight that it
            cannot express.
    """

    key: str
    source: str
    write: Callable[[Plan], Any]


FORMS: Mapping[str, Form] = MappingProxyType(
    {
        "deepspeed": Form("parameter_attributes", "DeepSpeed 0.19.8", deepspeed_tags),
        "dion": Form("param_groups", "microsoft/dion 0a059a4", dion_groups),
        "gram-newton-schulz": Form(
            "param_groups", "gram-newton-schulz 0.1.6", gram_newton_schulz_groups
        ),
        "megatron": Form("parameter_attributes", "NVIDIA/Megatron-LM d98e8a6", megatron_tags),
        "muonium": Form("param_groups", "muonium 0.2.0", muonium_groups),
        "optax": Form("muon_weight_dimension_numbers", "optax 0.2.8", optax_dimensions),
        "optimuon": Form("param_groups", "optimuon 0.1.1", optimuon_groups),
        "prime-rl": Form(
            "muon_head_partitions",
            "PrimeIntellect-ai/prime-rl pull requests 4114 and 4119, not merged",
            prime_rl_partitions,
        ),
        "xtuner": Form("muon_split_sizes", "InternLM/xtuner b934f46", xtuner_split_sizes),
    }
)


def export(plan: Plan, framework: str) -> dict[str, Any]:
    """The plan in one framework's form, ready for ``json.dumps``.

    Args:
        plan: The plan; its names are the model's.
        framework: A name in :data:`FORMS`.

    Returns:
        ``framework``, ``source``, the plan's ``dialect``, and the form under its own key.

    Raises:
        UsageError: If there is no such form.
        LayoutError: If the form cannot express a weight; the message names both.
    """
    if framework not in FORMS:
        raise UsageError(f"There is no form {framework!r}.", f"Known: {', '.join(FORMS)}.")
    form = FORMS[framework]
    written = form.write(plan)
    head = {"framework": framework, "source": form.source, "dialect": plan.dialect}
    return {**head, form.key: written}
