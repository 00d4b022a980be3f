"""Tables with one row for each value of an option."""

from collections.abc import Iterable
from typing import Any


def check_choice(what: str, value: Any, names: Iterable) -> None:
    """Raise ``ValueError`` for a ``value`` that is not one of ``names``."""
    if value not in names:
        raise ValueError(
            f"{what}={value!r} is not known: choose one of {', '.join(map(repr, names))}"
        )


class Rows(dict):
    """The rows of an option, by its values: ``OPTIMIZERS["sgd"]`` is all that is known of SGD.

    Raises ``ValueError`` for a value without a row, and ``TypeError`` where a value is given
    something else than a row.
    """

    def __init__(self, what: str, row_type: type, rows: dict[str, Any]):
        super().__init__()
        self.what, self.row_type = what, row_type
        for value, row in rows.items():
            self[value] = row

    def __setitem__(self, value: str, row: Any) -> None:
        if not isinstance(row, self.row_type):
            raise TypeError(
                f"{self.what}={value!r} was given {row!r}, which is no row: write "
                f"{self.row_type.__name__}(...), which says what the library has to know"
            )
        super().__setitem__(value, row)

    def __missing__(self, value: Any) -> Any:
        check_choice(self.what, value, self)
