"""Private names of torch and transformers stand in the package ``compat`` alone, and each does
there what its comment says.
"""

import ast
import importlib
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import transformers
from support.families import tiny_config
from support.operations import Operations
from torch import nn

import gradmem_lib
from gradmem_lib.compat.collectives import finished_all_reduce, run_collective_synchronously
from gradmem_lib.compat.data_parallel import ddp_is_done
from gradmem_lib.compat.modules import call_override, original_call, override_call
from gradmem_lib.compat.tensors import inside_transform
from gradmem_lib.compat.transformers_models import (
    attention_by_values,
    attention_of,
    checkpoints_reentrant,
    takes_fused_attention,
)
from gradmem_lib.course.machine import compat as machine_compat

HOME = Path(gradmem_lib.__file__).parent
FILES = {path.relative_to(HOME).as_posix(): path for path in sorted(HOME.rglob("*.py"))}
THEIRS = ("torch", "transformers", "accelerate", "peft")
# Ends of longer names. Of Python and Jupyter: a named tuple's fields, a process's end, where its
# threads are, a picture in every form, a widget's code and looks.
PUBLIC = {
    "_label",  # ends of the names of inputs, as is the next one
    "_labels",
    "_window",
    "_kwargs",
    "_MAPPING",
    "_asdict",
    "_replace",
    "_exit",
    "_current_frames",
    "_repr_mimebundle_",
    "_esm",
    "_css",
    "_",
}


# Where private names of others may stand: in the package "compat", and in the course's file.
OURS = {file for file in FILES if file.startswith("compat/")} | {"course/machine/compat.py"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def tree(path: Path) -> ast.AST:
    return ast.parse(path.read_text(encoding="utf-8"))


def defined(nodes) -> set[str]:
    """The private names that the library gives: to functions, classes, variables, and its own
    objects' attributes.
    """
    found = set()
    for node in nodes:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and ast.unparse(node) in (
            f"self.{node.attr}",
            f"cls.{node.attr}",
        ):
            found.add(node.attr)
    return {name for name in found if is_private(name)}


OWN = defined(node for path in FILES.values() for node in ast.walk(tree(path)))


def is_private_string(value) -> bool:
    """For getattr, patch or a comparison."""
    return (
        isinstance(value, str)
        and value.isidentifier()
        and is_private(value)
        and value not in OWN | PUBLIC
    )


def private_names(path: Path):
    """(line, what) of the private names of other libraries that ruff's SLF001 and PLC2701 do not
    see: those in strings, and in ``import torch._dynamo``.
    """
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                parts = alias.name.split(".")
                if parts[0] in THEIRS and any(is_private(part) for part in parts):
                    yield node.lineno, alias.name
        elif isinstance(node, ast.Constant) and is_private_string(node.value):
            yield node.lineno, repr(node.value)


def test_a_private_name_of_another_library_is_used_in_compat_alone():
    found = []
    for file in sorted({*FILES} - OURS):
        for line, what in private_names(FILES[file]):
            found.append(f"{file}:{line} uses {what}")
    assert not found, "\n".join(found)


def classes_of(file: str) -> list[type]:
    parts = ["gradmem_lib", *file.removesuffix(".py").split("/")]
    if parts[-1] == "__init__":
        # which would run the root's file again, under another name
        parts.pop()
    module = importlib.import_module(".".join(parts))
    return [
        thing
        for thing in vars(module).values()
        if isinstance(thing, type) and thing.__module__ == module.__name__
    ]


def test_no_class_overrides_a_private_method_of_another_library():
    found = []
    for file in sorted({*FILES} - OURS - {"__main__.py", "course/ledger/__main__.py"}):
        for cls in classes_of(file):
            for base in cls.__mro__:
                if base.__module__.split(".")[0] in THEIRS:
                    names = OWN & vars(cls).keys() & vars(base).keys()
                    found += [f"{file}: {cls.__name__}.{name}" for name in sorted(names)]
    assert not found, "\n".join(found)


def test_names_that_have_a_default_are_still_those_of_transformers():
    """A name that transformers has changed would be read as its default, without an error."""
    config = tiny_config("llama")
    model = machine_compat.model_from_config(
        transformers.LlamaForCausalLM, config, attn_implementation="eager"
    )
    assert attention_of(model) == "eager"
    assert takes_fused_attention(model)
    assert not takes_fused_attention(transformers.PreTrainedModel)
    for reentrant in (True, False):
        machine_compat.enable_checkpointing(model, {"use_reentrant": reentrant})
        assert checkpoints_reentrant(model.model.layers[0]) == reentrant


def test_what_a_transform_wraps_is_found():
    seen = []

    def function(x):
        seen.append(inside_transform(x))
        return (x * x).sum()

    rows = torch.randn(3, 4)
    torch.func.vmap(torch.func.grad(function))(rows)
    assert seen[0].shape == (3, 4) and seen[0].data_ptr() == rows.data_ptr()
    assert inside_transform(rows) is None


def test_a_call_is_replaced_and_given_back():
    layer = nn.Linear(2, 2)
    x = torch.ones(1, 2)
    undo = override_call(layer, lambda x: "replaced")
    assert layer(x) == "replaced" and torch.equal(original_call(layer)(x), layer.forward(x))
    undo()
    undo()
    assert call_override(layer) is None and torch.equal(layer(x), layer.forward(x))


def test_a_registered_attention_is_gone_afterwards_also_after_an_error():
    from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

    own = masking_utils.find_packed_sequence_indices
    with pytest.raises(RuntimeError), attention_by_values() as name:
        assert name in list(AttentionInterface()) and name in list(AttentionMaskInterface())
        assert masking_utils.find_packed_sequence_indices is not own
        raise RuntimeError
    assert name not in list(AttentionInterface()) and name not in list(AttentionMaskInterface())
    assert masking_utils.find_packed_sequence_indices is own


HIDDEN = torch.arange(16).view(2, 8) < 12
POSITIONS = torch.arange(8)[None]
# What a batch has, how ours is told of it, and the calls of each question.
MASKS = [
    ({}, [None, torch.ones(2, 8, dtype=torch.bool)], POSITIONS),
    ({"masked": True, "packed": True}, [None, HIDDEN], POSITIONS % 5),
]


@pytest.mark.parametrize(("told", "masks", "positions"), MASKS)
def test_transformers_own_questions_are_answered_as_they_would_be(told, masks, positions):
    """Also where fake tensors cannot answer; whoever looks reads the mask once."""
    from transformers import masking_utils

    def asked(question, *given):
        with Operations() as ran:
            found = question(*given)
        return found, torch.ops.aten.all.default in [func for func, *_ in ran.seen]

    questions = ("_ignore_bidirectional_mask_sdpa", "find_packed_sequence_indices")
    padding, packed = (getattr(masking_utils, name) for name in questions)
    with attention_by_values(**told):
        our_padding, our_packed = (getattr(masking_utils, name) for name in questions)
    for mask in masks:
        for window in (None, 7, 8, 9):
            assert asked(our_padding, mask, 8, window) == asked(padding, mask, 8, window)
    if told:
        assert torch.equal(our_packed(positions), packed(positions))
    else:
        assert our_packed(positions) is None
        assert asked(our_packed, positions)[1] and asked(packed, positions)[1]


def test_a_collective_is_over_when_nobody_else_holds_its_tensors():
    holders = []

    def collective(tensors):
        # whose graph holds what it was made from
        holders.append(tensors[0].requires_grad_().square())
        threading.Timer(0.05, holders.clear).start()
        return finished_all_reduce(tensors)

    given = [torch.ones(3)]
    found, work = run_collective_synchronously(collective, given)
    assert not holders and found[0] is given[0]
    torch._C._distributed_c10d.Work.unbox(work).wait()

    def of_one_tensor(out, given):
        return finished_all_reduce([out])

    one, _ = run_collective_synchronously(of_one_tensor, given[0], torch.ones(2))
    assert one is given[0]


class Replicated(nn.Module):
    """What ``ddp_is_done`` reads of a DistributedDataParallel."""

    def __init__(self, missing: bool, rebuilt: bool, says: str | None):
        super().__init__()
        self.weight, self.frozen = (
            nn.Parameter(torch.ones(1)),
            nn.Parameter(torch.ones(1), requires_grad=False),
        )
        self.weight.grad = None if missing else torch.ones(1)
        self._has_rebuilt_buckets, self.reducer, self.says, self.asked = rebuilt, self, says, False

    def _rebuild_buckets(self):
        self.asked = True
        if self.says:
            raise RuntimeError(self.says)


UNFINISHED = "Expected to have finished reduction in the prior iteration before starting a new one."


@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize("rebuilt", [False, True])
def test_whether_gradients_have_travelled_is_asked_of_ddp(missing, rebuilt):
    for says in (None, UNFINISHED):
        model = Replicated(missing, rebuilt, says)
        assert ddp_is_done(model) is (says is None or not (missing or rebuilt))
        assert model.asked is (missing or rebuilt)
    if missing or rebuilt:
        with pytest.raises(RuntimeError, match="another"):
            ddp_is_done(Replicated(missing, rebuilt, "another"))


def test_the_first_compilation_of_a_process_may_be_inside_a_tracker():
    """The compiler is not even imported then; a fresh process has none."""
    lines = (
        "import sys, torch\n"
        "from gradmem_lib import MemoryTracker\n"
        "own = torch.compile\n"
        "assert 'torch._dynamo.eval_frame' not in sys.modules\n"
        "try:\n"
        "    with MemoryTracker(live=False):\n"
        "        torch.compile(abs)(torch.ones(2))\n"
        "except RuntimeError as error:\n"
        "    assert 'compiled with torch.compile' in str(error) and torch.compile is own\n"
        "    print('refused')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", lines], capture_output=True, text=True, check=False
    )
    assert done.stdout == "refused\n", done.stderr
