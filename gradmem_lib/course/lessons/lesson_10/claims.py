"""Lesson 10's answers: a 70B on two cards, and what FSDP gathers under checkpoints."""

import torch

from ....compat.fake_ranks import fake_process_group
from ....planning.cards import CARDS
from ....techniques.sharding import shard
from ...ledger import Finding, answers
from ...ledger.finding import about, each, fits
from ...machine.compat import enable_checkpointing
from ..shared.claim_runs import checkpointed, silent, tiny, token_ids, tracked_step
from ..shared.seen import OperationLog
from .exercises import seventy_peak, two_cards

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
        own=fits("70B in 4 bits, 1 x 1,024 a card", "to fit 24 GB", card, peaks[1024]),
        beyond=fits("1 x 2,048", "to fit 24 GB", card, peaks[2048]),
        says="""
            holds: Rows of 1,024 tokens fit, with a checkpoint in every layer. Rows of 2,048 do
                not, with CUDA's context and NCCL's buffers.
            fails: A card's shard, the layers that it gathers and the activations do not fit on
                it.
            why: A card keeps half of the base, and half of embeddings and head in bf16. It
                gathers the layers one after another; embeddings and head are gathered once and
                stay whole. Only the adapters have gradients and states. The inputs of the layers
                and the loss grow with the tokens.
            needs: two cards of 24 GB to see it run; one rank's bytes are predicted
            """,
        figures=each("peak, {:,} tokens", peaks) | {"a card has (as the driver says)": card},
    )


def second_step(reentrant: bool | None, ids: torch.Tensor, every: int | None = None):
    """All-gathers and peak in bytes of a rank's second step with a Llama under FSDP, and the model
    with its gradients.

    ``reentrant``: the kind of checkpoint on every layer, ``None`` for none; ``every``: a checkpoint
    around so many layers instead.
    """
    model = tiny()
    with silent():
        if reentrant is not None:
            enable_checkpointing(model, {"use_reentrant": reentrant})
        shard(model, "fsdp")
        with checkpointed(model, every):
            tracked_step(model, ids)
            model.zero_grad()
            with OperationLog() as calls:
                peak = tracked_step(model, ids).peak.total
    return calls.collectives("allgather"), peak, model


@answers("C49")
def gathers() -> Finding:
    counts, peaks = {}, {}
    with fake_process_group(2, 0):
        for name, mode in MODES.items():
            counts[name], peaks[name], _ = second_step(mode, token_ids())
        pairs, _, _ = second_step(None, token_ids(), every=2)
    plain, one, other = counts.values()
    counts["checkpoints over two layers"] = pairs
    return Finding(
        own=(
            about("all-gathers, checkpointed / not", "1×", one / plain, within=0),
            about("with use_reentrant=True", "1×", other / plain, within=0),
        ),
        says="""
            holds: A step gathers no more than without checkpoints.
            fails: A layer is gathered more often under checkpoints.
            why: Backward gathers a layer and frees it after its gradients. The second forward
                runs in between, when the weights are there. A checkpoint over two layers does not
                gather more, either.
            """,
        figures=each("{}: all-gathers a step", counts) | each("{}: peak of a rank of two", peaks),
    )
