"""``gradmem plan``: the recipe that fits a card."""

from __future__ import annotations

import argparse
import json

from .model_step import answer
from .readers import count, one_of
from .step_options import MODEL
from .terminal import progress_line

SEE_IT = """\
Save it as train.py, below the lines that make your train_dataset. Then run its first two steps, and
see what they hold at the peak:
  gradmem run --steps 2 train.py"""


def add(commands) -> None:
    plan = commands.add_parser(
        "plan", help="the recipe that fits a card, and why faster ones do not"
    )
    option = plan.add_argument
    option("model", help=MODEL)
    option(
        "--card",
        required=True,
        metavar="C",
        help="a name (RTX 4090, T4, A100 80GB, ...) or bytes (24GiB)",
    )
    option("--cards", type=count, default=1, metavar="N", help="so many of them in one machine")
    option("--machines", type=count, default=1, metavar="N", help="so many machines of --cards")
    option(
        "--network",
        type=float,
        metavar="B",
        help="bytes a second from a machine to the others (12.5e9: 100 Gbit/s)",
    )
    option("--seq-len", type=count, metavar="N", help="tokens in a row (not for images)")
    option("--global-batch", type=count, required=True, metavar="N", help="rows of one step")
    option(
        "--method",
        type=one_of(("full", "lora", "qlora", "any")),
        default="full",
        metavar="M",
        help="full (the default), lora, qlora or any",
    )
    option(
        "--target",
        type=one_of(("cuda", "cpu")),
        default="cuda",
        metavar="T",
        help="cuda (the default) or cpu",
    )
    option(
        "--margin",
        type=float,
        metavar="M",
        help="share of what is needed that stays free (0.03; several cards 0.045; 0: none)",
    )
    option("--json", action="store_true", help="print JSON")
    plan.set_defaults(
        run=answer,
        command=_plan,
        says="reading the model and trying its recipes, up to two minutes ...",
    )


def _plan(options: argparse.Namespace) -> int:
    from ..planning.plan import plan

    with progress_line() as show:
        made = plan(
            options.model,
            card=options.card,
            seq_len=options.seq_len,
            global_batch=options.global_batch,
            method=options.method,
            target=options.target,
            cards=options.cards,
            machines=options.machines,
            network=options.network,
            margin=options.margin,
            notify=show,
        )
    if options.json:
        print(json.dumps(made.to_dict(), indent=2))
    else:
        print(made)
        if made.code:
            print(f"\nCode for the first one (train_dataset is yours):\n\n{made.code}")
            print(SEE_IT)
    return 0 if made.fits else 1
