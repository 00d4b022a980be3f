"""How ``predict``, ``plan`` and ``explain --model`` answer: options that cannot go together are
refused before torch is imported, and an error of the library is said in the command line's words.
"""

from __future__ import annotations

import argparse
import logging
import re
import sys
from collections.abc import Iterable

from ..hf_names import NO_TOKENS
from ..model.known import model_table
from ..training.recipe import Recipe
from .step_options import chosen
from .terminal import complain, saying


def answer(options: argparse.Namespace) -> int:
    """Run ``options.command``, whose bad input is a sentence on stderr and exit code 2.

    ``options.says`` is said if it takes long.
    """
    if problem := problem_of(options):
        complain(problem)
        return 2
    with saying(options.says):
        return _run_command(options)


def problem_of(options: argparse.Namespace) -> str:
    """What is wrong with the options together, as far as it can be said without torch."""
    if options.seq_len is None and is_known_text_model(options.model):
        return (
            f"--seq-len is missing: {options.model} reads or writes text. Give --seq-len, such as "
            "2048, or 448 for a speech model"
        )
    if getattr(options, "card", None) is not None:
        return _problem_of_plan(options)
    return _problem_of_step(options)


def _problem_of_plan(options: argparse.Namespace) -> str:
    from ..planning.cards import find_card

    try:
        find_card(options.card)
    except ValueError as error:
        return command_words(str(error), ["card"])
    all_cards = options.cards * options.machines
    if options.global_batch % all_cards:
        return (
            f"--global-batch {options.global_batch} is not dealt evenly to {all_cards} "
            "cards: give a multiple"
        )
    return ""


def _problem_of_step(options: argparse.Namespace) -> str:
    if options.batch_size is None:
        return "--batch-size is missing: give the rows of one optimizer step, such as 8"
    try:
        chosen(Recipe, options).micro_batch(options.batch_size)
    except ValueError as error:
        return command_words(str(error), vars(options))
    return ""


def is_known_text_model(name: str) -> bool:
    """Whether ``name`` is in the table of well-known models, and its rows have tokens."""
    wanted = _letters(name)
    for known, row in model_table().items():
        spellings = [known, *row["ids"]]
        for hub_id in row["ids"]:
            spellings.append(hub_id.rpartition("/")[2])  # without its owner
        if wanted in map(_letters, spellings):
            return row["model_type"] not in NO_TOKENS
    return False


def _letters(name: str) -> str:
    return re.sub(r"[\s_-]", "", name.lower())


def command_words(message: str, names: Iterable[str]) -> str:
    """A message of the library with its arguments spelled as options: ``--seq-len 0`` for
    ``seq_len=0``.
    """
    for name in names:
        option = "--" + name.replace("_", "-")
        message = re.sub(rf"\b{name}=None:", f"{option} is not given:", message)
        message = re.sub(rf"\b{name}=None\b", f"{option} none", message)
        message = re.sub(rf"\b{name}=True\b", option, message)
        message = re.sub(rf"\b{name}='([^']*)'", rf"{option} '\1'", message)
        message = re.sub(rf"\b{name}=", f"{option} ", message)
        if "_" in name:  # one word alone, such as "precision", may mean something else
            message = re.sub(rf"\b{name}\b", option, message)
    return message


def _run_command(options: argparse.Namespace) -> int:
    from transformers.utils import logging as transformers_logging

    from ..prediction.question import CannotTrace

    transformers_logging.set_verbosity_error()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)

    try:
        return options.command(options)
    except (ValueError, TypeError, CannotTrace) as error:
        complain(command_words(str(error), vars(options)))
    except Exception as error:
        if sys.flags.dev_mode or isinstance(error, BrokenPipeError):
            raise
        what = f"{options.model}: {type(error).__name__}: {error}"
        where = "No check has foreseen this. `python -X dev -m gradmem_lib` shows where it happens"
        complain(f"{what}\n{where}")
    return 2
