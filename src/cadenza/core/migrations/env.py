"""Runs migrations on the connection that ``cadenza.core.schema`` passes, inside its transaction."""

from alembic import context

from cadenza.core.tables import metadata

context.configure(
    connection=context.config.attributes["connection"], target_metadata=metadata, render_as_batch=True
)
with context.begin_transaction():
    context.run_migrations()
