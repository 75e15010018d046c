"""Runs, stages, RL steps, ledger, policies, aliases, events."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "runs",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("directory", sa.Text, nullable=False),
        sa.Column("recipe", sa.JSON, nullable=False),
        sa.Column("seed", sa.Integer, nullable=False),
        sa.Column("status", sa.String(20), nullable=False),
        sa.Column("machine", sa.JSON, nullable=False),
        sa.Column("created", sa.Float, nullable=False),
        sa.Column("updated", sa.Float, nullable=False),
    )
    op.create_table(
        "stages",
        sa.Column("run", sa.String(64), sa.ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("name", sa.String(200), primary_key=True),
        sa.Column("position", sa.Integer, nullable=False),
        sa.Column("config_digest", sa.String(64), nullable=False),
        sa.Column("config", sa.JSON, nullable=False),
        sa.Column("status", sa.String(20), nullable=False),
        sa.Column("started", sa.Float, nullable=False),
        sa.Column("finished", sa.Float),
        sa.Column("artifact_digest", sa.String(64)),
        sa.Column("figures", sa.JSON),
        sa.Column("reason", sa.Text),
    )
    op.create_table(
        "rl_steps",
        sa.Column("run", sa.String(300), primary_key=True),
        sa.Column("step", sa.Integer, primary_key=True),
        sa.Column("policy_version", sa.Integer, nullable=False),
        sa.Column("metrics", sa.JSON, nullable=False),
        sa.Column("created", sa.Float, nullable=False),
    )
    op.create_table(
        "ledger",
        sa.Column("run", sa.String(300), primary_key=True),
        sa.Column("task_id", sa.String(200), primary_key=True),
        sa.Column("group_id", sa.String(200), nullable=False),
        sa.Column("planned_step", sa.Integer, nullable=False),
        sa.Column("trained_step", sa.Integer),
        sa.Column("status", sa.String(20), nullable=False),
    )
    op.create_index("ledger_by_step", "ledger", ["run", "planned_step"])
    op.create_table(
        "policies",
        sa.Column("run", sa.String(300), primary_key=True),
        sa.Column("version", sa.Integer, primary_key=True),
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("parent", sa.Integer),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("created", sa.Float, nullable=False),
    )
    op.create_table(
        "aliases",
        sa.Column("name", sa.String(100), primary_key=True),
        sa.Column("run", sa.String(300), nullable=False),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("updated", sa.Float, nullable=False),
    )
    op.create_table(
        "events",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("run", sa.String(300), nullable=False),
        sa.Column("kind", sa.String(100), nullable=False),
        sa.Column("data", sa.JSON, nullable=False),
        sa.Column("created", sa.Float, nullable=False),
    )
    op.create_index("events_by_run", "events", ["run", "kind"])
