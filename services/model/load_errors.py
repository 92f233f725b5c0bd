"""Says why transformers could not load a model directory."""

from __future__ import annotations

from services.common.errors import first_line


def explain_load_error(error: Exception) -> str:
    """Returns in one line why `error` was raised by a `from_pretrained` of transformers.

    The advice of transformers for a model with code of its own is an argument, which bapo's users
    cannot give: bapo runs no code of models.
    """
    if "trust_remote_code" in str(error):
        return (
            "it needs code of its author, and bapo runs no code of models; choose a model of a "
            "type that transformers has"
        )
    return first_line(error)
