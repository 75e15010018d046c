"""Tables of the run database, as SQLAlchemy metadata. The migrations create them; a test compares the two.

Times are seconds since 1970 (UTC). JSON columns hold objects. ``run`` of ``rl_steps``, ``ledger`` and ``policies``
names one RL run, which is a stage of a run (``RUN/STAGE``), so that two RL stages keep ledgers of their own.
"""

from __future__ import annotations

from sqlalchemy import JSON, Column, Float, ForeignKey, Index, Integer, MetaData, String, Table, Text

SCHEMA_HEAD = "0001"  # the newest revision in migrations/versions; a test keeps the two equal

metadata = MetaData()

runs = Table(
    "runs",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("name", String(200), nullable=False),
    Column("directory", Text, nullable=False),
    Column("recipe", JSON, nullable=False),
    Column("seed", Integer, nullable=False),
    Column("status", String(20), nullable=False),  # running | finished | failed | interrupted
    Column("machine", JSON, nullable=False),
    Column("created", Float, nullable=False),
    Column("updated", Float, nullable=False),
)

stages = Table(
    "stages",
    metadata,
    Column("run", String(64), ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True),
    Column("name", String(200), primary_key=True),
    Column("position", Integer, nullable=False),
    Column("config_digest", String(64), nullable=False),
    Column("config", JSON, nullable=False),
    Column("status", String(20), nullable=False),  # running | finished | failed | interrupted
    Column("started", Float, nullable=False),
    Column("finished", Float),
    Column("artifact_digest", String(64)),
    Column("figures", JSON),
    Column("reason", Text),
)

rl_steps = Table(
    "rl_steps",
    metadata,
    Column("run", String(300), primary_key=True),
    Column("step", Integer, primary_key=True),
    Column("policy_version", Integer, nullable=False),
    Column("metrics", JSON, nullable=False),
    Column("created", Float, nullable=False),
)

ledger = Table(
    "ledger",
    metadata,
    Column("run", String(300), primary_key=True),
    Column("task_id", String(200), primary_key=True),  # a prompt is planned at most once in an RL run
    Column("group_id", String(200), nullable=False),
    Column("planned_step", Integer, nullable=False),
    Column("trained_step", Integer),
    Column("status", String(20), nullable=False),  # planned | trained | dropped
    Index("ledger_by_step", "run", "planned_step"),
)

policies = Table(
    "policies",
    metadata,
    Column("run", String(300), primary_key=True),
    Column("version", Integer, primary_key=True),
    Column("name", String(200), nullable=False),
    Column("parent", Integer),
    Column("digest", String(64), nullable=False),
    Column("created", Float, nullable=False),
)

aliases = Table(
    "aliases",
    metadata,
    Column("name", String(100), primary_key=True),  # candidate | canary | serving
    Column("run", String(300), nullable=False),
    Column("version", Integer, nullable=False),
    Column("updated", Float, nullable=False),
)

events = Table(
    "events",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("run", String(300), nullable=False),
    Column("kind", String(100), nullable=False),
    Column("data", JSON, nullable=False),
    Column("created", Float, nullable=False),
    Index("events_by_run", "run", "kind"),
)
