"""Lesson 10's answers: a 70B on two cards, and what FSDP gathers under checkpoints."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ....compat.fake_ranks import fake_process_group
from ....measure.tracker import MemoryTracker
from ....planning.cards import CARDS
from ....techniques.sharding import shard
from ...ledger import Finding, answers
from ...ledger.finding import Figures, about, fits
from ...machine.compat import enable_checkpointing
from ..shared.claim_runs import silent, tiny, token_ids
from .exercises import CollectiveLog, seventy_peak, two_cards

MODES = {"without checkpoints": None, "use_reentrant=False": False, "use_reentrant=True": True}


def on_a_card(tokens: int) -> int:
    """Bytes at the peak of one of two cards, with exercise 10.7's recipe for Llama-2-70B: a row of
    ``tokens`` on each.
    """
    return seventy_peak(two_cards(), tokens).total


@answers("C17")
def seventy_billion_on_two() -> Finding:
    card = CARDS["RTX 4090 24GB"].nbytes
    peaks = {tokens: on_a_card(tokens) for tokens in (1024, 2048)}
    return Finding(
        own=(fits("70B in 4 bits, 1 x 1,024 on each card", "to fit 24 GB", card, peaks[1024]),),
        beyond=(fits("1 x 2,048", "to fit 24 GB", card, peaks[2048]),),
        says="""
            holds: Rows of 1,024 tokens fit, with a checkpoint in every layer. Rows of 2,048
                leave less than a GB for all that is no tensor.
            fails: A card's shard, the layers that it gathers and the activations do not fit on
                it.
            why: A card keeps half of the base, and half of embeddings and head in bf16. It
                gathers one layer after another, while embedding and head stay whole. Only the
                adapters have gradients and states. The inputs of the layers and the loss grow with
                the tokens.
            needs: two cards of 24 GB to see it run; one rank's bytes are predicted
            """,
        figures={f"peak, {tokens:,} tokens": peak for tokens, peak in peaks.items()}
        | {"a card has (as the driver says)": card},
    )


class Pairs(nn.Module):
    """Two layers in one checkpoint."""

    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x, **kwargs):
        return checkpoint(partial(self.both, **kwargs), x, use_reentrant=False)

    def both(self, x, **kwargs):
        for layer in self.layers:
            x = layer(x, **kwargs)
        return x


def second_step(
    reentrant: bool | None, ids: torch.Tensor, *, pairs: bool = False
) -> tuple[int, int, nn.Module]:
    """All-gathers and peak in bytes of a rank's second step with a Llama under FSDP, and the model
    with its gradients.

    ``reentrant``: the kind of checkpoint on every layer, ``None`` for none; ``pairs``: on two
    layers at a time instead.
    """
    model = tiny()
    with silent():
        if reentrant is not None and not pairs:
            enable_checkpointing(model, {"use_reentrant": reentrant})
        shard(model, "fsdp")
        if pairs:
            layers = model.model.layers
            model.model.layers = nn.ModuleList(
                Pairs(layers[i : i + 2]) for i in range(0, len(layers), 2)
            )
        model(input_ids=ids, labels=ids).loss.backward()
        model.zero_grad()
        with CollectiveLog() as calls, MemoryTracker(model, live=False) as tracker:
            model(input_ids=ids, labels=ids).loss.backward()
    return calls.count("allgather"), tracker.peak.total, model


@answers("C49")
def gathers() -> Finding:
    with fake_process_group(2, 0):
        found = {name: second_step(mode, token_ids())[:2] for name, mode in MODES.items()}
        pairs = second_step(False, token_ids(), pairs=True)[0]
    plain, one, other = (count for count, _ in found.values())
    figures: Figures = {}
    for name, (count, total) in found.items():
        figures |= {f"{name}: all-gathers a step": count, f"{name}: peak of a rank of two": total}
    figures["checkpoints over two layers: all-gathers a step"] = pairs
    return Finding(
        own=(
            about("all-gathers, checkpointed / not", 1.0, one / plain, "times", within=0),
            about("with use_reentrant=True", 1.0, other / plain, "times", within=0),
        ),
        says="""
            holds: Neither mode gathers more.
            fails: A layer is gathered more often under checkpoints.
            why: Backward gathers a layer and frees it after its gradients. The second forward
                runs in between, when the weights are there. A checkpoint over two layers gathers no
                more, either.
            """,
        figures=figures,
    )
