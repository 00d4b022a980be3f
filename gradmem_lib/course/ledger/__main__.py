"""``python -m gradmem_lib.course.ledger``: print the ledger, ``--write`` it to docs/ledger.md or
``--check`` that docs/ledger.md is current.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from . import page


def main(arguments: list[str] | None = None) -> int:
    """0 when all is well, 1 when ``--check`` finds a page that differs from what the claims compute
    now.
    """
    parser = argparse.ArgumentParser(
        prog="python -m gradmem_lib.course.ledger", description="The claims ledger."
    )
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--write", action="store_true", help="write the ledger's page")
    action.add_argument("--check", action="store_true", help="fail when the page is not current")
    parser.add_argument(
        "--path",
        type=Path,
        default=Path("docs/ledger.md"),
        help="the page (default: docs/ledger.md here)",
    )
    options = parser.parse_args(arguments)
    text = page()
    if options.write:
        options.path.write_text(text, encoding="utf-8")
        print(f"wrote {options.path}")
    elif not options.check:
        print(text, end="")
    elif not options.path.is_file() or options.path.read_text(encoding="utf-8") != text:
        print(
            f"{options.path} is not what the claims compute now: run python -m "
            "gradmem_lib.course.ledger --write"
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
