"""One row for each optimizer: all that the library knows of it.

To add an optimizer, write its class in ``techniques/optimizers.py`` and its row here. Recipes,
training, plans, closed forms and the command line read the row, and have no list of their own.
The place of a row counts too: a plan prefers the earlier of two optimizers that are equally fast.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from .rows import Rows

BLOCK = 256  # numbers of an 8-bit state that share one float32 scale
# For torch's Adafactor, relative to a weight's size: T5's fine-tuning rate (Raffel et al. 2020);
# the default is for pretraining.
RELATIVE_RATE = 1e-3
# Adafactor's eps. By default, the first one is the machine epsilon of the weights' dtype: 0.0078 in
# bf16, which is above nearly every gradient, so that none would be normalized. The square of 1e-16
# is still a positive number in bf16.
ADAFACTOR_EPS = (1e-16, 1e-3)


@dataclass(frozen=True)
class ClosedForm:
    """What the formulas of ``accounting`` need besides the bytes of the states.

    ``counters``: each tensor has a counter of steps. ``whole_model``, ``tensors``: temporaries of a
    step in the dtype of the states, counted in copies of the model or of its largest tensor.
    """

    counters: bool = False
    whole_model: int = 0
    tensors: int = 0


class Bytes(NamedTuple):
    """Bytes for each number: so many times the bytes of a weight, and ``own`` besides."""

    weights: float = 0
    own: float = 0

    def at(self, width: float) -> float:
        """``width``: the bytes of a weight."""
        return self.weights * width + self.own


@dataclass(frozen=True)
class OptimizerSpec:
    """All that is known of an optimizer. The defaults refuse: what a row does not say, the library
    does not do with it.

    Attributes:
        words: what it is, in a few words.
        made_by: the class, with the module that has it: of ``torch.optim``, of
            ``transformers.optimization``, or of this library's techniques
            (``"techniques.optimizers.AdamW8bit"``); or the class itself. It takes parameters and
            ``lr=``.
        settings: what else the class takes. Variants are always explicit, since torch would choose
            them by device.
        learning_rate: where the usual one would be wrong.
        state_bytes: of all states, for each number that has states.
        factored: only the rows and columns of a matrix have states, not each of its numbers.
        step_traffic: what a step reads and writes for each number, besides the weight (read and
            written) and its gradient (read).
        closed_form: ``None`` if it has none: ``accounting`` refuses it then.
        takes_momentum: ``Recipe(momentum=...)`` is for it: one more state in the weights' dtype.
        master: the class, as in ``made_by``, that keeps float32 copies of weights in 16 bits.
            ``None``: it is refused with such a precision, and ``no_master`` says why where "it is
            no AdamW" is not the reason.
        steps_shards: it can step a part of a weight by itself, so that weights may be cut over the
            ranks.
        rounds_by_chance: it rounds weights in 16 bits by chance. So no precision may keep exact
            ones, and not every rank may round its own copy.
        planned: ``plan`` tries it.
        trainer_name: what ``TrainingArguments(optim=...)`` calls it. ``None``: it has no name for
            it.
        trainer_package: what ``Trainer`` needs for its own class of that name.
        adam_settings: it takes Adam's ``betas`` and ``eps``.
    """

    words: str
    made_by: str | Callable[..., Any]
    state_bytes: Bytes
    step_traffic: Bytes
    settings: Mapping[str, Any] = field(default_factory=dict)
    learning_rate: float | None = None
    factored: bool = False
    closed_form: ClosedForm | None = None
    takes_momentum: bool = False
    master: str | None = None
    no_master: str | None = None
    steps_shards: bool = False
    rounds_by_chance: bool = False
    planned: bool = False
    trainer_name: str | None = None
    trainer_package: str | None = None
    adam_settings: bool = False

    def __post_init__(self) -> None:
        fraction = self.state_bytes.at(4) % 1
        if self.closed_form is not None and (self.factored or fraction):
            raise ValueError(
                f"{self.made_by} has a closed_form, and accounting multiplies whole bytes of "
                "states by all numbers of a model: leave closed_form out, so that predict() counts"
            )

    def bytes_of_states(self, width: float, momentum: float = 0.0) -> float:
        """Bytes of all states of a number that has states. ``width``: the bytes of a weight."""
        nbytes = self.state_bytes.at(width)
        if momentum:
            nbytes += width  # the running sum of gradients
        return nbytes

    def bytes_of_a_step(self, width: float, momentum: float = 0.0) -> float:
        """Bytes that a step reads and writes for each number, besides weight and gradient."""
        nbytes = self.step_traffic.at(width)
        if momentum:
            nbytes += 2 * width  # the running sum is read and written
        return nbytes

    def numbers_with_states(self, shape: Sequence[int]) -> int:
        """How many numbers of a tensor of ``shape`` have states."""
        if not self.factored or len(shape) < 2:
            return math.prod(shape)
        *matrices, rows, columns = shape
        return (rows + columns) * math.prod(matrices)


# Temporaries of Adam's denominator: "foreach" (the default of torch.optim.AdamW on CUDA) makes one
# for all parameters at once, and the plain loop makes two for one tensor at a time.
_ADAMW = OptimizerSpec(
    words="AdamW, one parameter after another",
    made_by="torch.optim.AdamW",
    settings={"foreach": False, "fused": False},
    state_bytes=Bytes(2),
    step_traffic=Bytes(4),  # both moments are read and written
    closed_form=ClosedForm(counters=True, tensors=2),
    master="techniques.precision.MasterAdamW",
    steps_shards=True,
    trainer_name="adamw_torch",
    adam_settings=True,
)


class _Optimizers(Rows):
    """A class has a row too, made from its arguments. How many bytes its states take is not in it:
    a prediction traces a step, and plans choose among the named optimizers only.
    """

    def __missing__(self, value: Any) -> Any:
        if hasattr(value, "param_groups"):
            raise ValueError(
                "prepare makes the optimizer: give the class, or functools.partial of it with its "
                f"settings, as optimizer={type(value).__name__}"
            )
        made = getattr(value, "func", value)  # of a partial
        if not isinstance(made, type) or not hasattr(made, "add_param_group"):
            return super().__missing__(value)
        given = set(getattr(value, "keywords", ()))
        if {"lr", "weight_decay"} & given:
            raise ValueError(
                "give lr and weight_decay to prepare or make_trainer, and not to functools.partial"
            )
        settings = {}
        if "foreach" in _names_of_arguments(made) - given:
            settings["foreach"] = False  # as in every row: torch would choose it by device
        return OptimizerSpec(
            made.__name__,
            value,
            Bytes(),
            Bytes(),
            settings,
            no_master=f"no float32 masters are kept for the class {made.__name__}: choose "
            "optimizer='adamw', or another precision",
        )


def _names_of_arguments(made: type) -> set[str]:
    """The arguments of a class, also those that it hands on to the classes it is made from."""
    names = set[str]()
    for one in made.__mro__:
        parameters = inspect.signature(one.__init__).parameters  # type: ignore[misc]
        names |= set(parameters)
        if not any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
            break
    return names


OPTIMIZERS: dict[Any, OptimizerSpec] = _Optimizers(
    "optimizer",
    OptimizerSpec,
    {
        "adamw": _ADAMW,
        "adamw-foreach": replace(
            _ADAMW,
            words="AdamW on all parameters at once, with a temporary copy of the model",
            settings={"foreach": True, "fused": False},
            closed_form=ClosedForm(counters=True, whole_model=1),
        ),
        "adamw-fused": replace(
            _ADAMW,
            words="AdamW in one kernel, in place",
            settings={"foreach": False, "fused": True},
            closed_form=ClosedForm(counters=True),
            planned=True,
            trainer_name="adamw_torch_fused",
        ),
        "adamw-8bit": OptimizerSpec(
            words="AdamW with one byte for each number of its states",
            made_by="techniques.optimizers.AdamW8bit",
            state_bytes=Bytes(own=2 + 2 * 4 / BLOCK),
            step_traffic=Bytes(own=4),
            no_master=(
                "8-bit states and a float32 copy of the weights pull in opposite directions: "
                "choose optimizer='adamw' with float32-master, or precision='bf16' with adamw-8bit"
            ),
            planned=True,
            trainer_name="adamw_bnb_8bit",
            trainer_package="bitsandbytes",
            adam_settings=True,
        ),
        "adamw-stochastic": OptimizerSpec(
            words=(
                "AdamW on bf16 weights and states, computed in float32 and rounded "
                "stochastically: no update is lost on average"
            ),
            made_by="techniques.precision.StochasticAdamW",
            state_bytes=_ADAMW.state_bytes,
            step_traffic=_ADAMW.step_traffic,
            rounds_by_chance=True,
            adam_settings=True,
        ),
        # Not planned: it needs more bytes than torch's Adafactor, and no less time.
        "adafactor": OptimizerSpec(
            words=(
                "row and column sums in place of the second moment, by transformers: with float32 "
                "copies of a tensor"
            ),
            made_by="transformers.optimization.Adafactor",
            # those of transformers' Trainer
            settings={"scale_parameter": False, "relative_step": False},
            state_bytes=Bytes(own=4),
            factored=True,
            # a dozen operations on float32 copies of a tensor read or write it 17 times
            step_traffic=Bytes(own=17 * 4),
            trainer_name="adafactor",
        ),
        "adafactor-torch": OptimizerSpec(
            words=(
                "the same by torch.optim: with one copy of a tensor, in its own dtype, and "
                "a relative learning rate"
            ),
            made_by="torch.optim.Adafactor",
            settings={"eps": ADAFACTOR_EPS, "foreach": False},
            learning_rate=RELATIVE_RATE,
            state_bytes=Bytes(1),
            factored=True,
            step_traffic=Bytes(14),  # its operations read or write the tensor 14 times
            planned=True,
        ),
        "sgd": OptimizerSpec(
            words="no state; one state with momentum",
            made_by="torch.optim.SGD",
            settings={"foreach": False},
            state_bytes=Bytes(),
            step_traffic=Bytes(),
            closed_form=ClosedForm(),
            takes_momentum=True,
            steps_shards=True,
            trainer_name="sgd",
        ),
    },
)
