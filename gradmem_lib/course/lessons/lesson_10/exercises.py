"""Lesson 10's exercises, in the order of the lesson. Ranks are threads, where numbers are compared;
where bytes are, one rank runs in a group whose others do not exist.
"""

import copy
from dataclasses import replace
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard  # noqa: F401
from torch.distributed.tensor import DTensor

from ....compat.fake_ranks import fake_process_group
from ....model.configs import find_model
from ....names import IGNORED
from ....training.recipe import Recipe
from ...judge.compare import Measured
from ...judge.exercise import Exercise, Unusable, calls, measured
from ...machine.compat import enable_checkpointing
from ...machine.thread_ranks import on_ranks
from ..shared.every_linear import without_needless_targets
from ..shared.seen import OperationLog, gradient_of
from ..shared.settings import flat, gradients_of, quietly, rows, tiny_llama, weights_of

# 10.1


def bytes_per_rank(parameters, ranks, way):
    """Bytes of (weights, gradients, optimizer states) on each rank, in mixed precision."""
    weights, gradients, states = 2 * parameters, 2 * parameters, 12 * parameters
    if way != "ddp":
        states = states // ranks
    if way in ("zero2", "fsdp"):
        gradients = gradients // ranks
    if way == "fsdp":
        weights = weights // ranks
    return weights, gradients, states


HELD = Exercise(
    "10.1",
    bytes_per_rank,
    calls(
        (1_200, 4, "ddp"),
        (600, 6, "zero1"),
        (800, 2, "zero2"),
        (1_200, 3, "fsdp"),
        hidden=[(70_000_000_000, 5, "zero2"), (9_100, 7, "fsdp")],
    ),
    """
    12 * parameters → 8 * parameters
        the optimizer holds two moments in float32, but its float32 copy of the weights is missing:
        12 bytes a parameter.
    2 * parameters, 2 * parameters, 12 → 4 * parameters, 4 * parameters, 8
        weights, gradients and moments are in float32 here: in mixed precision weights and gradients
        are bf16, and the optimizer has 12 bytes a parameter.
    2 * parameters, 2 * parameters, 12 → 4 * parameters, 4 * parameters, 12
        weights and gradients are in float32 here: mixed precision keeps them in bf16, 2 bytes each.
    2 * parameters, 2 * parameters, 12 → 6 * parameters, 2 * parameters, 8
        the float32 copy of the weights belongs to the optimizer's states: it is cut when they are.
    if way != "ddp" → if True
    if way in ("zero2", "fsdp") → if True
    if way == "fsdp" → if True
        everything is cut, for every way: ddp cuts nothing, and zero1 only the states.
    if way in ("zero2", "fsdp") → if way != "ddp"
    if way == "fsdp" → if way in ("zero2", "fsdp")
        this cuts one part too many: zero1 cuts only the states, zero2 the gradients too, and fsdp
        all three.
    if way == "fsdp" → if False
    if way in ("zero2", "fsdp") → if way == "fsdp"
    if way != "ddp" → if way in ("zero2", "fsdp")
        this cuts one part too few: zero1 cuts the states, zero2 the gradients too, and fsdp all
        three.
    if way == "fsdp" → if way in ("zero1", "zero2", "fsdp")
    if way != "ddp" → if way == "fsdp"
        this begins with the weights: ZeRO cuts the largest part first, which is the states, then
        the gradients, then the weights.
    """,
)

# 10.2


def average_gradients(model):
    """After backward on every rank: let each gradient be the mean over the ranks, one that is
    missing counting as zeros.
    """
    for p in model.parameters():
        if p.requires_grad:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


def after_backward(rank: int) -> nn.Module:
    """A rank's model. Each weight's gradient is 1, 2, 3, … on rank 0, their squares on the next,
    and so on; rank 2 has none for the first weight.
    """
    # A weight that may have no gradient comes first, so that no rank sends it last by chance, and
    # the frozen one is between those that are trained.
    frozen = nn.Embedding(7, 5).requires_grad_(False)
    model = nn.Sequential(nn.Linear(5, 3, bias=False), frozen, nn.Linear(5, 4)).double()
    for p in model.parameters():
        if p.requires_grad:
            p.grad = torch.arange(1.0, p.numel() + 1).double().pow(rank + 1).view_as(p)
    if rank == 2:
        model[0].weight.grad = None
    return model


def average_cases(answer):
    two = "gradients 1, 2, … and 1, 4, …"
    three = "gradients 1, 2, …, 1, 4, … and 1, 8, …, but none for the last rank's first weight"
    for name, ranks in ((two, 2), (three, 3)):
        net = [after_backward(rank) for rank in range(ranks)]
        before = copy.deepcopy(net)
        on_ranks(lambda rank, net=net: answer(net[rank]), ranks)
        for rank in (0, ranks - 1):
            model = net[rank]
            yield f"{name}, their mean on rank {rank}", gradients_of(model)
            has_one = model[1].weight.grad is not None
            yield f"{name}, whether rank {rank}'s frozen weight gets a gradient", has_one
            unchanged = torch.equal(weights_of(model), weights_of(before[rank]))
            yield f"{name}, whether rank {rank}'s weights are as before", unchanged


AVERAGE = Exercise(
    "10.2",
    average_gradients,
    average_cases,
    """
    p.grad /= dist.get_world_size() →
        this is the sum over the ranks: divide it by their number, or the learning rate grows with
        them.
    dist.get_world_size() → 2
        the sum is divided by 2, however many ranks there are: use dist.get_world_size().
    dist.all_reduce(p.grad) →
        each rank divides its own gradient, but nothing is added up: all_reduce first.
    dist.all_reduce(p.grad) → dist.all_reduce(p.grad.clone())
    p.grad /= dist.get_world_size() →
        the gradients have not changed: all_reduce p.grad itself, or write the mean of a copy back
        into it.
    p.grad = torch.zeros_like(p) → dist.all_reduce(torch.zeros_like(p)); continue
        a rank that sent zeros does not keep the mean: where p.grad is None, put the zeros into
        p.grad, and send that.
    if p.requires_grad → if p.grad is not None
        the ranks do not make the same calls: each must send every trained weight's gradient, and
        zeros where it has none, in the same order.
    dist.all_reduce(p.grad) → dist.reduce(p.grad, dst=0)
        only rank 0 has the mean: reduce leaves the sum on one rank, and all_reduce leaves it on all
        of them.
    dist.all_reduce(p.grad) → n = p.grad.any().float(); dist.all_reduce(n); dist.all_reduce(p.grad)
    dist.get_world_size() → max(1, n.item())
        the sum is divided by the number of ranks that have a gradient: a rank without one counts as
        zeros, so divide by the number of all ranks.
    """,
    changes="model",
)

# 10.4

WRAP_CARD = 2_550_000  # bytes, of a forward and a backward on a rank of two


def wrap(model, mesh):
    """Per layer a checkpoint and ``fully_shard``, then ``fully_shard`` for the rest; the model."""
    enable_checkpointing(model, {"use_reentrant": False})
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def wrap_setting(layers: int = 6):
    """A tiny Llama, and token ids for 4 rows of 32."""
    model = tiny_llama(layers, 257)
    return model.train(), rows(32, 32, 32, 32, vocab=257)


def gradients_on_two_ranks(answer) -> list[Tensor]:
    """Of one backward: each rank's gradients, whole."""
    both = [wrap_setting(layers=2)[0].double() for _ in range(2)]
    ids = wrap_setting()[1][:, :8].chunk(2)

    def run(rank: int):
        model = answer(both[rank], init_device_mesh("cpu", (2,)))
        model(input_ids=ids[rank], labels=ids[rank]).loss.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        return flat(shards.full_tensor() for shards in gradients)

    return on_ranks(run, 2)


@quietly
def wrap_cases(answer):
    with fake_process_group(4, 0):
        given, ids = wrap_setting()
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
        model = answer(given, mesh["shards"])
        yield "whether the model that was given is returned", model is given
        shards = [p for p in given.parameters() if isinstance(p, DTensor)]
        yield "weights that are whole", len(list(given.parameters())) - len(shards)
        units = sum(isinstance(part, FSDPModule) for part in given.model.layers.modules())
        yield "units of fully_shard, among the six layers and their parts", units
        shared = max(p.device_mesh.size() for p in shards)
        yield "ranks that share a weight, where mesh has 2 of 4", shared
        run = measured(lambda: model(input_ids=ids[:2], labels=ids[:2]).loss.backward(), WRAP_CARD)
    yield "the gradients on each of 2 ranks", gradients_on_two_ranks(answer)
    yield "a forward and a backward", run


WRAP = Exercise(
    "10.4",
    wrap,
    wrap_cases,
    """
    enable_checkpointing(model, {"use_reentrant": False}) →
        every layer's activations are kept: switch on checkpointing too, before or after you shard
        the layers.
    fully_shard(layer, mesh=mesh) →
        the whole model is one unit, gathered at once: shard each layer separately, so that only one
        or two are whole at a time.
    return fully_shard(model, mesh=mesh) → return model
        embeddings, the last norm and the head stay whole on every rank, and nobody averages their
        gradients: fully_shard(model) takes what the layers leave.
    layer, mesh=mesh → layer, mesh=mesh, reshard_after_forward=False
        every layer stays whole from forward to backward (ZeRO-2): leave reshard_after_forward as it
        is.
    layer, mesh=mesh → layer, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16)
    model, mesh=mesh → model, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16)
        the layers compute in bf16: use no mixed precision here.
    fully_shard(layer, mesh=mesh) →
    return fully_shard(model, mesh=mesh) → return model
        nothing is sharded: every rank has the whole model, and learns only from its own rows.
    {"use_reentrant": False}) → {"use_reentrant": False}); fully_shard(model, mesh=mesh)
    return fully_shard(model, mesh=mesh) → return model
        fully_shard(model) takes all that is not sharded yet: the layers come first, the model last.
    return fully_shard(model, → return fully_shard(model.model,
        wrap must return the model that it was given: fully_shard(model) shards it in place.
    """,
    tolerance=1e-6,
    changes="model.train model.hook model.config model.checkpointing",
)

# 10.6


def communication_seconds(way, nbytes, ranks, micro_batches, bandwidth):
    """Seconds that one update's communication takes: a ring that sends ``bandwidth`` bytes a second
    from each rank.
    """
    passes = {"ddp": 2, "zero2": 2 * micro_batches, "fsdp": 3 * micro_batches}[way]
    return passes * nbytes * (ranks - 1) / ranks / bandwidth


SECONDS = Exercise(
    "10.6",
    communication_seconds,
    calls(
        ("ddp", 800, 4, 3, 100),
        ("fsdp", 900, 3, 2, 50),
        ("zero2", 600, 5, 4, 20),
        hidden=[("fsdp", 6_000_000_000, 16, 1, 300e9)],
    ),
    """
    "ddp": 2 → "ddp": 2 * micro_batches
        DDP sends its gradients after every micro-batch here: with no_sync it waits for the last
        one, and sends once an update.
    2 * micro_batches → 2
    3 * micro_batches → 3
        sharded weights are sent once an update here: every micro-batch needs them again, and
        reduces its gradients.
    * (ranks - 1) / ranks →
        a rank already has its own share: it sends (ranks - 1) / ranks of the bytes round the ring.
    (ranks - 1) / ranks → (ranks - 1)
        every rank sends everything to every other rank here: in a ring each sends 1 / ranks of the
        bytes, ranks - 1 times.
    3 * micro_batches → 2 * micro_batches
        fsdp frees a layer's weights after forward, so it gathers them again in backward: with the
        pass of the gradients this makes three.
    "ddp": 2 → "ddp": 1
        an all-reduce is two passes round the ring: one adds up a share on each rank, and one sends
        the sums to all ranks.
    2 * micro_batches → micro_batches + 1
    3 * micro_batches → 2 * micro_batches + 1
        the gradients are reduced once an update here, which needs whole gradients on each rank:
        the task's fsdp and zero2 reduce after every micro-batch.
    / bandwidth →
        these are bytes: return seconds, so divide by bandwidth.
    """,
)

# 10.7

TWO_CARDS, TOKENS = "RTX 4090 24GB", 1024
RANKS = 2
LONGEST = 5  # layers of a segment with which the usual recipe fits


def two_cards() -> Recipe:
    """A recipe with which Llama-2-70B learns on two cards of 24 GB, a row of 1,024 tokens on each,
    by adapters of rank 16.
    """
    return Recipe(
        precision="bf16",
        sharding="fsdp",
        lora_rank=16,
        quantized_base=True,
        checkpointing="per-layer",
    )


@lru_cache(maxsize=32)
def seventy_peak(recipe: Recipe, tokens: int = TOKENS):
    """The peak (a ``MemorySnapshot``) that is predicted for one of two ranks of Llama-2-70B, on a
    row of ``tokens``.
    """
    from ....prediction.predict import predict

    ask = {"batch_size": 1, "seq_len": tokens, "ranks": RANKS, "target": "cuda"}
    return predict("Llama-2-70B", recipe=recipe, **ask).peak


def layers_at_once(recipe: Recipe, layers: int) -> int:
    """Layers that keep their activations at the same time, in backward."""
    if recipe.every_n_layers:
        return layers - layers // recipe.every_n_layers
    if recipe.checkpointing == "sqrt":
        return round(layers**0.5)
    if isinstance(recipe.checkpointing, int):
        return recipe.checkpointing
    return 1 if recipe.checkpointing else layers


@quietly
def recipe_cases(answer):
    from ....planning.cards import CARDS
    from ....planning.held import resident_bytes
    from ....planning.work import count

    recipe = answer()
    if not isinstance(recipe, Recipe):
        raise Unusable("return one Recipe, the same for both cards")
    config = find_model("Llama-2-70B")[0]
    recipe = without_needless_targets(recipe, config)
    yield "the rank of the adapters", recipe.lora_rank
    yield "whether adapters are on every linear layer", not recipe.lora_targets
    card = CARDS[TWO_CARDS].nbytes
    # A sum tells of most recipes that they do not fit, and a prediction takes longer.
    ranks = RANKS if recipe.sharding else 1
    kept = sum(resident_bytes(count(config), recipe, ranks).values())
    says = f"They take {kept:,} bytes, and a card has {card:,}."
    yield "weights, gradients and states of a card", Measured(None, kept, card, says)
    at_once = layers_at_once(recipe, config.num_hidden_layers)
    says = f"They are {at_once}, and {LONGEST} fit."
    yield "layers that keep activations at once", Measured(None, at_once, LONGEST, says)
    if at_once > 1:  # fits if a checkpoint in every layer does, whose prediction is quicker
        recipe = replace(recipe, checkpointing="per-layer", every_n_layers=None)
    peak = 0
    if kept <= card and at_once <= LONGEST:
        peak = seventy_peak(recipe).total
    says = f"It is {peak:,} bytes, and a card has {card:,}."
    yield "the predicted peak of a card", Measured(None, peak, card, says)


SEVENTY = Exercise(
    "10.7",
    two_cards,
    recipe_cases,
    """
    "fsdp" → "ddp"
        every card has all of the frozen base, 35 GB in 4 bits: only sharding='fsdp' cuts it.
    "fsdp" → "zero1"
        every card has all of the frozen base, 35 GB in 4 bits: only sharding='fsdp' cuts it.
    "fsdp" → "zero2"
        zero2 keeps every layer gathered from forward to backward, so a card holds the whole base:
        sharding='fsdp' frees each layer.
    =True → =False
        half of the base in bf16 is 69 GB on each card: keep it in 4 bits, quantized_base=True.
    lora_rank=16 → lora_rank=None
    =True → =False
        every weight is trained, and so needs a gradient and states: choose adapters, lora_rank=16.
    "per-layer" → None
        the activations of 80 layers are kept, more than 15 GB: checkpointing='per-layer'.
    """,
)

# 10.3

# bytes: a rank's quarter of six matrices of 262,144, its gradients, and a few whole matrices
SHARD_CARD = 1_700_000
SIDE, LAYERS = 256, 6


def gather(shard) -> Tensor:
    """The shards of all ranks (rows, columns), one below the other: (ranks * rows, columns)."""
    whole = shard.new_empty(dist.get_world_size() * len(shard), shard.shape[1])
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


class ShardedLinear(nn.Module):
    """This rank's rows of ``linear``'s weight (outputs, inputs), which has no bias: whole in
    forward and backward alone.
    """

    class Gathered(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, shard):
            ctx.save_for_backward(x, shard)
            return x @ gather(shard).T

        @staticmethod
        def backward(ctx, d_out):
            x, shard = ctx.saved_tensors
            d_weight = d_out.flatten(0, -2).T @ x.flatten(0, -2)
            return d_out @ gather(shard), own_mean(d_weight)

    def __init__(self, linear):
        super().__init__()
        rows = linear.weight.detach().chunk(dist.get_world_size())[dist.get_rank()]
        self.shard = nn.Parameter(rows.clone())

    def forward(self, x):
        return self.Gathered.apply(x, self.shard)


def two_updates(layer: nn.Module, x: Tensor):
    """(what is seen, its value) on one rank."""
    held = [*layer.parameters(), *layer.buffers()]
    yield "numbers in parameters and buffers", sum(t.numel() for t in held)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5, foreach=False)
    for name in ("", ", after an update"):
        x = x.detach().requires_grad_()
        out = layer(x)
        out.square().mean().backward()
        yield f"the output{name}", out.detach()
        yield f"x.grad{name}", gradient_of(x)
        yield f"the shard's gradient{name}", gradients_of(layer)
        optimizer.step()
        optimizer.zero_grad()


def layer_cases(answer):
    linear = nn.Linear(5, 6, bias=False).double()
    x = torch.arange(90).double().sin().view(3, 2, 3, 5)  # (ranks, rows, tokens, inputs)
    seen = on_ranks(lambda rank: list(two_updates(answer(copy.deepcopy(linear)), x[rank])), 3)
    for rank in (0, 2):
        for what, value in seen[rank]:
            yield f"3 ranks, x of (2, 3, 5), {what}, rank {rank}", value

    def run():
        # Made here, so that whatever layers keep anywhere is counted.
        layers = [answer(nn.Linear(SIDE, SIDE, bias=False)) for _ in range(LAYERS)]
        nn.Sequential(*layers)(torch.randn(4, SIDE)).square().mean().backward()

    with fake_process_group(4, 0), OperationLog() as log:
        six = measured(run, SHARD_CARD, "whole weights", 4 * SIDE * SIDE)
    yield (
        "all-reduces, in which every rank receives the whole gradient",
        log.collectives("allreduce"),
    )
    yield "six layers on one of 4 ranks", six


SHARDED = Exercise(
    "10.3",
    ShardedLinear,
    layer_cases,
    """
    save_for_backward(x, shard) → save_for_backward(x, gather(shard))
    d_out @ gather(shard) → d_out @ shard
        the whole weight of every layer is kept from forward to backward: save the shard, and gather
        again.
    own_mean(d_weight) → d_weight.chunk(dist.get_world_size())[dist.get_rank()].clone()
        each rank keeps its rows of its own gradient: the gradients from the other ranks' batches
        are missing. reduce_scatter adds them up.
    own_mean(d_weight) → own_mean(d_weight) * dist.get_world_size()
        the gradient is the sum over the ranks: return the mean.
    self.Gathered.apply(x, self.shard) → x @ gather(self.shard).T
        autograd does not follow an all_gather, so the shard gets no gradient: write forward and
        backward of a torch.autograd.Function.
    d_out @ gather(shard) → d_out @ gather(shard) / dist.get_world_size()
        x.grad is divided by the number of ranks: x belongs to this rank, and so does its gradient.
    d_out @ gather(shard) → own_mean(d_out @ gather(shard))
        the first thing that backward returns has another shape than x: it is x's gradient, d_out @
        gather(shard), without own_mean. The second is the shard's.
    d_out @ gather(shard) → d_out @ shard
        a shard has only this rank's rows, and d_out has all outputs: in backward too, gather(shard)
        first.
    x @ gather(shard).T → x @ shard.T
        forward returns only this rank's outputs: multiply x by gather(shard), which has the rows of
        all ranks, and not by the shard.
    """,
)

# 10.5


def loss_scale(micro_batches):
    """What each summed loss is multiplied by, so that gradients which are averaged over ranks are
    those of the mean loss over every label of all ranks. ``micro_batches``: this rank's labels, a
    tensor for each; -100 does not count.
    """
    count = torch.tensor(sum(int((labels != IGNORED).sum()) for labels in micro_batches))
    dist.all_reduce(count)
    return dist.get_world_size() / count.item()


def scale_cases(answer):
    # The lengths of the rows of each rank's micro-batches.
    for name, batches in (
        ("ranks with 8 and 15 labels", [[(5, 3)], [(2, 9, 4)]]),
        ("ranks with 16, 6 and 0 labels", [[(4,), (3, 9)], [(6, 0)], [(0, 0)]]),
    ):
        labels = []
        for micro_batches in batches:
            # A row of 3, which is left out again, pads those that have no label.
            labels.append([rows(*lengths, 3, vocab=3)[:-1] for lengths in micro_batches])
        scales = on_ranks(lambda rank, labels=labels: answer(labels[rank]), len(labels))
        for rank, scale in enumerate(scales):
            yield f"{name}, on rank {rank}", scale


SCALE = Exercise(
    "10.5",
    loss_scale,
    scale_cases,
    """
    dist.all_reduce(count) →
        each rank divides by its own labels: all_reduce their number first, so that a label counts
        the same everywhere.
    dist.all_reduce(count) →
    dist.get_world_size() / count.item() → 1 / count.item()
        each rank divides by its own labels (a mean of means): a label on a rank with few labels
        counts more. all_reduce the number of labels first.
    dist.get_world_size() / → 1 /
        averaging the ranks' gradients afterwards divides by the number of ranks too: multiply by
        it.
    dist.get_world_size() / count.item() → 1 / count.item() / dist.get_world_size()
        this divides by the number of ranks, but averaging does so too: multiply by it.
    int((labels != IGNORED).sum()) → labels.numel()
        labels of -100 are counted: they have no loss.
    int((labels != IGNORED).sum()) → len(labels)
        rows are counted: the loss is a sum over labels, and rows have different numbers of them.
    labels != IGNORED → labels[..., 1:] != IGNORED
        the first label of each row is left out: these labels are not shifted, and every one that is
        not -100 counts.
    int((labels != IGNORED).sum()) → 1
        micro-batches are counted: the loss is a sum over labels, and micro-batches have different
        numbers of labels.
    """,
)
