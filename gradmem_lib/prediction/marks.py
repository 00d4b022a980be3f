"""Marks: the layer that each event of a step belongs to."""

from bisect import bisect
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from ..compat import operators
from ..compat.autograd import current_node, in_backward, next_sequence_nr, sequence_nr
from ..compat.tensors import storage_key

# (number of the list, number of the unit in it); a unit is one layer, or a segment of layers
Place = tuple[int, int]
NOWHERE: Place = (-1, -1)
CHUNKS = (
    -2
)  # the number of a list that is no list of layers: the chunks of a loss, one after another


class Marks:
    """Says at any moment of a step in which layer it is.

    - Forward, and a recomputed forward: the innermost running module that is part of a layer.
    - Backward: the layer whose forward made the running node of autograd's graph. A node that adds
      to a ``.grad`` belongs to the layer of that parameter.
    - A loss in chunks: the chunk.
    - Elsewhere, as in the optimizer's step: the layer of the parameter, gradient or state that was
      touched last.

    Args:
        model: the model that will run, as ``prepare`` returns it.
        lists: the lists of layers, each with its number of layers in a unit.
    """

    def __init__(self, model: nn.Module, lists: Iterable[tuple[Sequence[nn.Module], int]]):
        self._by_module: dict[int, Place] = {}
        self._by_parameter: dict[int, Place] = {}
        # Autograd numbers its nodes. From number _numbers[i] on, they belong to _places[i].
        self._numbers: list[int] = []
        self._places: list[Place] = []
        self._touched = NOWHERE
        self._chunk = NOWHERE
        for number, (layers, unit) in enumerate(lists):
            for i, layer in enumerate(layers):
                self._add_layer(layer, (number, i // unit))
        self._by_name = {
            name: self._by_parameter.get(id(parameter), NOWHERE)
            for name, parameter in model.named_parameters()
        }

    def _add_layer(self, layer: nn.Module, place: Place) -> None:
        for module in layer.modules():
            if self._by_module.setdefault(id(module), place) != place:
                self._by_module[id(module)] = NOWHERE  # layers share it
        for parameter in layer.parameters():
            self._by_parameter[id(parameter)] = place
        # The first hook before forward and the last one after it: FSDP has hooks in between.
        layer.register_forward_pre_hook(partial(self._number_nodes, place), prepend=True)
        layer.register_forward_hook(partial(self._number_nodes, NOWHERE))

    def _number_nodes(self, place: Place, *hook_args: Any) -> None:
        """Note that nodes belong to ``place`` from now on, unless backward recomputes the layer."""
        if not in_backward():
            self._numbers.append(next_sequence_nr())
            self._places.append(place)

    def begin_part(self) -> None:
        """Forget which parameter was touched last: another part of the step begins."""
        self._touched = NOWHERE

    def begin_chunk(self, number: int) -> None:
        """Chunk ``number`` of a loss begins."""
        self._chunk = CHUNKS, number

    def end_chunks(self) -> None:
        self._chunk = NOWHERE

    def touch(self, func: Any, args: tuple, live: dict[int, Any]) -> None:
        """Note which parameter the operation ``func`` on ``args`` belongs to.

        ``live``: the recording's entries, which have the name of the parameter that each storage
        belongs to.
        """
        if func in operators.profiler_marks:  # the begin or the end of a step or of zero_grad
            self._touched = NOWHERE
        for value in args:
            if isinstance(value, (list, tuple)) and value and isinstance(value[0], Tensor):
                self._touched = NOWHERE  # an operation on all parameters at once
                return
            if isinstance(value, Tensor):
                entry = live.get(storage_key(value.untyped_storage()))
                name = None if entry is None else entry.module
                if isinstance(name, str) and name in self._by_name:
                    self._touched = self._by_name[name]
                    return

    def place_of_name(self, name: object) -> Place:
        """The layer of the parameter with this name."""
        return self._by_name.get(name, NOWHERE) if isinstance(name, str) else NOWHERE

    def place(self, running: list[nn.Module]) -> Place:
        """The layer in which the step is now. ``running``: the modules that are being called."""
        for module in reversed(running):
            place = self._by_module.get(id(module), NOWHERE)
            if place != NOWHERE:
                return place
        if self._chunk != NOWHERE:
            return self._chunk
        if not in_backward():
            return self._touched
        node = current_node()
        variable = getattr(node, "variable", None)  # of a node that adds to a parameter's .grad
        if variable is not None:
            return self._by_parameter.get(id(variable), NOWHERE)
        index = bisect(self._numbers, sequence_nr(node)) - 1
        return self._places[index] if index >= 0 else NOWHERE
