"""The option ``--insecure``, the same for every command that listens."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from kvbaton.secret import INSECURE_VARIABLE


def _allow(insecure: bool) -> bool:
    # In the environment, so that it holds for all that this process makes and starts.
    if insecure:
        os.environ[INSECURE_VARIABLE] = "1"
    return insecure


Insecure = Annotated[
    bool,
    typer.Option(
        "--insecure",
        callback=_allow,
        help="Listen beyond this machine without a secret (KVBATON_SECRET or KVBATON_SECRET_FILE).",
    ),
]
