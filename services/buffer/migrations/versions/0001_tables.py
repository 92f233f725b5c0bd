"""Creates the tables of a run."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "api_token",
        sa.Column("id", sa.BigInteger(), autoincrement=True, nullable=False),
        sa.Column("hash", sa.String(), nullable=False),
        sa.Column("scope", sa.String(), nullable=False),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
        ),
        sa.Column("last_used_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint("scope in ('read','run','admin')", name=op.f("ck_api_token_scope")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_api_token")),
        sa.UniqueConstraint("hash", name=op.f("uq_api_token_hash")),
    )
    op.create_table(
        "prompt",
        sa.Column("id", sa.BigInteger(), autoincrement=True, nullable=False),
        sa.Column("dataset", sa.String(), nullable=False),
        sa.Column("uid", sa.String(), nullable=False),
        sa.Column("position", sa.BigInteger(), nullable=False),
        sa.Column("task", sa.String(), nullable=False),
        sa.Column("payload", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_prompt")),
        sa.UniqueConstraint("dataset", "position", name=op.f("uq_prompt_dataset_position")),
        sa.UniqueConstraint("dataset", "uid", name=op.f("uq_prompt_dataset_uid")),
    )
    op.create_table(
        "run",
        sa.Column("id", sa.BigInteger(), autoincrement=True, nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("config", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("train_dataset", sa.String(), nullable=False),
        sa.Column("test_dataset", sa.String(), nullable=False),
        sa.Column("status", sa.String(), nullable=False),
        sa.Column("current_step", sa.BigInteger(), nullable=False),
        sa.Column("attempt", sa.BigInteger(), nullable=False),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
        ),
        sa.CheckConstraint(
            "status in ('created','running','finished','failed')", name=op.f("ck_run_status")
        ),
        sa.CheckConstraint("current_step >= 0", name=op.f("ck_run_current_step")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_run")),
        sa.UniqueConstraint("name", name=op.f("uq_run_name")),
    )
    op.create_table(
        "checkpoint",
        sa.Column("run_id", sa.BigInteger(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("uri", sa.String(), nullable=False),
        sa.Column("manifest_digest", sa.String(), nullable=False),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
        ),
        sa.ForeignKeyConstraint(
            ["run_id"], ["run.id"], name=op.f("fk_checkpoint_run_id_run"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("run_id", "step", name=op.f("pk_checkpoint")),
    )
    op.create_table(
        "prompt_difficulty",
        sa.Column("run_id", sa.BigInteger(), nullable=False),
        sa.Column("prompt_id", sa.BigInteger(), nullable=False),
        sa.Column("attempts", sa.BigInteger(), nullable=False),
        sa.Column("first_mean", sa.Double(), nullable=False),
        sa.Column("last_mean", sa.Double(), nullable=False),
        sa.Column("best_mean", sa.Double(), nullable=False),
        sa.Column("first_solved_step", sa.BigInteger(), nullable=True),
        sa.Column("last_step", sa.BigInteger(), nullable=False),
        sa.Column("bin", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["prompt_id"], ["prompt.id"], name=op.f("fk_prompt_difficulty_prompt_id_prompt")
        ),
        sa.ForeignKeyConstraint(
            ["run_id"], ["run.id"], name=op.f("fk_prompt_difficulty_run_id_run"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("run_id", "prompt_id", name=op.f("pk_prompt_difficulty")),
    )
    op.create_index(
        op.f("ix_prompt_difficulty_run_id_bin"),
        "prompt_difficulty",
        ["run_id", "bin"],
        unique=False,
    )
    op.create_table(
        "replica",
        sa.Column("run_id", sa.BigInteger(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("loaded_version", sa.BigInteger(), nullable=False),
        sa.Column(
            "last_seen", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False
        ),
        sa.ForeignKeyConstraint(
            ["run_id"], ["run.id"], name=op.f("fk_replica_run_id_run"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("run_id", "name", name=op.f("pk_replica")),
    )
    op.create_table(
        "rollout_group",
        sa.Column("id", sa.BigInteger(), autoincrement=True, nullable=False),
        sa.Column("run_id", sa.BigInteger(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("prompt_id", sa.BigInteger(), nullable=False),
        sa.Column("position", sa.BigInteger(), nullable=False),
        sa.Column("policy_version", sa.BigInteger(), nullable=False),
        sa.Column("correct", sa.BigInteger(), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("mean_reward", sa.Double(), nullable=False),
        sa.Column("object_key", sa.String(), nullable=False),
        sa.Column("object_digest", sa.String(), nullable=False),
        sa.Column("row_start", sa.BigInteger(), nullable=False),
        sa.Column("row_count", sa.BigInteger(), nullable=False),
        sa.Column("token_count", sa.BigInteger(), nullable=False),
        sa.Column("proximal_key", sa.String(), nullable=True),
        sa.Column("proximal_digest", sa.String(), nullable=True),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
        ),
        sa.CheckConstraint(
            "kind in ('fresh','reevaluation','evaluation')", name=op.f("ck_rollout_group_kind")
        ),
        sa.CheckConstraint("correct between 0 and size", name=op.f("ck_rollout_group_correct")),
        sa.ForeignKeyConstraint(
            ["prompt_id"], ["prompt.id"], name=op.f("fk_rollout_group_prompt_id_prompt")
        ),
        sa.ForeignKeyConstraint(
            ["run_id"], ["run.id"], name=op.f("fk_rollout_group_run_id_run"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_rollout_group")),
        sa.UniqueConstraint(
            "run_id",
            "step",
            "kind",
            "prompt_id",
            name=op.f("uq_rollout_group_run_id_step_kind_prompt_id"),
        ),
    )
    op.create_index(
        op.f("ix_rollout_group_run_id_prompt_id_step"),
        "rollout_group",
        ["run_id", "prompt_id", "step"],
        unique=False,
    )
    op.create_table(
        "step_record",
        sa.Column("run_id", sa.BigInteger(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("r_tot", sa.Double(), nullable=False),
        sa.Column("c2", sa.Double(), nullable=False),
        sa.Column("c3", sa.Double(), nullable=False),
        sa.Column("counts", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("rollouts", sa.BigInteger(), nullable=False),
        sa.Column("tokens", sa.BigInteger(), nullable=False),
        sa.Column("metrics", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.Column("committed_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(
            ["run_id"], ["run.id"], name=op.f("fk_step_record_run_id_run"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("run_id", "step", name=op.f("pk_step_record")),
    )
    op.create_table(
        "weight_version",
        sa.Column("run_id", sa.BigInteger(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("uri", sa.String(), nullable=False),
        sa.Column("manifest_digest", sa.String(), nullable=False),
        sa.Column("status", sa.String(), nullable=False),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
        ),
        sa.CheckConstraint(
            "status in ('published','pruned')", name=op.f("ck_weight_version_status")
        ),
        sa.ForeignKeyConstraint(
            ["run_id"], ["run.id"], name=op.f("fk_weight_version_run_id_run"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("run_id", "version", name=op.f("pk_weight_version")),
    )
    op.create_table(
        "batch_member",
        sa.Column("run_id", sa.BigInteger(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("position", sa.BigInteger(), nullable=False),
        sa.Column("group_id", sa.BigInteger(), nullable=False),
        sa.Column("source", sa.String(), nullable=False),
        sa.CheckConstraint(
            "source in ('fresh','reevaluated','replayed')", name=op.f("ck_batch_member_source")
        ),
        sa.ForeignKeyConstraint(
            ["group_id"],
            ["rollout_group.id"],
            name=op.f("fk_batch_member_group_id_rollout_group"),
            ondelete="CASCADE",
        ),
        sa.ForeignKeyConstraint(
            ["run_id"], ["run.id"], name=op.f("fk_batch_member_run_id_run"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("run_id", "step", "position", name=op.f("pk_batch_member")),
        sa.UniqueConstraint(
            "run_id", "step", "group_id", name=op.f("uq_batch_member_run_id_step_group_id")
        ),
    )
    op.create_table(
        "buffer_entry",
        sa.Column("id", sa.BigInteger(), autoincrement=True, nullable=False),
        sa.Column("run_id", sa.BigInteger(), nullable=False),
        sa.Column("buffer", sa.String(), nullable=False),
        sa.Column("group_id", sa.BigInteger(), nullable=False),
        sa.Column("mean_reward", sa.Double(), nullable=False),
        sa.Column("inserted_step", sa.BigInteger(), nullable=False),
        sa.Column("evicted_step", sa.BigInteger(), nullable=True),
        sa.Column("eviction_reason", sa.String(), nullable=True),
        sa.CheckConstraint(
            "buffer in ('hard','high_quality')", name=op.f("ck_buffer_entry_buffer")
        ),
        sa.CheckConstraint(
            "(evicted_step is null) = (eviction_reason is null)",
            name=op.f("ck_buffer_entry_eviction"),
        ),
        sa.ForeignKeyConstraint(
            ["group_id"],
            ["rollout_group.id"],
            name=op.f("fk_buffer_entry_group_id_rollout_group"),
            ondelete="CASCADE",
        ),
        sa.ForeignKeyConstraint(
            ["run_id"], ["run.id"], name=op.f("fk_buffer_entry_run_id_run"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_buffer_entry")),
        sa.UniqueConstraint(
            "run_id", "buffer", "group_id", name=op.f("uq_buffer_entry_run_id_buffer_group_id")
        ),
    )
    op.create_index(
        "ix_buffer_entry_live",
        "buffer_entry",
        ["run_id", "buffer"],
        unique=False,
        postgresql_where="evicted_step is null",
    )


def downgrade() -> None:
    op.drop_index(
        "ix_buffer_entry_live", table_name="buffer_entry", postgresql_where="evicted_step is null"
    )
    op.drop_table("buffer_entry")
    op.drop_table("batch_member")
    op.drop_table("weight_version")
    op.drop_table("step_record")
    op.drop_index(op.f("ix_rollout_group_run_id_prompt_id_step"), table_name="rollout_group")
    op.drop_table("rollout_group")
    op.drop_table("replica")
    op.drop_index(op.f("ix_prompt_difficulty_run_id_bin"), table_name="prompt_difficulty")
    op.drop_table("prompt_difficulty")
    op.drop_table("checkpoint")
    op.drop_table("run")
    op.drop_table("prompt")
    op.drop_table("api_token")
