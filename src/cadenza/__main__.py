"""``python -m cadenza``: the same as the ``cadenza`` command."""

from cadenza.cli.app import main

main()
