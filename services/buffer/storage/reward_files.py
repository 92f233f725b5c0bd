"""Stores files of reward functions once, by their digests. Their text is never run here."""

from __future__ import annotations

from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from bapo_core.reward_files import LARGEST_FILE, digest_of_text
from services.buffer.api import wire
from services.buffer.storage.tables import RewardFile
from services.common.problems import bad_request, not_found


def store_reward_file(session: Session, digest: str, text: str) -> None:
    """Stores a file. Raises 400 for another digest than the text has, and for one too large."""
    size = len(text.encode())
    if size > LARGEST_FILE:
        raise bad_request(f"text: has {size} bytes; send at most {LARGEST_FILE}")
    if digest_of_text(text) != digest:
        raise bad_request(
            f"text: has the digest {digest_of_text(text)}, not {digest}; send it whole"
        )
    session.execute(insert(RewardFile).values(digest=digest, text=text).on_conflict_do_nothing())


def read_reward_file(session: Session, digest: str) -> wire.RewardFile:
    """Returns a file. Raises 404 if there is none."""
    row = session.get(RewardFile, digest)
    if row is None:
        raise not_found(f"reward file {digest}")
    return wire.RewardFile(text=row.text)
