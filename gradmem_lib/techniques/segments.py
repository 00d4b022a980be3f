"""Layers in a row, and a segment of them in one checkpoint: what lesson 04 builds.

Without its checks, a segment of k layers is this loop, which ``Chain.run`` holds:

    for layer in layers[start : start + k]:
        x = layer(x)

``Chain.run_checkpointed`` puts the loop into ``torch.utils.checkpoint.checkpoint``, which keeps the
input ``x`` and runs the loop again in backward; ``second_run`` puts back what it has to find.
Which layers make a segment is a schedule from ``schedules``; who calls these functions stands in
``checkpointing``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from torch import nn

from ..compat.modules import original_call
from .layer_arguments import join_input, same_arguments
from .second_run import checkpoint_again, version_of

IN_PLACE = (
    "layer {} changes its input in place, and a checkpoint that begins there would compute it "
    "again from the changed input: set inplace=False in it, or begin the segment at an earlier "
    "layer"
)


@dataclass(eq=False)
class Chain:
    """Layers that run in order, each with the output of the one before and the same other
    arguments.
    """

    layers: list[nn.Module]
    passes_tuple_through: bool  # the next layer gets a tuple as it is, not only its first element

    def run_checkpointed(self, start: int, stop: int, x: Any, rest: tuple) -> Any:
        """The output of the layers from ``start`` to before ``stop``, with input ``x``.

        Only ``x`` is kept for backward, which runs the segment again. ``rest``: the other arguments
        of each layer, as ``split_input`` returns them.

        Raises ``RuntimeError`` if the segment changes ``x`` in place.
        """
        before = version_of(x)
        run = partial(self.run, start, stop, rest=rest)
        out = checkpoint_again(self.layers[start:stop], run, x, given=rest)
        if version_of(x) != before:
            raise RuntimeError(IN_PLACE.format(start))
        return out

    def run(self, start: int, stop: int, x: Any, rest: tuple) -> Any:
        """The same output without a checkpoint."""
        out = self.call_layer(start, x, rest)
        for i in range(start + 1, stop):
            if self.has_extra_outputs(out):
                raise RuntimeError(
                    "the layers return more than their hidden state, which is all that a segment "
                    "hands on: checkpoint them one by one (every=1), or leave output_attentions "
                    "off"
                )
            out = self.call_layer(i, self.hidden(out), rest)
        return out

    def call_layer(self, i: int, x: Any, rest: tuple) -> Any:
        """The output of layer ``i`` by its own call, not by the one that ``checkpointing`` puts in
        its place.
        """
        args, kwargs = join_input(x, rest)
        return original_call(self.layers[i])(*args, **kwargs)

    def hidden(self, out: Any) -> Any:
        """The part of a layer's output that the next layer gets."""
        if isinstance(out, tuple) and not self.passes_tuple_through:
            return out[0]
        return out

    def has_extra_outputs(self, out: Any) -> bool:
        """Whether the next layer would not get all of a layer's output."""
        if not isinstance(out, tuple) or self.passes_tuple_through:
            return False
        return any(part is not None for part in out[1:])


class Handover(NamedTuple):
    """What a layer, or a whole segment, has handed on to the next layer."""

    next_layer: int
    out: Any  # the output
    rest: tuple  # the other arguments
    version: int  # of the output's hidden state
    of_segment: Any = None  # the output once more, which the segment's last layer returns

    def problem(self, chain: Chain, i: int, x: Any, rest: tuple) -> str | None:
        """Why a call of layer ``i`` with input ``x`` does not continue here; None if it does."""
        if self.next_layer != i:
            return "was called out of order"
        if chain.has_extra_outputs(self.out) or x is not chain.hidden(self.out):
            return f"was given something else than the output of layer {i - 1}"
        if version_of(x) != self.version:
            return f"was given the output of layer {i - 1}, changed in place"
        if not same_arguments(rest, self.rest):
            return f"was called with other arguments (masks, positions, ...) than layer {i - 1}"
        return None


# Of a call that continues no other.
NOTHING = Handover(next_layer=-1, out=None, rest=(), version=0)
