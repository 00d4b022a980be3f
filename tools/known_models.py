"""Builds ``gradmem_lib/model/models.json`` again from the configs on the hub (needs a network).

    python tools/known_models.py                              # read every model's config again
    python tools/known_models.py Qwen3-8B=Qwen/Qwen3-8B       # and add one, or several

A row keeps sizes only: the settings of the published config that differ from transformers' defaults
and that change what a model holds or does with its rows. A model that needs a login keeps its row.
"""

import json
import sys
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig

TABLE = Path(__file__).resolve().parent.parent / "gradmem_lib" / "model" / "models.json"
# Settings that change no size: what a tokenizer or a generation needs, and notes of the file.
NOT_SIZES = (
    "_name_or_path",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "id2label",
    "initializer_factor",
    "initializer_range",
    "label2id",
    "layer_norm_eps",
    "pad_token_id",
    "rms_norm_eps",
    "rope_parameters",
    "task_specific_params",
    "torch_dtype",
    "transformers_version",
    "use_cache",
)


def sizes(config: PretrainedConfig) -> dict[str, Any]:
    """The row of a config: its family, and its settings that differ from the defaults."""
    row = {"model_type": config.model_type}
    for name, value in config.to_diff_dict().items():
        if name not in NOT_SIZES and name != "model_type":
            row[name] = value
    return row


def built_again(table: dict[str, dict], load=AutoConfig.from_pretrained) -> dict[str, dict]:
    """``table`` with every row read again by ``load(hub id)``.

    A row whose config cannot be read stays as it is, and is named on stderr.
    """
    new = {}
    for name, row in table.items():
        ids = row["ids"]
        try:
            new[name] = {"ids": ids} | sizes(load(ids[0])) if ids else row
        except (OSError, ValueError) as error:
            print(f"{name}: {ids[0]} was not read ({error}); its row stays", file=sys.stderr)
            new[name] = row
    return new


def written(table: dict[str, dict]) -> str:
    """The table as text: one line a model."""
    lines = [f"{json.dumps(name)}: {json.dumps(row)}" for name, row in table.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main(arguments: list[str]) -> None:
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    for argument in arguments:
        name, _, hub_id = argument.partition("=")
        if not hub_id:
            sys.exit(f"{argument!r} was given: write NAME=ID, such as Qwen3-8B=Qwen/Qwen3-8B")
        table[name] = {"ids": [hub_id]}
    TABLE.write_text(written(built_again(table)), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
