"""The models of a script, found while it runs: the outermost modules that it calls.

A script has one model or several (a GAN's two, a teacher and a student, a diffusion model's three).
Which of them are in training is known from the optimizers that step.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.optim import Optimizer

from ..measure.recording import Recording
from ..model.structure import NO_MODEL, Structure


@dataclass(eq=False)
class FoundModel:
    """An outermost module that was called.

    ``name``: its class, with a number if there are several of it. ``with_grad``: it was called
    while gradients were recorded, and it has a parameter that needs one. ``trained``: an optimizer
    has one of its parameters. ``compared``: the number of parameters of each optimizer that was
    asked for that. ``is_left``: it is what is left of a module that is gone.
    """

    module: weakref.ref[nn.Module]
    name: str
    with_grad: bool = False
    trained: bool = False
    is_left: bool = False
    compared: weakref.WeakKeyDictionary[Optimizer, int] = field(
        default_factory=weakref.WeakKeyDictionary
    )

    def __post_init__(self) -> None:
        self._parts = []
        for name, part in self.module().named_children():
            self._parts.append((f"{self.name}.{name}", weakref.ref(part)))

    def alive(self) -> list[FoundModel]:
        """This model, or what is left of it: the slice ``net[:2]`` of a network is a module that is
        gone after its call, and its layers stay with the network.
        """
        if self.module() is not None:
            return [self]
        left = []
        for name, part in self._parts:
            if part() is not None and next(part().parameters(), None) is not None:
                left.append(FoundModel(part, name, self.with_grad, self.trained, is_left=True))
        return left


@dataclass
class Knowledge:
    """What a diagnosis needs of the models that were there together, from sample ``since`` on.

    ``untrained``: the names of the parameters of those that are not in training.
    """

    since: int
    structure: Structure = NO_MODEL
    untrained: frozenset[str] = frozenset()


class FoundModels:
    """The models of a script so far. A tracker reads them as if they were one module.

    It holds weak references, since the script may drop its models. What a diagnosis needs of a
    model is kept when the model is gone (a script's ``main`` has returned). Its ``named_...``
    methods give what is in training; a name begins with the model's class (``GPT.blocks.0``).
    """

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.found: list[FoundModel] = []
        # of the models at the peak, and of those that are there now
        self._known = [Knowledge(since=0)]
        # every module of a found model, by name; so that a second look at a module is quick
        self._names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._of_a_class = Counter[str]()

    def add(self, module: nn.Module, with_grad: bool) -> bool:
        """The script calls ``module`` outermost. Returns whether that changes what is known."""
        self._leave_the_gone()
        found = self._found_as(module)
        if found is None:
            if module in self._names or next(module.parameters(), None) is None:
                return False  # a part of a model that is known, or a loss
            if self._is_of_what_is_left(module):
                return False  # the same slice of a network once more
            found = self._new(module)
        elif found.with_grad or not with_grad:
            return False
        found.with_grad = with_grad and any(p.requires_grad for p in module.parameters())
        self.keep()
        return True

    def note_step(self, optimizer: Optimizer) -> bool:
        """An optimizer steps, or is found. Returns whether that changes what is known."""
        self._leave_the_gone()
        # a group of parameters may have been added since an optimizer was compared
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        waiting = [
            model
            for model in self.found
            if not model.trained and model.compared.get(optimizer) != count
        ]
        if not waiting:
            return False
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        changed = False
        for model in waiting:
            model.compared[optimizer] = count
            module = model.module()
            if module is not None and any(id(p) in stepped for p in module.parameters()):
                model.trained = changed = True
        if changed:
            self.keep()
        return changed

    def keep(self) -> None:
        """Keep what is known of the models, for the time when they are gone."""
        self._leave_the_gone()
        now = self._known[-1]
        now.structure = Structure.of(self)
        now.untrained = frozenset(name for name, _ in self.other_parameters())

    def _leave_the_gone(self) -> None:
        if all(model.module() is not None for model in self.found):
            return
        self._known = [self._stored_knowledge_at_peak(), Knowledge(since=self.recording.count)]
        self.found = [left for model in self.found for left in model.alive()]

    def _is_of_what_is_left(self, module: nn.Module) -> bool:
        left = [model.module() for model in self.found if model.is_left]
        known = {id(p) for part in left if part is not None for p in part.parameters()}
        return bool(known) and all(id(p) in known for p in module.parameters())

    def knowledge_at_peak(self) -> Knowledge:
        """What is known of the models that were there at the run's peak."""
        all_alive = all(model.module() is not None for model in self.found)
        if self.found and all_alive:
            self.keep()  # freezing, LoRA and checkpoints may have come later
        return self._stored_knowledge_at_peak()

    def _stored_knowledge_at_peak(self) -> Knowledge:
        peak = self.recording.run_peak.sample
        before = [known for known in self._known if known.since <= peak]
        return before[-1] if before else self._known[0]

    def name_of(self, module: nn.Module) -> str | None:
        return self._names.get(module)

    # As one module

    def modules(self) -> Iterator[nn.Module]:
        for _, module in self.named_modules():
            yield module

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        for name, model in self._tracked():
            yield from model.named_modules(prefix=name)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for name, model in self._tracked():
            yield from model.named_parameters(prefix=name)

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        for name, model in self._tracked():
            yield from model.named_buffers(prefix=name)

    def other_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Name and parameter of the models that are not in training.

        A parameter that they share with a model in training is that model's.
        """
        in_training = {id(parameter) for _, parameter in self.named_parameters()}
        for found in self.found:
            model = found.module()
            if model is None:
                continue
            for name, parameter in model.named_parameters(prefix=found.name):
                if id(parameter) not in in_training:
                    yield name, parameter

    def _tracked(self) -> Iterator[tuple[str, nn.Module]]:
        """Name and module of those in training.

        1. Those that an optimizer has stepped.
        2. If there is none: those whose forward records gradients. No optimizer has stepped yet, it
           has copies of its own in place of parameters, or the script trains by hand.
        3. Without any gradient: all models.
        """
        chosen = [model for model in self.found if model.trained]
        if not chosen:
            chosen = [model for model in self.found if model.with_grad]
        for found in chosen or self.found:
            model = found.module()
            if model is not None:
                yield found.name, model

    def _found_as(self, module: nn.Module) -> FoundModel | None:
        for model in self.found:
            if model.module() is module:
                return model
        return None

    def _new(self, module: nn.Module) -> FoundModel:
        """A new model. Those that are inside of it (it may be a wrapper) are no models any more."""
        inside = set(map(id, module.modules()))
        outside = []
        trained = False
        for model in self.found:
            if id(model.module()) in inside:
                trained = trained or model.trained
            else:
                outside.append(model)
        kind = type(module).__name__
        self._of_a_class[kind] += 1
        number = self._of_a_class[kind]
        name = kind if number == 1 else f"{kind} {number}"
        new = FoundModel(weakref.ref(module), name, trained=trained)
        self.found = [*outside, new]
        for inner, part in module.named_modules(prefix=name):
            self._names[part] = inner
        return new
