"""Stores the mean reward of an evaluation, which its groups have.

Where somebody has deleted the groups, the accuracy stands for it, as for rewards of 1 and 0.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0030"
down_revision = "0029"
branch_labels = None
depends_on = None

_OF_GROUPS = """
    update evaluation set mean_reward = mean
    from (
        select g.run_id, g.step, p.dataset, avg(g.mean_reward) as mean
        from rollout_group g join prompt p on p.id = g.prompt_id
        where g.kind = 'evaluation'
        group by g.run_id, g.step, p.dataset
    ) as measured, run
    where run.id = evaluation.run_id
        and measured.run_id = evaluation.run_id
        and measured.step = evaluation.version
        and measured.dataset = run.test_datasets ->> evaluation.evaluation_set
"""


def upgrade() -> None:
    op.add_column("evaluation", sa.Column("mean_reward", sa.Float(), nullable=True))
    op.execute("update evaluation set mean_reward = mean_accuracy")
    op.execute(_OF_GROUPS)
    op.alter_column("evaluation", "mean_reward", nullable=False)


def downgrade() -> None:
    op.drop_column("evaluation", "mean_reward")
