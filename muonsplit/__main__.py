"""``python -m muonsplit``."""

from muonsplit.cli import main

main()
