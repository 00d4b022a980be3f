"""Who owns a storage: a parameter, a gradient, a buffer, or an optimizer. And the steps of
optimizers, at which states appear.
"""

import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from .. import names
from ..compat import operators
from ..compat.modules import is_hook_of
from ..compat.tensors import plain_tensors, storage_key
from .operations import OperationMeter
from .recording import Recording
from .storages import storages_of, tensors_held


class ParameterMeter(OperationMeter):
    """Also knows the model's parameters and buffers, and the optimizers.

    Args:
        model: its parameters, gradients and buffers.
        optimizers: their states. Other optimizers are found when they step.
        recording, after_sample: as in ``OperationMeter``.
    """

    def __init__(
        self,
        model: nn.Module | None,
        optimizers: Iterable[Optimizer],
        recording: Recording,
        after_sample: Callable[[int, object], None] | None,
    ):
        super().__init__(recording, after_sample)
        self.model = model
        # weak, since the program may drop them
        self.optimizers = weakref.WeakKeyDictionary(dict.fromkeys(optimizers))
        self.stepped = weakref.WeakSet[Optimizer]()  # those that have stepped inside the block
        self.exit_stack = ExitStack()  # what is undone at the end of the block
        self._names: dict[int, str] = {}  # of parameters, by their address
        # Handles of our hooks, by the parameter's address. A weak reference to the parameter would
        # do as well, but torch.utils.swap_tensors refuses a tensor that has one.
        self._hooked: dict[int, RemovableHandle] = {}
        # of the optimizer step that runs: its first sample, and shapes of parameters without state
        self._step_began_at, self._without_state = 0, set[tuple[int, ...]]()

    def on_moved(self, name: str, device: torch.device) -> None:
        """A parameter is on another device than the one that is counted."""
        raise RuntimeError(
            f"the model moved while it was tracked: the tracker counts {self.recording.device}, "
            f"and {name} is on {device}. Move the model first, then start a new MemoryTracker"
        )

    def sync(self, states: bool = True) -> None:
        """Update the categories of parameters, gradients, buffers and new states, any of which may
        have been replaced.
        """
        recording = self.recording
        with plain_tensors():
            before = recording.total
            recording.drain()
            if self.model is not None:
                self._sync_model(self.model)
            if states:
                for optimizer in self.optimizers:
                    self._tag_states(optimizer)
            if recording.total != before:
                self.sample()

    def _sync_model(self, model: nn.Module) -> None:
        recording = self.recording
        parameters, computed = dict[str, nn.Parameter](), set[str]()
        for name, parameter in model.named_parameters():
            if parameter.is_leaf:
                parameters[name] = parameter
            else:  # in a call of functional_call, it stands in the place of a parameter
                computed.add(name)
        for name, parameter in parameters.items():
            if parameter.device.type != recording.device.type:
                self.on_moved(name, parameter.device)
        weights = {*self._names.values()} - computed
        for entry in recording.live.values():
            if entry.category == names.PARAMETERS and entry.module in weights:
                entry.category = names.OTHER  # set back below if it is still a parameter
        # Buffers first: the storage of a buffer that is a view of a parameter belongs to the
        # parameter.
        for name, buffer in model.named_buffers():
            recording.tag(buffer, names.OTHER, name)
        for name, parameter in parameters.items():
            self._sync_parameter(name, parameter)

    def _sync_parameter(self, name: str, parameter: nn.Parameter) -> None:
        self._names[id(parameter)] = name
        self._tag_now(parameter)
        # bitsandbytes' 4-bit weights have scales, and these may have scales too
        state = vars(parameter).get("quant_state")
        while state is not None:
            self.recording.tag(vars(state), names.PARAMETERS, name)
            state = state.state2
        self._watch_gradient(parameter)

    def _watch_gradient(self, parameter: nn.Parameter) -> None:
        """Tag the gradient of ``parameter`` whenever it has been accumulated."""
        known = self._hooked.get(id(parameter))
        if known is not None and is_hook_of(known, parameter):
            return
        if parameter.requires_grad and not is_lazy(parameter):
            hook = parameter.register_post_accumulate_grad_hook(self._tag_parameter)
            self._hooked[id(parameter)] = hook
            self.exit_stack.callback(hook.remove)

    def _tag_parameter(self, parameter: torch.Tensor) -> None:
        with self.lock, plain_tensors():
            self._tag_now(parameter)

    def _tag_now(self, parameter: torch.Tensor) -> None:
        """Count a parameter and its gradients under their categories."""
        recording, name = self.recording, self._names.get(id(parameter), "parameter")
        recording.tag(parameter, names.PARAMETERS, name)
        if parameter.grad is not None:
            recording.tag(parameter.grad, names.GRADIENTS, name)

    def before_step(self, optimizer: Optimizer, args, kwargs) -> tuple[tuple, dict]:
        recording = self.recording
        with self.lock:
            if optimizer not in self.optimizers:  # its states existed before the block
                self.optimizers[optimizer] = None
                recording.drain()
                known = set(recording.live)
                self._tag_states(optimizer)
                self.backdate([e for key, e in recording.live.items() if key not in known])
                self.sample(recording.total, "the states of an optimizer that was not given")
            self.position.stepping.append(optimizer)
            self._step_began_at = recording.count
            self._without_state = set()
            self._tag_parameters(optimizer)
            self._tag_states(optimizer)
            self.sample()
        named = {name: self._wrap_closure(value) for name, value in kwargs.items()}
        return tuple(map(self._wrap_closure, args)), named

    def after_step(self, optimizer: Optimizer, args, kwargs) -> None:
        with self.lock:
            self.stepped.add(optimizer)
            self._tag_states(optimizer)
            self._note_update(optimizer)
            self.position.end_step()

    def _tag_parameters(self, optimizer: Optimizer) -> None:
        """Count the optimizer's parameters, and note the shapes of those without a state."""
        with plain_tensors():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    self._tag_now(parameter)
                    if parameter not in optimizer.state:
                        self._without_state.add(tuple(parameter.shape))

    def _tag_states(self, optimizer: Optimizer) -> None:
        """Count all that the optimizer keeps under "optimizer": its states, also those inside
        objects, and the tensors in attributes of its own.
        """
        self.recording.drain()
        for parameter, state in optimizer.state.items():
            if isinstance(state, dict) and all(map(self._is_state, state.values())):
                continue  # as in all steps but the first
            name = self._names.get(id(parameter), "parameter")
            for tensor in tensors_held(state):
                self._tag_state(tensor, name)
        for attribute, value in vars(optimizer).items():
            if attribute not in ("state", "param_groups", "defaults"):
                for tensor in tensors_held(value):
                    self._tag_state(tensor, f"{type(optimizer).__name__}.{attribute}")

    def _is_state(self, value: Any) -> bool:
        """Whether it is a plain tensor that counts as an optimizer's already."""
        if type(value) is not torch.Tensor:
            return False
        entry = self.recording.entry_of(value)
        return entry is not None and entry.category == names.OPTIMIZER

    def _note_update(self, optimizer: Optimizer) -> None:
        """Note that the optimizer's weights and states are in use in this step: those of an earlier
        round's model are not.
        """
        in_use: list[Any] = []
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                in_use.append(parameter)
                state = optimizer.state.get(parameter)
                if isinstance(state, dict):
                    in_use += state.values()
        with plain_tensors():
            for tensor in in_use:
                if not isinstance(tensor, torch.Tensor):
                    continue
                entry = self.recording.entry_of(tensor)
                if entry is not None:
                    entry.updated = self.recording.step

    def _tag_state(self, tensor: torch.Tensor, name: str) -> None:
        """Count a tensor of an optimizer. Weights and gradients in it stay what they are."""
        recording = self.recording
        for storage in storages_of(tensor):
            entry = recording.live.get(storage_key(storage))
            taken = entry is not None and entry.category in (names.PARAMETERS, names.GRADIENTS)
            if not taken:
                recording.tag_storage(storage, names.OPTIMIZER, name, tensor)

    def tag_states_being_made(self) -> None:
        """In an optimizer's first step: count as states what it has made for a parameter that had
        none, though ``.state`` has it only when all of it is there.

        A step that is refused halfway would show these as temporaries.
        """
        if not self.position.stepping:
            return
        for entry in self.recording.live.values():
            made = getattr(entry.op, "overloadpacket", None) in operators.factories
            for_a_parameter = tuple(entry.shape) in self._without_state
            in_this_step = entry.sample >= self._step_began_at
            is_temporary = entry.category == names.TEMPORARIES
            if made and for_a_parameter and in_this_step and is_temporary:
                entry.category = names.OPTIMIZER

    def _wrap_closure(self, value: Any) -> Any:
        """Wrap a closure that a step calls (LBFGS), so that its operations get their own phases.

        The step continues after the closure.
        """
        if not callable(value):
            return value

        position = self.position

        @wraps(value)
        def closure(*args, **kwargs):
            stepping, position.stepping = position.stepping, []
            try:
                return value(*args, **kwargs)
            finally:
                position.stepping = stepping

        return closure
