"""Alembic migrations of the run database; ``RunDatabase.open`` applies them."""
