"""Runs the code of a page, block after block, and holds what it prints against the block of text behind it."""

import contextlib
import io
import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(text):
    """``(line, code, printed)`` of each block of Python; what it prints follows it as a block of text."""
    found = []
    for match in FENCED.finditer(text):
        line = text[: match.start()].count("\n") + 2
        if match[1] == "python":
            found.append([line, match[2], ""])
        elif match[1] == "text":
            found[-1][2] = match[2]
    return found


def run_blocks(page, listed):
    """Run ``listed``, blocks of ``page``, in one namespace."""
    names = {"__name__": page.stem}
    for line, code, printed in listed:
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            # As many lines down as in the page, so that a traceback names its lines.
            exec(compile("\n" * (line - 1) + code, str(page), "exec"), names)
        assert output.getvalue() == printed, f"{page.name}, line {line}"


def links(text):
    """The files that a page points to."""
    return sorted(set(re.findall(r"\]\(([^)#]+)", text)))
