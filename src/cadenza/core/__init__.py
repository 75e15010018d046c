"""Vocabulary of every room: types, errors, configuration, run database, object store, telemetry."""
