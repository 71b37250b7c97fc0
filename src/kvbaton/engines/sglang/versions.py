"""Which versions of SGLang this back-end knows. What it relies on there changes without notice."""

from __future__ import annotations

from collections.abc import Mapping

KNOWN: Mapping[str, str] = {
    "0.5.23": "its managers, senders, receivers and bootstrap server run in the tests",
}
"""What is known of each version."""
ANY_VERSION = "KVBATON_SGLANG_ANY_VERSION"
"""Environment variable that, if it is 1, lets the back-end be used with a version that is not in `KNOWN`."""


def refusal(version: str, environment: Mapping[str, str]) -> str:
    """Why the back-end is not registered with SGLang ``version``; empty if it is.

    A version with a local part (``0.5.23+cu130``) counts as the version before it.
    """
    if version.partition("+")[0] in KNOWN or environment.get(ANY_VERSION, "") == "1":
        return ""
    return (
        f"kvbaton knows SGLang {', '.join(KNOWN)}, and this is {version or 'of no known version'}: the transfer "
        "back-end 'kvbaton' is not registered. Install one of these versions, or a newer kvbaton, or set "
        f"{ANY_VERSION}=1 to try it"
    )
