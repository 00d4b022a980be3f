"""What it costs in time to accumulate: one update on 16 x 64 tokens, as one batch and cut into K
micro-batches.

The variants take turns, so that whatever else the machine does falls on all of them alike; each
figure is the median over the rounds of the ratio, within a round, to the one batch. On a CPU it is
the time of one thread, while that runs.

    python benchmarks/accumulation.py [--rounds 9]
"""

from __future__ import annotations

from functools import partial

import torch
from shared import CLOCK, ON_CARD, in_turns, one_thread, parser, ratio, record, seconds

from gradmem_lib.course.material import models
from gradmem_lib.techniques.accumulation import accumulate_gradients, split
from gradmem_lib.techniques.losses import next_token_loss

BATCH, SEQ_LEN = 16, 64
MICRO_BATCHES = (1, 2, 4, 8, 16)


def measured(rounds: int) -> dict[str, dict[str, float]]:
    """By way and K, the time of an update to that on one batch."""
    device = "cuda" if ON_CARD else "cpu"
    model = models.tiny_llama().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, foreach=False)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 8192, (BATCH, SEQ_LEN), generator=generator).to(device)
    batch = {"input_ids": ids, "labels": ids}

    def accumulated(k: int) -> None:
        pieces, items = split(batch, BATCH // k), BATCH * (SEQ_LEN - 1)
        accumulate_gradients(pieces, lambda m: next_token_loss(model, m), total_items=items)
        optimizer.step()
        optimizer.zero_grad()

    def stepped(k: int) -> None:
        for micro in split(batch, BATCH // k):
            loss, count = next_token_loss(model, micro)
            (loss / count).backward()
            optimizer.step()
            optimizer.zero_grad()

    variants = {f"accumulated {k}": partial(accumulated, k) for k in MICRO_BATCHES}
    variants |= {f"stepped {k}": partial(stepped, k) for k in MICRO_BATCHES[1:]}
    timed = {name: partial(seconds, run) for name, run in variants.items()}
    times = in_turns(timed, rounds + 1)[1:]  # the first one only warms up
    found: dict[str, dict[str, float]] = {"accumulated": {}, "stepped": {}}
    for name in variants:
        way, k = name.split()
        found[way][k] = ratio(times, name, "accumulated 1")
    return found


def main(arguments: list[str] | None = None) -> None:
    command = parser(__doc__)
    command.add_argument("--rounds", type=int, default=9)
    rounds = command.parse_args(arguments).rounds
    results = {
        "what": (
            f"tiny Llama, float32, one update on {BATCH} x {SEQ_LEN} tokens: time of K "
            "micro-batches / time of one batch"
        ),
        "clock": CLOCK,
        "rounds": rounds,
    }
    with one_thread():
        results |= measured(rounds)
    print(results)
    record("accumulation", results)


if __name__ == "__main__":
    main()
