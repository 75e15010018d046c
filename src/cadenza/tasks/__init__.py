"""Repair tasks: generated repositories with planted bugs, as Harbor directories, validated by running, and graded.

Start with ``generate.GeneratorConfig`` and ``generate_split``; ``corpus`` gives the pretraining text.
"""
