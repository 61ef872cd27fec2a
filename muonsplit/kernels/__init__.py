"""The accelerated path: one Triton kernel that runs Newton–Schulz on blocks, and promises bits.

Importing it needs torch alone; running it needs triton, and a GPU or Triton's interpreter.
"""

from muonsplit.kernels.launch import architecture, launches
from muonsplit.kernels.op import run
from muonsplit.kernels.program import Ends, Kind, Op, Program

__all__ = ["Ends", "Kind", "Op", "Program", "architecture", "launches", "run"]
