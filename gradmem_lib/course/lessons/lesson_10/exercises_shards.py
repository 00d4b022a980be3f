"""Lesson 10's exercises about weights that are cut: a layer that gathers its own, and PyTorch's
engine around a model.
"""

from __future__ import annotations

import functools
import re

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from ....compat.dispatch_modes import TorchDispatchMode
from ....compat.fake_ranks import fake_process_group
from ....measure.tracker import MemoryTracker
from ...judge.compare import Measured, difference
from ...judge.exercise import Exercise, HiddenCase, Mistake, Seen
from ...machine.compat import enable_checkpointing
from ...material import models
from ..shared.gradient_weights import factor_between
from ..shared.settings import flat, quietly
from .thread_ranks import APART, on_ranks

SHARD_CARD = (
    # bytes: a rank's quarter of six matrices of 262,144, its gradients, and a few whole matrices
    1_700_000
)
SIDE, LAYERS = 256, 6
WRAP_CARD = 2_550_000  # bytes, of a forward and a backward on a rank of two


def gather(shard) -> Tensor:
    """The shards of all ranks (rows, columns), one below the other: (ranks * rows, columns)."""
    whole = shard.new_empty(dist.get_world_size() * len(shard), *shard.shape[1:])
    dist.all_gather(list(whole.chunk(dist.get_world_size())), shard.contiguous())
    return whole


def own_mean(whole) -> Tensor:
    """This rank's rows of the mean of ``whole`` over the ranks: (ranks * rows, columns) to (rows,
    columns).
    """
    parts = list(whole.chunk(dist.get_world_size()))
    own = torch.empty_like(parts[0])
    dist.reduce_scatter(own, parts)
    return own / dist.get_world_size()


def _gathered(
    *, again=True, reduce=own_mean, back=lambda d_out, weight: d_out @ weight, x_too=True
):
    """The function of a sharded layer; the switches make it wrong."""

    class Gathered(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, shard):
            weight = gather(shard)
            ctx.save_for_backward(x, shard if again else weight)
            return x @ weight.T

        @staticmethod
        def backward(ctx, d_out):
            x, kept = ctx.saved_tensors
            d_x = back(d_out, gather(kept) if again else kept)
            return d_x if x_too else None, reduce(d_out.flatten(0, -2).T @ x.flatten(0, -2))

    return Gathered


_Gathered = _gathered()


class ShardedLinear(nn.Module):
    """This rank's rows of ``linear``'s weight (outputs, inputs), which has no bias: whole in
    forward and backward alone.
    """

    def __init__(self, linear):
        super().__init__()
        weight = linear.weight.detach()
        self.shard = nn.Parameter(weight.chunk(dist.get_world_size())[dist.get_rank()].clone())

    def forward(self, x):
        return _Gathered.apply(x, self.shard)


def _layer(*, keep=lambda part, weight: part.clone(), run=None, **wrong):
    """A wrong ``ShardedLinear``."""
    function = _gathered(**wrong)

    def init(self, linear):
        nn.Module.__init__(self)
        weight = linear.weight.detach()
        self.shard = nn.Parameter(
            keep(weight.chunk(dist.get_world_size())[dist.get_rank()], weight)
        )

    return type(
        "ShardedLinear",
        (nn.Module,),
        {"__init__": init, "forward": run or (lambda self, x: function.apply(x, self.shard))},
    )


def _plain_gather(self, x):
    return F.linear(x, gather(self.shard))


def _once(self, x):
    if not hasattr(self, "whole"):
        self.whole = gather(self.shard.detach())
    return _Gathered.apply(x, self.shard) + 0 * (x @ self.whole.T)


def _all_reduced(whole):
    whole = whole.clone()
    dist.all_reduce(whole)
    return whole.chunk(dist.get_world_size())[dist.get_rank()] / dist.get_world_size()


class CollectiveLog(TorchDispatchMode):
    """Names of the collective calls that are made."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "c10d" in str(func):
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))

    def count(self, word: str) -> int:
        return sum(word in name.replace("_", "") for name in self.names)


def _shard_of(layer: nn.Module) -> list[nn.Parameter]:
    return [p for p in layer.parameters() if p.requires_grad]


def _rows(candidate, linear: nn.Linear, x: Tensor) -> dict:
    """Two updates of a layer on one rank."""
    layer, x = candidate(linear), x.clone().requires_grad_()
    held = [*layer.parameters(), *layer.buffers()]
    found: dict = {
        "numbers held": sum(t.numel() for t in held),
        "numbers in their storages": sum(
            t.untyped_storage().nbytes() // t.element_size() for t in held
        ),
    }
    for step in ("first", "second"):
        out = layer(x)
        out.square().mean().backward()
        found[f"{step} output"], found[f"{step} x.grad"] = out.detach(), x.grad
        found[f"{step} gradient"] = flat(p.grad for p in _shard_of(layer))
        with torch.no_grad():
            for p in _shard_of(layer):
                if p.grad is not None:
                    p -= 0.5 * p.grad
                p.grad = None
        x.grad = None
    return found


def _chain(candidate) -> tuple[nn.Sequential, Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        layers = [candidate(nn.Linear(SIDE, SIDE, bias=False)) for _ in range(LAYERS)]
        return nn.Sequential(*layers), torch.randn(4, SIDE)


def _observe_layer(candidate):
    found: dict = {}
    for name, ranks, inside, outside in (
        ("2 ranks", 2, 3, 4),
        ("3 ranks, x of (2, 3, 5)", 3, 5, 6),
        (HiddenCase("another shape"), 2, 4, 10),
    ):
        generator = torch.Generator().manual_seed(ranks + outside)
        linears = [
            nn.Linear(inside, outside, bias=False, dtype=torch.float64) for _ in range(ranks)
        ]
        weight = torch.randn(outside, inside, generator=generator, dtype=torch.float64)
        for linear in linears:
            linear.weight.data = weight.clone()
        x = torch.randn(
            ranks,
            *((2, 3) if ranks == 3 else (4,)),
            inside,
            generator=generator,
            dtype=torch.float64,
        )
        seen = on_ranks(
            lambda rank, own=(linears, x): _rows(candidate, own[0][rank], own[1][rank]), ranks
        )
        found[name] = {
            f"{part} on rank {rank}": seen[rank][part]
            for rank in (0, ranks - 1)
            for part in seen[rank]
        }
    # The layers are made inside the tracker, so that it counts whatever they keep anywhere.
    calls, tracker = CollectiveLog(), MemoryTracker(live=False)
    with fake_process_group(4, 0), calls, tracker:
        chain, x = _chain(candidate)
        chain(x).square().mean().backward()
    found["all-reduces"] = calls.count("allreduce")
    found["six layers on one of 4 ranks"] = Measured(None, tracker.peak.total, SHARD_CARD)
    return found


def _explain_layer(got, expected):
    mine, right = got["2 ranks"], expected["2 ranks"]
    if mine["numbers held on rank 0"] > right["numbers held on rank 0"]:
        return (
            "the layer holds more than this rank's rows: keep only "
            "weight.chunk(ranks)[rank].clone()."
        )
    storages = "numbers in their storages on rank 0"
    if mine[storages] > right[storages]:
        return (
            "the shard is a view of the whole weight, and a view keeps the whole storage: .clone() "
            "it."
        )
    for part in mine:
        if mine[part] is None:
            return f"{part} is None: backward returns a gradient for x and one for the shard."
    for case in expected:
        if isinstance(expected[case], dict):  # a case of ranks, and no number of its own
            says = _why_first_part(got[case], expected[case])
            if says:
                return says
    card = got["six layers on one of 4 ranks"]
    if card.over > 3 * 4 * SIDE * SIDE:
        return (
            "whole weights stay after they are used: keep none in ctx, in the module or in a list, "
            "and gather again in backward."
        )
    return None


def _why_first_part(mine, right) -> str | None:
    """What is said of the first part that is wrong in a case: on any rank, the first update's parts
    before the second's.
    """
    wrong = [part for part in right if difference(mine[part], right[part])]
    wrong.sort(key=lambda part: part.startswith("second"))
    if not wrong:
        return None
    name = wrong[0]
    if "second output" in name:
        return (
            "the first output is right, but the output after an update is not: gather the "
            "weight again each time."
        )
    if "output" in name:
        return (
            "the output differs from that of the whole layer: gather the shards in the order of "
            "the ranks, and multiply by the transpose."
        )
    if "x.grad" in name:
        return (
            "x.grad is wrong: compute d_out @ weight with the whole weight, and take no mean "
            "over ranks, since x belongs to this rank."
        )
    if "gradient" in name:
        return _why_gradient(mine[name], right[name])
    return None


def _why_gradient(mine: Tensor, right: Tensor) -> str:
    """What is said of a shard's gradient that is wrong."""
    if not len(mine) or not mine.any():
        return "the shard gets no gradient: backward returns own_mean of d_out.T @ x for it."
    factor = factor_between(mine, right)
    if factor is not None:
        return (
            f"the shard's gradient is {factor:.3g} times what it should be: it is this rank's rows "
            "of the mean over the ranks, and own_mean divides by the ranks already."
        )
    return (
        "the shard's gradient is wrong: it is this rank's rows of the mean over all ranks "
        "of d_out.T @ x."
    )


def wrap(model, mesh):
    """Per layer a checkpoint and ``fully_shard``, then ``fully_shard`` for the rest; the model."""
    enable_checkpointing(model, {"use_reentrant": False})
    return _sharded()(model, mesh)


def _sharded(*, layers=True, root=True, **options):
    def wrong(model, mesh):
        for layer in model.model.layers if layers else ():
            fully_shard(layer, mesh=mesh, **options)
        return fully_shard(model, mesh=mesh, **options) if root else model

    return wrong


def _checkpointed(sharded):
    def wrong(model, mesh):
        enable_checkpointing(model, {"use_reentrant": False})
        return sharded(model, mesh)

    return wrong


def wrap_setting(layers: int = 6, hidden: int = 64, dtype: torch.dtype = torch.float32):
    """A tiny Llama, and token ids for 4 rows of 32."""
    model = models.tiny_llama(
        layers=layers, hidden=hidden, heads=4, intermediate=172, vocab=257
    ).to(dtype)
    return model.train(), torch.randint(0, 257, (4, 32), generator=torch.Generator().manual_seed(0))


def _whole(gradient):
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def _gradients(candidate) -> dict:
    """One backward on two ranks: gradients, whole, on each."""
    both = [wrap_setting(layers=2, hidden=16, dtype=torch.float64)[0] for _ in range(2)]
    ids = wrap_setting(layers=1, hidden=16)[1][:, :8].chunk(2)

    def run(rank: int):
        model = candidate(both[rank], init_device_mesh("cpu", (2,)))
        model(input_ids=ids[rank], labels=ids[rank]).loss.backward()
        return flat(_whole(p.grad) for p in model.parameters())

    first, last = on_ranks(run, 2)
    return {"gradients on rank 0": first, "gradients on rank 1": last}


def sharded_on_a_rank(candidate) -> tuple[nn.Module, nn.Module]:
    """The tiny Llama as it was given to the first of the two ranks that share it, where two other
    ranks share a replica, and what ``candidate`` makes of it.
    """
    given, _ = wrap_setting()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    return given, candidate(given, mesh["shards"])


def step_on_a_rank(model) -> tuple[CollectiveLog, MemoryTracker]:
    """A forward and a backward of ``model`` on 2 rows of 32 tokens."""
    _, ids = wrap_setting(layers=1)
    with CollectiveLog() as calls, MemoryTracker(model, live=False) as tracker:
        model(input_ids=ids[:2], labels=ids[:2]).loss.backward()
    return calls, tracker


def _whole_weights(model) -> int:
    """How many of the model's weights are not sharded."""
    return sum(not isinstance(p, DTensor) for p in model.parameters())


class _PartRuns:
    """Counts how often each layer's attention and MLP run in a forward and a backward.

    One in a checkpoint runs again in backward. The counting forwards are set only while the block
    runs, after the candidate has wrapped the model.
    """

    def __init__(self, model):
        kinds = ("LlamaAttention", "LlamaMLP")
        parts = [part for part in model.modules() if type(part).__name__ in kinds]
        self.runs = dict.fromkeys(parts, 0)
        self.forwards = {part: part.forward for part in parts}

    def __enter__(self):
        for part in self.runs:
            part.forward = functools.partial(self._counted, part)
        return self

    def __exit__(self, *_):
        for part, forward in self.forwards.items():
            part.forward = forward

    def _counted(self, part, *args, **kwargs):
        self.runs[part] += 1
        return self.forwards[part](*args, **kwargs)

    def run_once(self) -> int:
        """How many of them ran, and not again."""
        return sum(runs == 1 for runs in self.runs.values())


@quietly
def _observe_wrap(candidate):
    found: dict = {"two ranks": _gradients(candidate)}
    with fake_process_group(4, 0):
        given, model = sharded_on_a_rank(candidate)
        found["weights that stay whole"] = _whole_weights(model)
        found["weights of the given model that stay whole"] = _whole_weights(given)
        with _PartRuns(model) as parts:
            calls, tracker = step_on_a_rank(model)
        found["weights that are whole after backward"] = _whole_weights(model)
        shared = [p.device_mesh.size() for p in model.parameters() if isinstance(p, DTensor)]
    gathers = calls.count("allgather")
    found["all-gathers beyond 20"] = max(0, gathers - 20)
    found["a rank"] = Measured(None, tracker.peak.total, WRAP_CARD)
    found["gathered again in backward (1 is yes)"] = int(gathers > 9)
    found["layers that are units"] = len(_layers_among_units(model))
    found["ranks that share a weight"] = max(shared, default=0)
    found["in training mode (1 is yes)"] = int(model.training)
    return Seen(found, once=parts.run_once())


def _layers_among_units(model) -> set[str]:
    """The numbers of the layers that are units of ``fully_shard``, or have such units inside."""
    found = set()
    for name, module in model.named_modules():
        layer = re.match(r"model\.layers\.(\d+)", name)
        if layer and isinstance(module, FSDPModule):
            found.add(layer[1])
    return found


def _explain_wrap(got, expected):
    if got["weights that stay whole"]:
        return (
            "some weights stay whole on every rank, and nobody averages their gradients: "
            "fully_shard(model) takes what the layers leave."
        )
    if got["weights of the given model that stay whole"]:
        return (
            "a copy is sharded, and the given model stays whole beside it: fully_shard works in "
            "place, so shard the model itself."
        )
    if got["weights that are whole after backward"]:
        return (
            "after backward, weights are still whole: leave the unit's resharding after backward "
            "as it is."
        )
    if difference(got["two ranks"], expected["two ranks"]):
        return (
            "the gradients differ from those of one process: fully_shard each layer, then the "
            "model, in float32, and do not change how the model runs."
        )
    return _why_units(got, expected)


def _why_units(got, expected) -> str | None:
    """What is said of the units and the bytes, where the gradients are right."""
    if not got["gathered again in backward (1 is yes)"]:
        return (
            "weights stay gathered from forward to backward, or all are gathered at once: each "
            "layer is a unit, and frees its weights after forward."
        )
    if got["all-gathers beyond 20"]:
        return (
            "too many small all-gathers: one layer is one unit, so fully_shard takes a whole layer."
        )
    if got["ranks that share a weight"] > 2:
        return "all ranks share the weights, also those outside `mesh`: pass mesh=mesh each time."
    units, layers = got["layers that are units"], expected["layers that are units"]
    if units < layers:
        return (
            f"only {units} of the {layers} layers are units: call fully_shard on each of them "
            "before you call it on the model."
        )
    if got["a rank"].over and got.notes["once"]:
        return (
            f"{got.notes['once']} of the attentions and MLPs run only once, so their activations "
            "are kept: each layer as a whole is a checkpoint."
        )
    return None


EXERCISES = (
    Exercise(
        id="10.3",
        title="a linear layer that is cut over ranks",
        difficulty=3,
        minutes=6,
        trains="all-gather in forward and in backward, reduce-scatter after",
        reference=ShardedLinear,
        observe=_observe_layer,
        explain=_explain_layer,
        raises=(
            (
                rf"{APART}",
                (
                    "the ranks do not make the same calls: each gathers once in forward, and "
                    "gathers and reduces once in backward."
                ),
            ),
            (
                r"invalid gradient at index 1 - got \[1, 3\]",
                (
                    "the gradient for the shard has 1 row here, and the shard has 2. own_mean "
                    "takes the gradient of the whole weight, of 4 rows: in forward, multiply x by "
                    "gather(shard), so that d_out has all outputs, and call own_mean once."
                ),
            ),
            (
                r"invalid gradient at index 1",
                (
                    "the gradient for the shard has another shape than the shard: own_mean makes "
                    "it from the whole weight's gradient, (outputs, inputs)."
                ),
            ),
            (
                r"invalid gradient at index 0",
                (
                    "the first thing that backward returns has another shape than x: it is x's "
                    "gradient, d_out @ gather(shard), without own_mean. The second is the shard's."
                ),
            ),
            (
                r"incorrect number of gradients|returned an invalid gradient",
                "backward returns two gradients: that of x, then that of the shard.",
            ),
            # Two ranks: a weight of (4, 3), shards of (2, 3), and x of (4, 3). In the chain on one
            # of four: weights of (256, 256), shards of (64, 256), and x of (4, 256).
            (
                r"\(4x4 and 2x3\)",
                (
                    "a shard has only this rank's rows, 2 of 4, and d_out has all outputs: in "
                    "backward too, gather(shard) first."
                ),
            ),
            (
                r"\(4x2 and 4x3\)|\(4x64 and 256x64\)",
                (
                    "forward returns only this rank's outputs: multiply x by gather(shard), which "
                    "has the rows of all ranks, and not by the shard."
                ),
            ),
            (
                r"shapes cannot be multiplied|size mismatch|must match the size",
                (
                    "x may have more than two dimensions, and the weight is (outputs, inputs): x @ "
                    "weight.T, and d_out.flatten(0, -2).T @ x.flatten(0, -2)."
                ),
            ),
        ),
        mistakes=(
            Mistake(
                "keeps it",
                _layer(again=False),
                (
                    "the whole weight of every layer is kept from forward to backward: save the "
                    "shard, and gather again."
                ),
            ),
            Mistake(
                "not reduced",
                _layer(
                    reduce=lambda whole: whole.chunk(dist.get_world_size())[dist.get_rank()].clone()
                ),
                (
                    "each rank keeps its rows of its own gradient: the gradients from the other "
                    "ranks' batches are missing. reduce_scatter adds them up."
                ),
            ),
            Mistake(
                "sum",
                _layer(reduce=lambda whole: own_mean(whole) * dist.get_world_size()),
                "the gradient is the sum over the ranks: return the mean.",
            ),
            Mistake(
                "all-reduce",
                _layer(reduce=_all_reduced),
                (
                    "the numbers are right, but every rank receives the whole gradient: "
                    "reduce_scatter sends each rank only its own rows, half as many bytes."
                ),
            ),
            Mistake(
                "plain autograd",
                _layer(run=_plain_gather),
                (
                    "autograd does not follow an all_gather, so the shard gets no gradient: write "
                    "forward and backward of a torch.autograd.Function."
                ),
            ),
            Mistake(
                "x averaged",
                _layer(back=lambda d_out, weight: d_out @ weight / dist.get_world_size()),
                (
                    "x.grad is divided by the number of ranks: x belongs to this rank, and so "
                    "does its gradient."
                ),
            ),
        ),
    ),
    Exercise(
        id="10.4",
        title="a model of sharded layers",
        difficulty=2,
        minutes=4,
        trains="units of FSDP2, and checkpoints under them",
        reference=wrap,
        observe=_observe_wrap,
        explain=_explain_wrap,
        tolerance=1e-6,
        changes=("model.train", "model.hook", "model.config", "model.checkpointing"),
        raises=(
            (
                r"has no attribute 'loss'",
                (
                    "wrap must return the model that it was given: fully_shard(model) shards it "
                    "in place."
                ),
            ),
            (
                r"Invariant encountered|already",
                (
                    "fully_shard(model) takes all that is not sharded yet: the layers come first, "
                    "the model last."
                ),
            ),
            (
                r"comm\.cpp",
                (
                    "DistributedDataParallel leaves a whole copy of the model on every rank: "
                    "fully_shard cuts it."
                ),
            ),
        ),
        mistakes=(
            Mistake(
                "no checkpoints",
                _sharded(),
                (
                    "every layer's activations are kept: switch on checkpointing too, before or "
                    "after you shard the layers."
                ),
            ),
            Mistake(
                "root only",
                _checkpointed(_sharded(layers=False)),
                (
                    "the whole model is one unit, gathered at once: shard each layer separately, "
                    "so that only one or two are whole at a time."
                ),
            ),
            Mistake(
                "layers only",
                _checkpointed(_sharded(root=False)),
                (
                    "embeddings, the last norm and the head stay whole on every rank, and nobody "
                    "averages their gradients: fully_shard(model) takes what the layers leave."
                ),
            ),
            Mistake(
                "kept gathered",
                _checkpointed(_sharded(reshard_after_forward=False)),
                (
                    "every layer stays whole from forward to backward (ZeRO-2): leave "
                    "reshard_after_forward as it is."
                ),
            ),
            Mistake(
                "bf16",
                _checkpointed(_sharded(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))),
                "the layers compute in bf16: use no mixed precision here.",
            ),
            Mistake(
                "checkpoints alone",
                _checkpointed(lambda model, mesh: model),
                (
                    "nothing is sharded: every rank has the whole model, and learns only from its "
                    "own rows."
                ),
            ),
        ),
    ),
)
