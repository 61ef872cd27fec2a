"""Subjects that must fail. A fault counts only if its named check is the first to catch it."""

from muonsplit.faulty.blocks import *  # noqa: F403 - factories are found here by name
from muonsplit.faulty.carried import *  # noqa: F403
from muonsplit.faulty.cheats import *  # noqa: F403
from muonsplit.faulty.cheats import CHEATS, Cheat
from muonsplit.faulty.counts import *  # noqa: F403
from muonsplit.faulty.cut_heads import *  # noqa: F403
from muonsplit.faulty.fused import *  # noqa: F403
from muonsplit.faulty.inputs import *  # noqa: F403
from muonsplit.faulty.iteration import *  # noqa: F403
from muonsplit.faulty.legal import *  # noqa: F403
from muonsplit.faulty.legal import LEGAL, LegalVariant
from muonsplit.faulty.names import *  # noqa: F403
from muonsplit.faulty.options import *  # noqa: F403
from muonsplit.faulty.placed import *  # noqa: F403
from muonsplit.faulty.ranks import *  # noqa: F403
from muonsplit.faulty.recognition import *  # noqa: F403
from muonsplit.faulty.registry import FAULTS, Fault
from muonsplit.faulty.routing import *  # noqa: F403
from muonsplit.faulty.saved import *  # noqa: F403
from muonsplit.faulty.shapes import *  # noqa: F403
from muonsplit.faulty.shards import *  # noqa: F403
from muonsplit.faulty.state import *  # noqa: F403
from muonsplit.faulty.steps import *  # noqa: F403

__all__ = ["CHEATS", "FAULTS", "LEGAL", "Cheat", "Fault", "LegalVariant"]  # pyright: ignore[reportUnsupportedDunderAll]
