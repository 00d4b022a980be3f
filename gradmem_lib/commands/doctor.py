"""``gradmem doctor``: what of the course works on this machine."""

from __future__ import annotations

import argparse


def add(commands) -> None:
    doctor = commands.add_parser(
        "doctor", help="what of the course works here, and what to do about the rest"
    )
    doctor.set_defaults(run=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    from ..course.setup import doctor

    findings = doctor.examine()
    print(doctor.report(findings))
    return 0 if doctor.can_run(findings) else 1
