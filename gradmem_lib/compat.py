"""Every private or internal name of torch and transformers that the library touches, each under a
public name of ours.

All of them were seen in torch 2.13.0 and transformers 5.23.0. They are also in 2.11.0 and 5.17.0,
except where a comment says otherwise. When a new version moves a name, change this file.
tests/repository/test_compat.py fails for a private name in any other file. transformers is imported
only inside the functions that need it.
"""

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from importlib import import_module
from operator import attrgetter
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._C import _functorch
from torch._subclasses import fake_tensor
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import (
    _disable_current_modes,
    _get_current_dispatch_mode,
    is_traceable_wrapper_subclass,
)

from .hf_names import CHECKPOINTING_METHODS

tree_flatten, tree_leaves, tree_map, tree_map_only = (
    _pytree.tree_flatten,
    _pytree.tree_leaves,
    _pytree.tree_map,
    _pytree.tree_map_only,
)
FakeTensor, FakeTensorMode = fake_tensor.FakeTensor, fake_tensor.FakeTensorMode


def fast_fake_tensor(inside: Tensor, device: torch.device, attributes: dict[str, Any]) -> Any:
    """Like ``FakeTensor(mode, inside, device)``, but faster.

    ``attributes``: those of an earlier fake tensor.
    """
    options: dict[str, Any] = {"dispatch_device": True, "device_for_backend_keys": device}
    fake = Tensor._make_subclass(FakeTensor, inside, False, **options)
    torch._C._set_throw_on_mutable_data_ptr(fake)
    vars(fake).update(attributes)
    return fake


# What FakeTensorMode raises when an operation needs a fake tensor's values, or a size that is not
# known.
NO_VALUES = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedOperatorException,
)

# Storages and operators.

# The address of a storage's C++ object. Every Python wrapper of a storage has the same one. A new
# storage may reuse a freed one.
storage_key: Callable[[Any], int] = attrgetter("_cdata")
# How often a tensor, or its base if it is a view, has been changed in place.
version: Callable[[Tensor], int] = attrgetter("_version")
# An operator's arguments and results, with what each aliases.
schema: Callable[[Any], Any] = attrgetter("_schema")
# the attribute with the function that an operator calls; a higher-order operator has none
KERNEL = "_op"


def returns(func) -> list:
    """The results in an operator's schema.

    A higher-order operator (torch.cond) has no schema: for it, the list is empty.
    """
    return getattr(getattr(func, "_schema", None), "returns", [])


def arguments_of(func) -> list:
    """The arguments in an operator's schema; empty for a higher-order operator."""
    return getattr(getattr(func, "_schema", None), "arguments", [])


def writes_first_argument(func) -> bool:
    """Whether an operator writes into its first argument, keeps its size, and returns it."""
    arguments = arguments_of(func)
    results = returns(func)
    if not arguments or not results or getattr(func, "overloadpacket", None) in _resizing:
        return False
    written, returned = arguments[0].alias_info, results[0].alias_info
    if written is None or returned is None or not written.is_write:
        return False
    return written.before_set == returned.before_set


_aten = torch.ops.aten
join = _aten.cat.default
# With a Python number in the second place, autograd keeps the number as a tensor of 8 bytes.
multiply, divide = _aten.mul.Tensor, _aten.div.Tensor
# Operations that give a tensor another size or another storage.
_resizing = frozenset(
    {_aten.resize_, _aten.resize_as_, _aten.set_, _aten.resize_as_sparse_, _aten._resize_output_}
)
# Autograd calls this operation on a fake tensor about ten times for each real operation.
read_device = torch.ops.prim.device.default
lift_fresh = torch.ops.aten.lift_fresh.default
# Operations that make a tensor from nothing: states begin with them.
factories = frozenset(
    getattr(torch.ops.aten, name)
    for name in ("empty", "empty_like", "full", "full_like", "new_zeros", "ones_like", "zeros")
) | {torch.ops.aten.zeros_like}
# They take some rows, columns or blocks of a tensor.
parts_of_a_tensor = frozenset(
    {
        _aten.index.Tensor,
        _aten.index_select.default,
        _aten.gather.default,
        _aten.select.int,
        _aten.slice.Tensor,
        _aten.split.Tensor,
        _aten.unbind.int,
    }
)


@cache
def reads_only_a_shape(func: Any) -> bool:
    """Whether an operation, such as ``aten.randn_like``, takes no number of its input."""
    name = str(func).removeprefix("aten.").partition(".")[0]
    return name.endswith("_like") or name.startswith("new_")


# The copy of a storage begins with this: a tensor of bytes takes the storage as its own.
take_storage = torch.ops.aten.set_.source_Storage
add_tensors = torch.ops.aten.add.Tensor
# the operation behind .item(), int() and bool() of a tensor
read_value = _aten._local_scalar_dense.default
# These mark the begin and the end of a stretch of code for the profiler. Each optimizer's step has
# them.
_profiler = torch.ops.profiler
profiler_marks = {
    _profiler._record_function_enter_new.default,
    _profiler._record_function_exit._RecordFunction,
}
flash_attention = _aten._scaled_dot_product_flash_attention
flash_attention_backward = _aten._scaled_dot_product_flash_attention_backward
efficient_attention = _aten._scaled_dot_product_efficient_attention
math_attention = _aten._scaled_dot_product_attention_math
grouped_mm = _aten._grouped_mm.default
set_storage = {_aten.set_.source_Storage, _aten.set_.source_Storage_storage_offset}
lstm_layer = _aten.mkldnn_rnn_layer.default
# Products: no other tensor is among their arguments.
products = [
    getattr(_aten, name).default for name in ("mm", "bmm", "addmm", "baddbmm", "mv", "convolution")
]
# Of their arguments, those with numbers that are not whole have one dtype; others are indices.
ops_of_one_dtype = [
    getattr(_aten, name).default
    for name in (
        "index_put",
        "index_put_",
        "index_add",
        "index_add_",
        "_cdist_forward",
        "huber_loss_backward",
    )
]
try:
    _one = torch.ones(1, dtype=torch.float32, device="cpu")
    _aten.mse_loss_backward.default(_one, _one, _one.bfloat16(), 1)
except RuntimeError:  # torch 2.11
    ops_of_one_dtype.append(_aten.mse_loss_backward.default)
embedding_bag = _aten._embedding_bag.default
# Operators of recurrent layers on a card, which allocate a workspace of their own.
recurrent = frozenset(
    getattr(_aten, name).default
    for name in ("_cudnn_rnn", "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell")
) | {lstm_layer}


def lstm_workspace(seq: int, batch: int, inputs: int, hidden: int) -> int:
    """The bytes of what the CPU's LSTM kernel returns for backward, for one layer and one direction
    in float32.
    """
    gates, state = 4 * hidden, (1, batch, hidden)
    shapes = [
        (seq, batch, inputs),
        (gates, inputs),
        (gates, hidden),
        (gates,),
        (gates,),
        state,
        state,
    ]
    tensors = [torch.zeros(shape, dtype=torch.float32, device="cpu") for shape in shapes]
    lstm, layers, biases, training = 2, 1, True, True
    out = lstm_layer(*tensors, False, [], lstm, hidden, layers, biases, False, False, training)
    return out[3].untyped_storage().nbytes()


# The number of dispatch modes that are active in this thread.
num_active_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
# The dispatch mode of this thread that sees operations first.
innermost_mode: Callable[[], Any] = _get_current_dispatch_mode
# While this context is open, no dispatch mode (a tracker, fake tensors) sees the operations.
without_modes = _disable_current_modes


def sparse_parts(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Indices and values of a COO tensor. The public methods work only after ``coalesce()``."""
    return tensor._indices(), tensor._values()


def inner_tensors(tensor: Tensor) -> list[Tensor] | None:
    """The local tensors inside a wrapper subclass (DTensor, torchao's).

    ``None`` if ``tensor`` is not a wrapper.
    """
    if not is_traceable_wrapper_subclass(tensor):
        return None
    names, _ = tensor.__tensor_flatten__()
    return [getattr(tensor, name) for name in names]


def inside_transform(tensor: Tensor) -> Tensor | None:
    """The innermost tensor that ``torch.func`` transforms have wrapped in ``tensor``.

    ``None`` if no transform has.
    """
    if not _functorch.is_functorch_wrapped_tensor(tensor):
        return None
    while _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor


def is_view(tensor: Tensor) -> bool:
    """Whether autograd knows ``tensor`` as a view."""
    return tensor._is_view()


def base_of(tensor: Tensor) -> Tensor:
    """What ``tensor`` is a view of, or itself."""
    return tensor if tensor._base is None else tensor._base


# Autograd's graph: the task that runs (-1: no backward), the node that runs, and the number that
# the next node gets.
graph_task: Callable[[], int] = torch._C._current_graph_task_id
current_node: Callable[[], Any] = torch._C._current_autograd_node
next_sequence_nr: Callable[[], int] = torch.autograd._get_sequence_nr


def sequence_nr(node) -> int:
    """A node's position in the order in which nodes were created.

    ``2**64 - 1`` for ``None`` and for nodes without a number.
    """
    return 2**64 - 1 if node is None else node._sequence_nr()


def gives_one_tensor_twice(node) -> bool:
    """Whether two of a node's gradients belong to the same tensor, as in ``x * x``."""
    targets = [target for target in node.next_functions if target[0] is not None]
    return len(set(targets)) < len(targets)


# What a dispatch mode sees of a gradient that nothing but autograd's buffer holds: the buffer, the
# call and Python's tensor refer to it, and it and Python's storage refer to its storage.
_HELD_BY_BUFFER, _STORAGE_HELD_ONCE = 4, 2


def would_be_added_in_place(gradient: Tensor) -> bool:
    """Whether autograd, without a dispatch mode, would write a sum of gradients into ``gradient``.

    It does so if nobody else refers to the gradient. To be asked about the first argument of the
    addition, by a dispatch mode, while the addition runs. Seen in torch 2.13:
    ``torch/csrc/autograd/input_buffer.cpp``, ``can_accumulate_inplace``.
    """
    plain = type(gradient) in (Tensor, FakeTensor)
    if not plain or gradient._use_count() != _HELD_BY_BUFFER:
        return False
    references = torch._C._storage_Use_Count(gradient.untyped_storage()._cdata)
    dense = torch.ops.aten.is_non_overlapping_and_dense.default(gradient)
    return references == _STORAGE_HELD_ONCE and dense


# What autograd's own formulas write into a tensor that they have just made, and put into a new one
# while a dispatch mode is active: those of ``gather``, ``take``, ``cummax``, ``max`` along a
# dimension, ``index_select``, ``masked_select`` and ``x[mask]``. Seen in torch 2.13:
# ``torch/csrc/autograd/FunctionsManual.cpp``, at ``areAnyTensorSubclassLike``.
written_in_place_by_formulas = frozenset(
    {
        torch.ops.aten.scatter_add.default,
        torch.ops.aten.scatter.src,
        torch.ops.aten.index_put.default,
        torch.ops.aten.index_add.default,
        torch.ops.aten.masked_scatter.default,
        torch.ops.aten.put.default,
    }
)


def runs_a_formula(node) -> bool:
    """Whether ``node`` has one of autograd's own formulas, and no Python code of a
    ``torch.autograd.Function``.
    """
    return node is not None and not isinstance(node, torch.autograd.function.FunctionCtx)


# Tensors that speak for others, such as those of per-sample gradients, answer even a question for
# their storage through their own function. In this context they answer as plain tensors.
plain_tensors: Callable[[], Any] = torch._C.DisableTorchFunctionSubclass


class WithoutDynamoGuard:
    """A mixin for dispatch modes without Dynamo's guard against compilation.

    The guard takes longer than a fake operation.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


# Modules.


def hook_counts(thing: nn.Module | Tensor) -> tuple[int, ...]:
    """The numbers of hooks of a module or a tensor, by kind.

    A module has hooks before and after forward, and in backward. A tensor has hooks before and
    after ``.grad`` is set.
    """
    kinds = (
        "_forward_pre_hooks",
        "_forward_hooks",
        "_backward_hooks",
        "_post_accumulate_grad_hooks",
    )
    return tuple(len(getattr(thing, kind, None) or ()) for kind in kinds)


def is_hook_of(handle: Any, parameter: Tensor) -> bool:
    """Whether the hook of ``handle`` runs after the ``.grad`` of ``parameter`` is set.

    ``torch.utils.swap_tensors`` gives a tensor's hooks to another one.
    """
    hooks = parameter._post_accumulate_grad_hooks
    return hooks is not None and handle.id in hooks and handle.hooks_dict_ref() is hooks


def own_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and buffers of ``module`` itself, by name.

    A tensor that has two names is listed twice.
    """
    return [
        (n, t) for n, t in [*module._parameters.items(), *module._buffers.items()] if t is not None
    ]


def saved_by_checkpoint() -> bool:
    """In a saved-tensors hook: whether a checkpoint saves its arguments.

    It shows in the file of the caller, two calls out.
    """
    frame: Any = sys._getframe(3)
    # older torch saves by a Function
    while frame.f_code.co_filename == torch.autograd.function.__file__:
        frame = frame.f_back
    return frame.f_code.co_filename == torch.utils.checkpoint.__file__


def is_persistent(module: nn.Module, name: str) -> bool:
    """Whether the parameter or buffer ``name`` of ``module`` itself is part of its
    ``state_dict``.
    """
    return name not in module._non_persistent_buffers_set


def runs_eagerly() -> bool:
    """Whether the program has switched compilation off, so that compiled functions run as written:
    ``torch.compiler.set_stance("force_eager")``, or ``TORCH_COMPILE_DISABLE=1``.
    """
    eval_frame: Any = sys.modules.get("torch._dynamo.eval_frame")
    if eval_frame is None:
        return os.environ.get("TORCH_COMPILE_DISABLE") == "1"
    return eval_frame.config.disable or eval_frame._stance.stance == "force_eager"


def is_compiled(module: nn.Module) -> bool:
    """Whether ``torch.compile(module)`` or ``module.compile()`` has compiled it."""
    if runs_eagerly():
        return False
    compiled = getattr(module, "_compiled_call_impl", None) is not None
    return compiled or type(module).__name__ == "OptimizedModule"


INSIDE_OF_COND = "cond.<locals>._cond_op_wrapper"  # the function that torch.cond compiles


@contextmanager
def watch_compiled_calls(notify: Callable[[str], None], *, run_eagerly: bool) -> Iterator[None]:
    """While the block runs, a call of a compiled function calls ``notify(its name)``.

    ``run_eagerly``: it then runs uncompiled. Otherwise ``notify`` has to raise an error.

    A compiled function asks ``torch._dynamo.eval_frame._callback_from_stance`` at each call what to
    do. What ``torch.cond`` compiles may run uncompiled under ``no_grad``. With gradients, the
    tensors that its branches close over would get none.
    """
    undo, compiler = ExitStack(), torch.compile

    def install() -> None:
        eval_frame: Any = import_module("torch._dynamo.eval_frame")
        before = eval_frame._callback_from_stance
        switched_off = runs_eagerly()  # by the program itself
        if run_eagerly and not switched_off:
            undo.enter_context(torch.compiler.set_stance("force_eager"))

        def callback_from_stance(callback):
            if run_eagerly:
                skipped = switched_off
            else:
                skipped = runs_eagerly()
            if callback is None or callback is False or skipped:
                return before(callback)
            name = getattr(sys._getframe(1).f_locals.get("fn"), "__qualname__", "a function")
            if name != INSIDE_OF_COND or torch.is_grad_enabled():
                notify(name)
            return None

        eval_frame._callback_from_stance = callback_from_stance
        undo.callback(setattr, eval_frame, "_callback_from_stance", before)

    def compile_first(*args, **kwargs):
        torch.compile = compiler
        install()
        return compiler(*args, **kwargs)

    if "torch._dynamo.eval_frame" in sys.modules:
        install()
    else:  # the import takes seconds, and nothing can be compiled before it
        torch.compile = compile_first
        undo.callback(setattr, torch, "compile", compiler)
    with undo:
        yield


def call_override(module: nn.Module) -> Callable | None:
    """The function that ``override_call`` has set for ``module``, or ``None``."""
    return module.__dict__.get("_call_impl")


def checkpoints_reentrant(module: nn.Module) -> bool:
    """Whether transformers' checkpoints on this layer run reentrant."""
    function = getattr(module, "_gradient_checkpointing_func", None)
    return bool(getattr(function, "keywords", {}).get("use_reentrant"))


def override_call(module: nn.Module, call: Callable) -> Callable[[], None]:
    """Make ``module(...)`` run ``call(...)`` in place of hooks and forward.

    Returns a function that undoes this.
    """
    module._call_impl = call
    return lambda: module.__dict__.pop("_call_impl", None)


def original_call(module: nn.Module) -> Callable:
    """The module's own call (hooks and forward), even after ``override_call``.

    It pickles like the module's own method.
    """
    return type(module)._call_impl.__get__(module)


# transformers.


def attention_of(model_or_config) -> str | None:
    """The name of the attention that a transformers model uses; ``None`` for a model without that
    choice.
    """
    config = getattr(model_or_config, "config", model_or_config)
    return getattr(config, "_attn_implementation", None)


def checkpointing_name(of: Any) -> str | None:
    """The name of checkpointing in a model's (or its class's) methods: transformers 5.23 renamed
    it. ``None``: it has none.
    """
    for name in CHECKPOINTING_METHODS:
        if hasattr(of, f"{name}_enable"):
            return name
    return None


def takes_fused_attention(model: nn.Module) -> bool:
    return bool(getattr(model, "_supports_sdpa", True))


@contextmanager
def attention_by_values(masked: bool = False, packed: bool = False) -> Iterator[str]:
    """While the block runs, transformers knows a fused attention by this name, which works the same
    under fake tensors.

    With real tensors, transformers checks whether any token is masked and whether several sequences
    are packed in a row. It builds no mask if neither is so. Fake tensors have no values to check,
    so it would build a mask: sequence x sequence bytes that no real run has. ``masked`` and
    ``packed`` answer in their place. A window shorter than the sequence needs a mask anyway.
    """
    from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    name, find_packed = "gradmem_fused", masking_utils.find_packed_sequence_indices

    def mask(*args, attention_mask=None, **kwargs):
        return masking_utils.sdpa_mask(
            *args, attention_mask=attention_mask if masked else None, **kwargs
        )

    def are_packed(position_ids):
        found = find_packed(position_ids)  # called in any case: its search takes memory too
        return found if packed else None

    def left_out(padding_mask, kv_length, local_attention_size=None):
        if padding_mask is not None:
            padding_mask.all()  # for the same reason
            if masked:
                return False
        return local_attention_size is None or kv_length < local_attention_size

    with ExitStack() as undo:
        for table, function in (
            (AttentionInterface, sdpa_attention_forward),
            (AttentionMaskInterface, mask),
        ):
            table.register(name, function)
            undo.callback(table._global_mapping.pop, name, None)  # there is no public way
        undo.enter_context(patch.object(masking_utils, "find_packed_sequence_indices", are_packed))
        undo.enter_context(patch.object(masking_utils, "_ignore_bidirectional_mask_sdpa", left_out))
        yield name


# peft.


def inside_peft(model: nn.Module) -> nn.Module:
    """The transformers model inside a ``peft`` model; else ``model`` itself.

    Raises ``ValueError`` for prompt learning.
    """
    kinds = type(model).__mro__  # all classes, since fully_shard gives the model a new class
    if not any(kind.__module__.startswith("peft.") for kind in kinds):
        return model
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        raise ValueError(
            f"{type(model).__name__} trains a prompt, whose tokens come before those of each row "
            "and are not in the labels that a step counts: give adapters inside the layers "
            "(LoraConfig, IA3Config, ...), or train with Trainer itself"
        )
    return model.get_base_model()


# DistributedDataParallel and FSDP.


def ddp_is_done(model: nn.Module) -> bool:
    """Whether the last backward of a ``DistributedDataParallel`` has sent all gradients. DDP's next
    forward makes the same call, and raises the same error. The first time, the call also rebuilds
    the buckets, so it is left out if no gradient is missing.
    """
    missing = any(p.requires_grad and p.grad is None for p in model.parameters())
    if not (missing or model._has_rebuilt_buckets):
        return True
    try:
        model.reducer._rebuild_buckets()
    except RuntimeError as error:
        if "finished reduction" not in str(error):
            raise
        return False
    return True


def fsdp1_groups(model: nn.Module) -> list:
    """The process groups over which a ``FullyShardedDataParallel`` averages gradients
    (torch 2.13).
    """
    across_nodes = getattr(model, "_inter_node_pg", None)  # of HYBRID_SHARD
    return [model.process_group] + ([] if across_nodes is None else [across_nodes])


def fsdp2_groups(parts: Iterable[nn.Module]) -> tuple[list, set]:
    """The process groups over which ``fully_shard`` averages, and the divisors of its parts.

    Seen in torch 2.13.
    """
    found, divisors = {}, set()
    for part in parts:
        state = part._get_fsdp_state()
        one = getattr(state, "_fsdp_param_group", None)  # before torch 2.13 there was at most one
        for group in getattr(state, "_fsdp_param_groups", [one] if one else []):
            divisors.add(group.gradient_divide_factor)
            for name in ("shard_process_group", "replicate_process_group"):
                if (process_group := getattr(group.mesh_info, name, None)) is not None:
                    found[name] = process_group
    return list(found.values()), divisors or {None}


@contextmanager
def allow_integer_shards() -> Iterator[None]:
    """While the block runs, ``fully_shard`` accepts integer weights (4-bit codes).

    Torch 2.13 accepts them without this.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    def parameter(data: Tensor, requires_grad: bool | None = None) -> nn.Parameter:
        return nn.Parameter(
            data, data.is_floating_point() if requires_grad is None else requires_grad
        )

    with patch.object(_fsdp_param, "nn", SimpleNamespace(**vars(nn) | {"Parameter": parameter})):
        yield


# Ranks.

_c10d = torch.ops.c10d
all_reduce, all_gather = _c10d.allreduce_.default, _c10d._allgather_base_.default
collectives = (
    all_reduce,
    all_gather,
    _c10d._reduce_scatter_base_.default,
    _c10d.broadcast_.default,
)


def run_collective_synchronously(func: Callable, *args: Any, **kwargs: Any) -> Any:
    """Run the collective ``func``, and return its result when gloo has released the tensors.

    One of gloo's threads holds them for some time after the wait, so the live bytes would differ
    from run to run.
    """
    tensors = [t for t in tree_leaves(args) if isinstance(t, Tensor)]
    if any(type(t) is FakeTensor or t.device.type != "cpu" for t in tensors):
        return func(*args, **kwargs)
    use_counts = [t._use_count() for t in tensors]
    torch._C._distributed_c10d.Work.unbox(func(*args, **kwargs)[1]).wait()
    end = time.monotonic() + 1
    while (
        any(t._use_count() > n for t, n in zip(tensors, use_counts, strict=True))
        and time.monotonic() < end
    ):
        time.sleep(1e-5)
    results, work = finished_all_reduce(tree_leaves(args[0]))
    return results if isinstance(args[0], list) else results[0], work


def finished_all_reduce(tensors: Iterable[Tensor]) -> tuple[list[Tensor], Any]:
    """The result of a finished ``all_reduce``.

    It is the tensors, and a work object whose future holds them.
    """
    future: torch.futures.Future = torch.futures.Future()
    future.set_result(list(tensors))
    return list(tensors), torch._C._distributed_c10d._create_work_from_future(future).boxed()


class _Reducer(torch.distributed.Reducer):
    """DDP's reducer without a new order of its buckets, which DDP finds by reading tensors.

    Their sizes stay the same.
    """

    def _rebuild_buckets(self) -> bool:
        return False


@contextmanager
def fake_process_group(ranks: int, rank: int) -> Iterator[Any]:
    """A fake process group of ``ranks`` ranks of which only this one, ``rank``, exists.

    Yields its mesh. An existing process group is restored at the end.
    """
    from torch.distributed.tensor._sharding_prop import ShardingPropagator
    from torch.testing._internal.distributed.fake_pg import FakeStore

    c10d = torch.distributed.distributed_c10d
    outer = c10d._world
    names = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "tags_to_pg", "pg_to_tag")
    tables = [(getattr(outer, name), dict(getattr(outer, name))) for name in names]
    count, hook = outer.group_count, sys.excepthook
    with ExitStack() as undo:
        undo.enter_context(patch.object(c10d, "_world", c10d._World()))
        for table, _ in tables:
            table.clear()
        try:
            torch.distributed.init_process_group(
                "fake", store=FakeStore(), rank=rank, world_size=ranks
            )
            # Torch 2.11 computes shapes under the caller's fake mode, where these tensors would be
            # seen and counted.
            shapes = "_propagate_tensor_meta_non_cached"
            unwatched = without_modes()(getattr(ShardingPropagator, shapes))
            undo.enter_context(patch.object(ShardingPropagator, shapes, unwatched))
            undo.enter_context(patch.object(torch.distributed, "Reducer", _Reducer))
            undo.enter_context(patch("torch.distributed._verify_params_across_processes"))
            undo.enter_context(patch("torch.nn.parallel.distributed._sync_module_states"))
            yield torch.distributed.init_device_mesh("cpu", (ranks,))
        finally:
            for name in list(outer.pg_names.values()):
                c10d._unregister_process_group(name)
            for table, saved in tables:
                table.clear()
                table.update(saved)
            outer.group_count, sys.excepthook = count, hook
            c10d._update_default_pg(outer.default_pg)


def prepared_inputs(trainer: Any, batch: Any) -> Any:
    """``batch`` as ``trainer``'s ``compute_loss`` gets it: on its device, and as a subclass makes
    it. transformers 5.
    """
    return trainer._prepare_inputs(batch)
