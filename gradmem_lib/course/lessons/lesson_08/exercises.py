"""Lesson 08's exercises, in the order of their ids: a policy, the operations that run again, saved
tensors that move, the numbers that decide, an MLP in tiles and a key-value cache.
"""

import math
import tempfile
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint
from torch.utils.flop_counter import FlopCounterMode

from ....measure.tracker import MemoryTracker
from ....model.configs import find_model
from ....techniques.checkpointing import checkpoint_layers
from ....units import parse_bytes
from ...judge.compare import describe, plain_int
from ...judge.exercise import Exercise, Unusable, calls, measured
from ...machine.compat import cpu_attention
from ...material import models
from ..shared.seen import gradient_of
from ..shared.settings import gradients_of, quietly, rows, seeded

aten = torch.ops.aten

# 8.1

PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default)
KEEP, REPEAT = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE


def every_second_product():
    """A new policy: of the matrix products that it is asked about, keep the first, the third and so
    on, and nothing else.
    """
    counts = [0, 0]

    def policy(ctx, op, *args, **kwargs):
        if op not in PRODUCTS:
            return REPEAT
        counts[ctx.is_recompute] += 1
        return KEEP if counts[ctx.is_recompute] % 2 else REPEAT

    return policy


LAYER = (*PRODUCTS, aten.gelu.default, *PRODUCTS, cpu_attention.default, aten.mm.default)


def kept(policy, again: bool = False) -> list[int]:
    """The places of the operations of ``LAYER`` that a policy keeps, from 1."""
    if not callable(policy):
        raise Unusable(f"return the policy, which is a function, not {describe(policy)}")
    places = []
    for place, op in enumerate(LAYER, 1):
        said = policy(SimpleNamespace(is_recompute=again, op_output=None), op)
        if not isinstance(said, (bool, CheckpointPolicy)):
            raise Unusable(
                f"the policy must return KEEP or REPEAT, not {describe(said)}, which it returns "
                f"for {op}"
            )
        if said in (True, KEEP, CheckpointPolicy.PREFER_SAVE):
            places.append(place)
    return places


def policy_cases(answer):
    policy = answer()
    words = "the places of what is kept of mm, addmm, bmm, gelu, mm, addmm, bmm, attention and mm"
    yield words, kept(policy)
    yield f"{words}, in the second run, by ctx.is_recompute", kept(policy, again=True)
    yield f"{words}, in the next layer, whose policy begins a new count", kept(answer())


POLICY = Exercise(
    "8.1",
    every_second_product,
    policy_cases,
    """
    op not in PRODUCTS → False
        every second operation of any kind is kept: count only matrix products, and repeat the rest.
    % 2 else → % 2 == 0 else
        the second product is kept, the fourth and so on: keep the first, the third and so on.
    counts[ctx.is_recompute] % 2 else → True else
        every product is kept: let the second run compute every second one.
    counts[ctx.is_recompute] += 1 → counts[0] += 1
    counts[ctx.is_recompute] % → counts[0] %
        the second run continues the count of forward, so it decides differently: count the second
        run separately, by ctx.is_recompute.
    return REPEAT → return KEEP
        other operations than products are kept too, which costs bytes and saves little work: return
        PREFER_RECOMPUTE for them.
    op not in PRODUCTS → op not in (aten.mm, aten.addmm, aten.bmm)
        no product is kept. Do you compare op with aten.mm? It is an overload, such as
        aten.mm.default, and not equal to aten.mm.
    op not in PRODUCTS → op != aten.mm.default
        only one kind of product is counted: there are mm, addmm and bmm.
    counts[ctx.is_recompute] % 2 else → counts[ctx.is_recompute] == 1 else
        only the first product is kept: of each two products keep one, the third and so on too.
    """,
)

# 8.2


def repeated(plain, checkpointed):
    """The operations of ``checkpointed()`` that ``plain()`` does without; fused attention counts
    with its two products.
    """

    def formula(query, key, value, *args, out_val=None, **kwargs):
        rows, heads, queries, size = query
        return 2 * (2 * rows * heads * queries * key[2] * size)

    counts = []
    for step in (plain, checkpointed):
        with FlopCounterMode(display=False, custom_mapping={cpu_attention: formula}) as counter:
            step()
        counts.append(counter.get_total_flops())
    return counts[1] - counts[0]


def both_steps(layer, *given):
    """A step without a checkpoint, and one with."""
    return (
        lambda: layer(*given).square().sum().backward(),
        lambda: checkpoint(layer, *given, use_reentrant=False).square().sum().backward(),
    )


def repeated_cases(answer):
    mlp = nn.Sequential(nn.Linear(12, 20), nn.GELU(), nn.Linear(20, 12))
    steps = both_steps(mlp, torch.randn(10, 12))
    yield "an MLP, whose 12 × 20 weights run again on 10 rows", answer(*steps)
    out = nn.Linear(6, 6)

    def attention(query, key, value):
        # The linear layer makes all of the attention run again.
        return out(F.scaled_dot_product_attention(query, key, value))

    query = torch.randn(2, 3, 5, 6, requires_grad=True)
    for keys in (5, 9):
        key = torch.randn(2, 3, keys, 6, requires_grad=True)
        case = f"fused attention, 2 rows, 3 heads of 6, 5 queries and {keys} keys"
        yield case, answer(*both_steps(attention, query, key, key))


REPEATED = Exercise(
    "8.2",
    repeated,
    repeated_cases,
    """
    {cpu_attention: formula} → {}
        fused attention is not counted: FlopCounterMode has no formula for it on a CPU; give it one
        in custom_mapping, under the name without .default.
    2 * (2 * rows → (2 * rows
        the formula gives half: attention is two products, queries times keys and weights times
        values, and a multiplication and an addition are two operations.
    key[2] → queries
        the queries are squared: there may be more keys than queries; key[2] has their number.
    * heads →
        only one head is counted: each head has its own two products.
    counts[1] - counts[0] → counts[1]
        this is the whole step with its checkpoint: what runs again is the difference from the plain
        step.
    counts[1] - counts[0] → counts[0]
        this is the step without its checkpoint: count both steps, and take the difference.
    counts[1] - counts[0] → counts[0] + counts[1]
        the sum of both steps is counted: each step has its own counter; return the difference.
    counts[1] - counts[0] → (counts[1] - counts[0]) // 2
        a multiplication and an addition are counted as one operation: they are two.
    """,
)

# 8.3

DISK_CARD, WIDTH = "1.6 MB", 64


class Disk:
    """Saved-tensor hooks: ``pack`` writes a tensor to a file of ``folder``, ``unpack`` reads it;
    ``weights`` stay where they are.
    """

    def __init__(self, folder, weights):
        self.folder, self.number = folder, 0
        self.stay = {w.untyped_storage().data_ptr() for w in weights}

    def pack(self, tensor):
        if tensor.untyped_storage().data_ptr() in self.stay:
            return tensor
        self.number += 1
        path = f"{self.folder}/{self.number}.pt"
        torch.save(tensor.detach().clone(), path)
        return path

    def unpack(self, packed):
        return packed if isinstance(packed, torch.Tensor) else torch.load(packed)


class Gated(nn.Module):
    """(rows, 64) to the same; two of the tensors that it saves are views of a wider one."""

    def __init__(self):
        super().__init__()
        self.three, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        a, b, c = self.three(x).chunk(3, -1)
        return x + self.out(torch.where(a > 0, a * b, b) * c.tanh())


def disk_setting():
    """An embedding and six gated layers, and ids of 256 rows."""
    with seeded(3):
        layers = [nn.Embedding(9, WIDTH), *(Gated() for _ in range(6))]
        return nn.Sequential(*layers), torch.randint(0, 9, (256,))


KINDS = (
    torch.full((3, 5), 1 / 3),
    torch.full((3, 5), 2 / 3),
    torch.arange(6.0).view(2, 3).T,
    torch.arange(4),
    torch.tensor([True, False]),
    torch.tensor(0.1),
)


def bytes_in(folder: str) -> int:
    return sum(path.stat().st_size for path in Path(folder).rglob("*"))


def disk_cases(answer):
    with tempfile.TemporaryDirectory() as folder:
        model, ids = disk_setting()
        # The weight lives on: else a tensor might get its address, and be taken for it.
        weight = nn.Parameter(torch.ones(48)[24:].view(6, 4))
        disk = answer(folder, [weight, *model.parameters()])
        # Each of them is gone when the next one is made.
        packed = [disk.pack(kind.clone()) for kind in KINDS * 3]
        back = [disk.unpack(each) for each in packed]
        yield "small tensors, packed one after another, that come back", back
        yield "their dtypes", [tensor.dtype for tensor in back]
        for words, tensor in (
            ("an activation of a weight's shape", torch.zeros(6, 4)),
            ("a weight, which begins inside its storage,", weight),
            ("a view of a weight", weight.t()),
        ):
            same = disk.unpack(disk.pack(tensor)).data_ptr() == tensor.data_ptr()
            yield f"whether {words} stays in memory", same
        # Who writes a storage once, and lets both views read this file, is right.
        before, whole = bytes_in(folder), torch.zeros(4000, 16)
        packed = disk.pack(whole[:4]), disk.pack(whole[4:8])
        twice = bytes_in(folder) - before > 1.5 * whole.nbytes
        yield "4 rows of 4,000, and 4 more: whether all 4,000 are written each time", twice
        del packed, whole
        before = bytes_in(folder)

        def step():
            with saved_tensors_hooks(disk.pack, disk.unpack):
                loss = model(ids).square().mean()
            has_written = bytes_in(folder) > before
            loss.backward()
            return has_written

        run = measured(step, DISK_CARD, model=model)
        yield "a step of a model, the gradients", gradients_of(model)
        yield "a step of a model, whether forward writes files", run.value
        yield f"a step within {DISK_CARD}", run


DISK = Exercise(
    "8.3",
    Disk,
    disk_cases,
    """
    self.number += 1 → self.number += 1; self.kept = [*getattr(self, "kept", ()), tensor]
        a list or a dict keeps each tensor alive beside its file, so nothing is freed: keep only the
        file's name.
    .clone() →
        torch.save writes the whole storage of a view, and unpack reads all of it: clone the tensor
        first.
    in self.stay → in ()
        the weights are written too: they stay in memory anyway, and unpack makes copies of them;
        let pack return a weight as it is.
    self.number += 1 →
        every tensor comes back as the one that was written last: each needs a file of its own, and
        unpack reads the file that pack has named; number the files.
    torch.load(packed) → self.__dict__.setdefault(packed, torch.load(packed))
        every tensor that unpack has read is kept, so backward needs more and more memory: return
        it, and keep nothing.
    detach().clone() → detach().half().to(tensor.dtype)
        the numbers are rounded to half precision: write the tensor as it is.
    tensor.untyped_storage().data_ptr() in self.stay → True
        nothing is moved: no file appears in the folder.
    tensor.untyped_storage().data_ptr() in self.stay → isinstance(tensor, nn.Parameter)
        autograd saves views of weights too (weight.t()), which are other objects and no
        nn.Parameter: recognise them by tensor.untyped_storage().data_ptr().
    """,
    tolerance=0.0,
)

# 8.4


def break_even(nbytes, operations, bandwidth, speed):
    """How many times as long moving ``nbytes`` away and back takes as computing them again, by so
    many ``operations``.
    """
    return (2 * nbytes / bandwidth) / (operations / speed)


BREAK_EVEN = Exercise(
    "8.4",
    break_even,
    calls(
        (64_000_000, 2e12, 25e9, 80e12),
        (7_000_000, 9e11, 450e9, 500e12),
        hidden=[(90_000_000, 4e11, 31e9, 150e12)],
    ),
    """
    2 * nbytes → nbytes
        the bytes cross the bus twice: away in forward, and back in backward.
    return (2 * nbytes / bandwidth) / → return 1 / (2 * nbytes / bandwidth) *
        this ratio is upside down: divide the seconds of moving by those of computing.
    ) / (operations → ) - (operations
        this is a difference in seconds: return how many times as long moving takes.
    nbytes / bandwidth → nbytes / speed
    operations / speed → operations / bandwidth
        bandwidth and speed are swapped: divide bytes by bandwidth, and operations by speed.
    / (operations / speed) → / (2 * nbytes / bandwidth + operations / speed)
        this is moving's share of the sum of both: divide only by the seconds of computing.
    2 * nbytes → 4 * nbytes
        the bytes are counted too often: they cross the bus twice, away and back.
    """,
)

# 8.5

LAYERS = 8
RECOMPUTE_CARD = "2.07 MB"  # fits a step with 5 layers of 8 run again, and none with fewer
MOST_CALLS = 8  # of peak, for up to 64 layers; halving needs 7


def layers_to_recompute(peak, layers, budget):
    """The smallest k from 0 to ``layers`` with ``peak(k)`` at most ``budget``; ``peak`` never grows
    with k.
    """
    low, high = 0, layers
    while low < high:
        middle = (low + high) // 2
        if peak(middle) <= budget:
            high = middle
        else:
            low = middle + 1
    return low


@cache
def recomputed_peak(k: int) -> int:
    """The peak in bytes, measured, of a step of a GPT-2, the second model, in which the first ``k``
    layers run again, each by itself.
    """
    model = models.tiny_gpt2(layers=LAYERS, hidden=32, heads=2, positions=32, vocab=64)
    ids = rows(32, 32, 32, 32, vocab=64)
    schedule = [1] * k + [LAYERS - k] if k < LAYERS else 1
    with MemoryTracker(model.train(), live=False) as tracker, checkpoint_layers(model, schedule):
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return tracker.peak.total


# What each layer saves when it runs again, what a step needs with none of them, and the budget.
SAVES = {
    "5 layers, room for all": ([7] * 5, 100, 100),
    "4 layers that save 10 of 100 bytes each, a budget of 80": ([10] * 4, 100, 80),
    "9 layers that save 7 of 200 bytes each, a budget of 137": ([7] * 9, 200, 137),
    "63 unequal layers": ([90] * 6 + [10] * 20 + [55] * 5 + [3] * 32, 3000, 2300),
}


def counted_peak(saves: list[int], start: int, called: list):
    def peak(k):
        k = plain_int(k)
        called.append(k)
        if len(called) > 1000:
            raise RuntimeError("peak was called 1,000 times: does the range get smaller")
        if k not in range(len(saves) + 1):
            raise ValueError(f"peak({k}) of {len(saves)} layers: k goes from 0 to `layers`, by 1")
        return start - sum(saves[:k])

    return peak


@quietly
def layers_cases(answer):
    for name, (saves, start, budget) in SAVES.items():
        called: list[int] = []
        yield name, plain_int(answer(counted_peak(saves, start, called), len(saves), budget))
    yield f"calls of peak for 63 layers, at most {MOST_CALLS}", max(len(called), MOST_CALLS)
    card = parse_bytes(RECOMPUTE_CARD)
    k = answer(lambda k: recomputed_peak(plain_int(k)), LAYERS, card)
    yield f"a GPT-2 of 8 layers that trains in {RECOMPUTE_CARD}", k


FEWEST = Exercise(
    "8.5",
    layers_to_recompute,
    layers_cases,
    """
    (low + high) // 2 → low
        the number is right, but every k is tried in turn, which takes too many calls of peak: halve
        the range each time.
    <= budget → < budget
        a peak equal to the budget fits: test for at most the budget, not for less.
    return low → return layers
        all layers run again, for any budget: return the smallest number that fits.
    return low → return 0
        no layer runs again, for any budget: where peak(0) is over the budget, some must.
    low, high = 0 → low, high = 1
        where the step fits as it is, the answer is 0: no layer has to run again.
    0, layers → 0, layers - 1
        the answer may be all layers, the last one too: begin with high = layers.
    return low → return layers - low
        this is the number of layers that do not run again: return the number that do.
    return low → return max(0, low - 1)
        one layer is missing: the step still does not fit, but it fits with the next k.
    """,
)

# 8.6

TILED_CARD, TILED_TOKENS, TILES = "0.8 MB", 250, 5


def tiled_mlp(mlp, x, tiles):
    """``mlp(x)`` for x (rows, tokens, width), computed in ``tiles`` slices of the tokens, each in a
    checkpoint of its own.
    """
    parts = [checkpoint(mlp, part, use_reentrant=False) for part in x.tensor_split(tiles, dim=1)]
    return torch.cat(parts, dim=1)


def tiled_setting(rows=2, tokens=TILED_TOKENS, *, needs=True):
    """An MLP that is eight times as wide inside, and x (rows, tokens, 32)."""
    torch.manual_seed(6)
    mlp = nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 32))
    return mlp, torch.randn(rows, tokens, 32).requires_grad_(needs)


def tile_cases(name, answer, tiles: int, rows: int, tokens: int, *, needs: bool = True):
    mlp, x = tiled_setting(rows, tokens, needs=needs)
    lengths = []

    def note_length(_, given):
        # An answer may cut rows and tokens as one dimension.
        lengths.append(math.ceil(given[0].numel() / 32 / rows))

    mlp.register_forward_pre_hook(note_length)
    out = answer(mlp, x, tiles)
    first = len(lengths)
    yield f"{name}, the output", out.detach()
    yield f"{name}, whether the output has a graph", out.requires_grad
    out.square().sum().backward()
    yield f"{name}, the gradients of the weights", gradients_of(mlp)
    yield f"{name}, the gradient of x", gradient_of(x)
    yield f"{name}, tokens of the longest tile", max([*lengths, math.ceil(tokens / tiles)])
    yield f"{name}, how many tiles there are, at most", max(first, tiles)
    yield f"{name}, runs of the MLP beyond two for each tile", max(0, len(lengths) - 2 * first)


def tiled_cases(answer):
    yield from tile_cases("17 tokens in 5 tiles", answer, 5, 2, 17)
    name = "9 tokens in 3 tiles, of an x that needs no gradient"
    yield from tile_cases(name, answer, 3, 1, 9, needs=False)
    x = torch.ones(2, 48, 4, requires_grad=True)
    out = answer(nn.Dropout(), x, 4)
    out.sum().backward()
    differ = ((out != 0) != (x.grad != 0)).sum()
    yield "dropout, numbers that are dropped in forward or in backward alone", differ
    mlp, x = tiled_setting()
    run = measured(lambda: answer(mlp, x, TILES).square().sum().backward(), TILED_CARD, model=mlp)
    yield f"{TILED_TOKENS} tokens in {TILES} tiles within {TILED_CARD}", run


TILED = Exercise(
    "8.6",
    tiled_mlp,
    tiled_cases,
    """
    checkpoint(mlp, part, use_reentrant=False) → mlp(part)
        the tiles are cut, but autograd keeps what each of them computes: run each in a checkpoint.
    x.tensor_split(tiles, dim=1) → [x]
        the whole sequence runs at once, also when it runs again in backward: cut it into tiles
        first.
    x.tensor_split(tiles, dim=1) → x.tensor_split(tiles, dim=0)
    torch.cat(parts, dim=1) → torch.cat(parts, dim=0)
        the rows are cut, but the sequence keeps its length: tokens are dimension 1.
    x.tensor_split(tiles, dim=1) → x[:, : x.shape[1] // tiles * tiles].chunk(tiles, 1)
        tokens are left out: where `tiles` does not divide the number of tokens, some tiles have one
        more.
    torch.cat(parts, dim=1) → torch.cat(parts, dim=1).detach()
        the output is detached, or made under no_grad: no weight learns.
    x.tensor_split(tiles, → x.split(tiles,
        x.split(n) takes the length of a tile, and x.tensor_split(n) their number.
    use_reentrant=False → use_reentrant=True
        this is a reentrant checkpoint, which needs an input that requires a gradient:
        use_reentrant=False.
    x.tensor_split → x.detach().tensor_split
        x gets no gradient: it is detached before or in the tiles.
    """,
)

# 8.7


def kv_cache(config, rows, tokens, bytes_per_number):
    """Bytes of the keys and values of ``rows`` sequences of ``tokens`` tokens, over all layers."""
    width = config.num_key_value_heads * config.head_dim
    return 2 * config.num_hidden_layers * width * rows * tokens * bytes_per_number


def cache_cases(answer):
    for name, sequences, tokens, width in (
        ("Llama-2-7B", 1, 2048, 2),
        ("Llama-2-70B", 32, 2048, 2),
        ("Qwen3-0.6B", 3, 500, 1),
    ):
        config = find_model(name)[0]
        heads = f"{config.num_hidden_layers} layers, {config.num_key_value_heads} heads of 128"
        case = f"{name} ({heads}), {sequences} × {tokens:,} tokens, numbers of {8 * width} bits"
        yield case, answer(config, sequences, tokens, width)


CACHE = Exercise(
    "8.7",
    kv_cache,
    quietly(cache_cases),
    """
    2 * config → config
        only keys or only values are counted: both are kept.
    num_key_value_heads → num_attention_heads
        every query head is counted with its own keys and values: grouped heads share them, so there
        are only num_key_value_heads.
    2 * config.num_hidden_layers → 2
        this is the cache of one layer: every layer has its own cache.
    config.head_dim → config.hidden_size // config.num_attention_heads
        a head is not always hidden_size / num_attention_heads wide: the config's head_dim says.
    * rows →
        only one row is counted: each row has its own keys and values.
    * bytes_per_number → * 2
        this assumes two bytes a number: use bytes_per_number.
    * tokens → * tokens**2
        the tokens are squared: the cache has one key and one value for each token, and no scores.
    2 * config → 3 * config
        three tensors are counted: the queries of earlier tokens are never needed again, so only
        keys and values are cached.
    """,
)
