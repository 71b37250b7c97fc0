"""Reads the small text files of sysfs and proc, in a tree that may be made up or have holes."""

from __future__ import annotations

from pathlib import Path

MAX_BYTES = 1 << 20


def read_text(path: Path) -> str:
    """What the file says, without blanks around it; empty where it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(MAX_BYTES).decode(errors="replace").strip("\0 \t\r\n")
    except (OSError, ValueError):
        # Entries of a table that has fewer of them answer with an error of their own when they are read.
        return ""


def read_number(path: Path, default: int) -> int:
    """The number in the file, decimal or with 0x; ``default`` where there is none."""
    try:
        return int(read_text(path), 0)
    except ValueError:
        return default


def names_in(path: Path) -> list[str]:
    """What the folder holds, in natural order (mlx5_2 before mlx5_10); empty where it is not there."""
    try:
        return sorted((entry.name for entry in path.iterdir()), key=natural)
    except OSError:
        return []


def natural(name: str) -> tuple[tuple[str, int], ...]:
    """A key to sort names by: their numbers count as numbers."""
    parts: list[tuple[str, int]] = []
    text, digits = "", ""
    for letter in name:
        if letter in "0123456789":
            digits += letter
            continue
        if digits:
            parts.append((text, int(digits)))
            text, digits = "", ""
        text += letter
    parts.append((text, int(digits or -1)))
    return tuple(parts)


def numbers_in_list(text: str) -> tuple[int, ...]:
    """The numbers in a list as the kernel writes it: "0-3,8"; empty for what is no such list."""
    numbers: list[int] = []
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if not first.isdecimal() or (last and not last.isdecimal()):
            continue
        numbers.extend(range(int(first), min(int(last or first), int(first) + 65536) + 1))
    return tuple(numbers)
