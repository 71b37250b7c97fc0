"""The options ``--transport`` and ``--device`` of commands."""

from __future__ import annotations

from typing import Annotated, Optional

import typer

from kvbaton.errors import ConfigurationError
from kvbaton.transport import AUTO, NAMES

Transports = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        "--transport",
        help="Transports in order of preference, separated by commas, or auto; shm,tcp by default, cuda,tcp on a GPU.",
    ),
]
Device = Annotated[str, typer.Option("--device", help="Where the model and its cache are: cpu, cuda or cuda:1.")]


def transport_names(text: str | None, device: str = "cpu") -> list[str]:
    """The names in ``text``, separated by commas; None stands for those that suit memory of ``device``.

    Raises `ConfigurationError` unless they are known, or auto alone.
    """
    if text is None:
        return ["shm" if device == "cpu" else "cuda", "tcp"]
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in (*NAMES, AUTO):
            raise ConfigurationError(f"--transport: there is no transport {name!r}; choose among {', '.join(NAMES)}")
    if not names or (AUTO in names and len(names) > 1):
        raise ConfigurationError(f"--transport {text!r}: name transports, or write {AUTO} alone")
    return names
