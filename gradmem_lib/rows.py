"""Tables with one row for each value of an option."""

import difflib
from collections.abc import Collection
from typing import Any

# What other libraries call something, and this library's words for it.
_WORDS = {
    "16": ("autocast-fp16",),
    "16-mixed": ("autocast-fp16",),
    "4bit": ("nf4", "qlora"),
    "adamw_torch": ("adamw",),
    "adamw_torch_fused": ("adamw-fused",),
    "bf16-mixed": ("autocast-bf16",),
    "bfloat16": ("bf16",),
    "bnb": ("nf4", "adamw-8bit"),
    "flash": ("fused",),
    "float16": ("autocast-fp16", "fp16"),
    "fp16": ("autocast-fp16",),
    "fp32": ("float32",),
    "full_shard": ("fsdp",),
    "shard_grad_op": ("zero2",),
    "zero3": ("fsdp",),
}


def check_choice(what: str, value: Any, names: Collection) -> None:
    """Raise ``ValueError`` for a ``value`` that is not one of ``names``."""
    if value in names:
        return
    near = nearest_word(value, names)
    if near is not None:
        raise ValueError(f"{what}={value!r} is not known: did you mean {near!r}?")
    raise ValueError(f"{what}={value!r} is not known: choose one of {', '.join(map(repr, names))}")


def nearest_word(value: Any, names: Collection) -> str | None:
    """The one of ``names`` that someone who wrote ``value`` most likely means; ``None`` if none is
    near.
    """
    written = str(value).lower()
    for word in _WORDS.get(written, ()):
        if word in names:
            return word
    words = [name for name in names if isinstance(name, str)]
    near = difflib.get_close_matches(written.replace("_", "-"), words, n=1)
    return near[0] if near else None


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
