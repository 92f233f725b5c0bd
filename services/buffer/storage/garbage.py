"""Garbage collection of the object store: objects without a row, and rows without their object."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta

from sqlalchemy import func, select
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Session

from services.buffer.api import wire
from services.buffer.service import Service
from services.buffer.storage.images import IMAGE_DIGESTS
from services.buffer.storage.tables import Checkpoint, PromptRow, RolloutGroup, Run, WeightVersion
from services.common import layout
from services.common.objectstore import MANIFEST, PROBES

MIN_ORPHAN_AGE = timedelta(days=1)
"""Younger objects may still get their row: uploading a large checkpoint takes hours."""


def collect_garbage(service: Service, *, dry_run: bool) -> wire.Garbage:
    """Finds objects that no row points to, and objects that a row points to but are missing.

    Deletes orphans older than `MIN_ORPHAN_AGE`, unless `dry_run`.
    """
    # An object is stored before its row. So rows are read before the listing, for what is missing
    # from it, and after it, for what in it has no row: a run that goes on meanwhile adds to both.
    with service.sessions() as session:
        needed = _referenced_objects(session)
    stored = {
        item.key: item.modified
        for prefix in ("runs/", "models/", "images/", "imports/", f"{PROBES}/")
        for item in service.store.listing(prefix)
    }
    with service.sessions() as session:
        keys = set(_referenced_keys(session))
        prefixes = set(_referenced_prefixes(session))
        runs = set(session.scalars(select(Run.name)))
    orphans = sorted(
        key
        for key, modified in stored.items()
        if key not in keys
        and not _is_under(key, prefixes)
        and not _belongs_to(key, runs)
        and (dry_run or modified < datetime.now(UTC) - MIN_ORPHAN_AGE)
    )
    needed &= _objects_of(keys, prefixes)  # without what was deleted meanwhile
    if not dry_run:
        service.store.delete(orphans)
    return wire.Garbage(
        orphans=orphans,
        objects=len(stored),
        missing=sorted(needed - stored.keys()),
        deleted=0 if dry_run else len(orphans),
    )


def _referenced_objects(session: Session) -> set[str]:
    return _objects_of(_referenced_keys(session), _referenced_prefixes(session))


def _objects_of(keys: Iterable[str], prefixes: Iterable[str]) -> set[str]:
    """Returns the objects that must exist: of a prefix, its manifest."""
    return {*keys, *(f"{prefix}/{MANIFEST}" for prefix in prefixes)}


def _referenced_keys(session: Session) -> Iterable[str]:
    yield from session.scalars(select(RolloutGroup.object_key).distinct())
    proximal = select(RolloutGroup.proximal_key).where(RolloutGroup.proximal_key.is_not(None))
    yield from (key for key in session.scalars(proximal.distinct()) if key is not None)
    digest = func.jsonb_path_query(PromptRow.payload, IMAGE_DIGESTS, type_=JSONB)
    yield from map(layout.image, session.scalars(select(digest).distinct()))


def _referenced_prefixes(session: Session) -> Iterable[str]:
    stored = select(WeightVersion.uri).where(WeightVersion.status != "pruned")
    yield from session.scalars(stored)
    yield from session.scalars(select(Checkpoint.uri))
    for path in session.scalars(select(Run.config_json["model"]["path"].astext)):
        if path.startswith(layout.MODEL_SCHEME):
            yield path.removeprefix(layout.MODEL_SCHEME).partition("#")[0]


def _belongs_to(key: str, runs: set[str]) -> bool:
    """Whether an object is one of those that are kept as long as their run exists."""
    match = layout.WITHOUT_ROW.match(key)
    return match is not None and match["run"] in runs


def _is_under(key: str, prefixes: set[str]) -> bool:
    segments = key.split("/")
    return any("/".join(segments[:depth]) in prefixes for depth in range(1, len(segments)))
