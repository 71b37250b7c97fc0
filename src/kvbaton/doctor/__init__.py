"""``kvbaton doctor``: what a machine has, what transports can do with it, the way to a peer, and what to change.

`examine` makes a `Report`; `DoctorServer` waits for the doctors of other machines.
"""

from __future__ import annotations

from kvbaton.doctor.examine import examine
from kvbaton.doctor.report import Report, to_json
from kvbaton.doctor.serve import DoctorServer

__all__ = ["DoctorServer", "Report", "examine", "to_json"]
