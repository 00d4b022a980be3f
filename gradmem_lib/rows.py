"""Tables with one row for each value of an option."""

import difflib
from collections.abc import Collection
from typing import Any

# What other libraries and people call each of this library's words.
_WORDS = {
    "adamw": "adamw_torch adamw_hf paged_adamw_32bit",
    "adamw-8bit": "8bit 8bit-adam 8bit-adamw bnb",
    "adamw-fused": "adamw_torch_fused fused fused-adam fused-adamw",
    "autocast-bf16": "amp autocast bf16-mixed mixed mixed-bf16",
    "autocast-fp16": "16 16-mixed float16 fp16 fp16-mixed half mixed-fp16",
    "bf16": "bf16-true bfloat16",
    "cuda": "gpu",
    "ddp": "data-parallel distributeddataparallel dp no-shard",
    "eager": "math naive",
    "elementwise": "selective",
    "float32": "32 32-true float fp32 full no tf32",
    "fp16": "float16 half",
    "fsdp": "full-shard fully-shard hsdp hybrid-shard stage3 zero zero-3 zero3",
    "flash_attention_2": "fa2 flash-attention flash-attn flash2",
    "fused": "efficient flash mem-efficient memory-efficient sdp xformers",
    "mlp": "feed-forward ffn",
    "nf4": "4-bit 4bit bnb int4",
    "nf4-double": "double-quant",
    "per-layer": "all block full gradient-checkpointing true yes",
    "qlora": "4bit",
    "sgd": "momentum sgd-momentum sgdm",
    "zero1": "stage1",
    "zero2": "shard-grad-op stage2 zero-2",
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
    written = str(value).lower().removeprefix("torch.").replace("_", "-")
    for word, others in _WORDS.items():
        if word in names and written in others.replace("_", "-").split():
            return word
    words = [name for name in names if isinstance(name, str)]
    near = difflib.get_close_matches(written, words, n=1)
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
