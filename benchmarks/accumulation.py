"""What it costs in time to accumulate: one update on 16 x 64 tokens, as one batch and cut into K
micro-batches.

The variants take turns, so that whatever else the machine does falls on all of them alike; each
figure is the median over the rounds of the ratio, within a round, to the one batch. On a CPU it is
the time of one thread, while that runs.

    python benchmarks/accumulation.py
"""

from __future__ import annotations

import statistics
import time

import torch
from record import record

from gradmem_lib.course.material import models
from gradmem_lib.techniques.accumulation import accumulate_gradients, split
from gradmem_lib.techniques.losses import next_token_loss

BATCH, SEQ_LEN, ROUNDS = 16, 64, 9
MICRO_BATCHES = (1, 2, 4, 8, 16)


def now(device: str) -> float:
    """Seconds, once the device has done what it was given."""
    if device == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(1)
    model = models.tiny_llama().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, foreach=False)
    ids = torch.randint(0, 8192, (BATCH, SEQ_LEN), generator=torch.Generator().manual_seed(0)).to(
        device
    )
    batch = {"input_ids": ids, "labels": ids}

    def accumulated(k: int) -> None:
        items = BATCH * (SEQ_LEN - 1)
        accumulate_gradients(
            split(batch, BATCH // k), lambda m: next_token_loss(model, m), total_items=items
        )
        optimizer.step()
        optimizer.zero_grad()

    def stepped(k: int) -> None:
        for micro in split(batch, BATCH // k):
            loss, count = next_token_loss(model, micro)
            (loss / count).backward()
            optimizer.step()
            optimizer.zero_grad()

    variants = {("accumulated", k): accumulated for k in MICRO_BATCHES}
    variants |= {("stepped", k): stepped for k in MICRO_BATCHES[1:]}
    rounds = []
    for _ in range(ROUNDS + 1):
        seconds = {}
        for (way, k), run in variants.items():
            start = now(device)
            run(k)
            seconds[way, k] = now(device) - start
        rounds.append({name: t / seconds["accumulated", 1] for name, t in seconds.items()})
    rounds = rounds[1:]  # the first one only warms up
    results = {
        "what": (
            f"tiny Llama, float32, one update on {BATCH} x {SEQ_LEN} tokens: time of K "
            "micro-batches / time of one batch"
        ),
        "clock": "wall" if device == "cuda" else "CPU time of one thread",
        "rounds": ROUNDS,
    }
    for way in ("accumulated", "stepped"):
        results[way] = {
            str(k): round(statistics.median(r[way, k] for r in rounds), 2)
            for w, k in variants
            if w == way
        }
    print(results)
    print("wrote", record("accumulation", results).name)


if __name__ == "__main__":
    main()
