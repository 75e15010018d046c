"""Cadenza: train and ship your own agentic coding model, from tasks to a served policy."""

__version__ = "0.1.0"
