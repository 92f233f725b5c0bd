"""Reads rows of a run that is a fork: its own, and those of earlier steps of the runs before it.

A fork shares the past of its parent: no row and no object is copied for it, whatever its length. So
a query about many steps matches the rows of the whole lineage (`of_run`), and a query about one
step reads the rows of the run that the step belongs to (`Run.of_step`). A policy version t belongs
to step t.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import ColumnElement, and_, or_
from sqlalchemy.orm import InstrumentedAttribute

from services.buffer.storage.tables import Run

NO_LIMIT = 2**62
"""Stands for no last step, where SQL compares it with a step."""


def of_run(
    run: Run, run_id: InstrumentedAttribute[int], step: InstrumentedAttribute[Any]
) -> ColumnElement[bool]:
    """Matches the rows of a run and of its past.

    run_id, step: the columns of the rows' run and of their step, or policy version.
    """
    newest, *before = run.lineage
    own = run_id == newest.run_id
    if not before:
        return own
    return or_(
        and_(own, step >= newest.first_step),
        *(
            and_(run_id == ancestor.run_id, step.between(ancestor.first_step, ancestor.last_step))
            for ancestor in before
        ),
    )


def lineage_parameters(run: Run) -> dict[str, Any]:
    """Returns the lineage as parameters of a text of SQL: lists, the newest run first."""
    return {
        "run_ids": [ancestor.run_id for ancestor in run.lineage],
        "last_steps": [
            NO_LIMIT if ancestor.last_step is None else ancestor.last_step
            for ancestor in run.lineage
        ],
    }
