"""Adds the status of weights that a rewind undid and the trainer has not published again yet."""

from __future__ import annotations

from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

TABLE, CONSTRAINT = "weight_version", "ck_weight_version_status"


def upgrade() -> None:
    op.drop_constraint(op.f(CONSTRAINT), TABLE)
    statuses = "status in ('published','set_aside','pruned')"
    op.create_check_constraint(op.f(CONSTRAINT), TABLE, statuses)


def downgrade() -> None:
    # The version before has no such weights: it deleted them at a rewind, and their groups.
    op.execute(
        "delete from rollout_group using weight_version as weights "
        "where weights.status = 'set_aside' and rollout_group.run_id = weights.run_id "
        "and rollout_group.policy_version = weights.version"
    )
    op.execute("delete from weight_version where status = 'set_aside'")
    op.drop_constraint(op.f(CONSTRAINT), TABLE)
    op.create_check_constraint(op.f(CONSTRAINT), TABLE, "status in ('published','pruned')")
