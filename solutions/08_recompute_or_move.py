# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 08 · Recompute or move
#
# *60 minutes: sections 1 to 6, with exercises 8.1 and 8.3 to 8.5. 30 more are optional. You need: lessons 01, 04 and
# 06.*
#
# Activations do not fit. A checkpoint forgets them and computes them again. They could also leave the card, wait
# somewhere else and come back. Which is cheaper, for which tensors, and on which card? After this lesson you can
#
# - write a checkpoint that repeats the cheap operations and keeps the costly ones;
# - write hooks that move activations away, and say when moving is faster than computing again;
# - recompute only as much as a budget asks for;
# - say what fills a card at 32,000 tokens.
#
# No card was at hand. Bytes are measured on the CPU or predicted. Times are computed from data sheets.

# %%
from collections import Counter
from contextlib import contextmanager

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy as Policy
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from gradmem_lib import MemoryTracker, Recipe, accounting, check, checkpoint_layers
from gradmem_lib import checkpoint_parts, count_operations, known_model, predict
from gradmem_lib import predict_first, show_frontier
from gradmem_lib.course import claims, models, texts

# %% [markdown]
# Here is a run that fails: LoRA on Llama-2-7B, with a checkpoint on each layer, and one row of 32,768 tokens. The card is
# an RTX 4090 of 24 GB.

# %%
question = "LoRA, a checkpoint a layer, one row of 32,768 tokens: the peak in GiB?"
guess_d = predict_first("8.d", question, unit="GiB")

# %%
config = known_model("Llama-2-7B")[1]
config.max_position_embeddings = 32768
row = {"batch_size": 1, "seq_len": 32768, "target": "cuda"}
lora = {"precision": "bf16", "optimizer": "adamw-fused", "lora_rank": 16}
failed = predict(config, recipe=Recipe(**lora, checkpointing="per-layer"), **row)
guess_d.reveal(measured=round(failed.peak.total / 2**30, 1), what="predicted")
print(failed.peak)

# %% [markdown]
# Which of these parts could be somewhere else, and which could be computed again? Section 4 makes this run fit.
#
# ## 1 · Repeat what is cheap
#
# Lesson 04 repeated whole layers. A layer has two kinds of operations. Matrix products and attention are nearly all
# of the work. The *elementwise* operations between them (norms, activation functions, sums) are almost none of it,
# but their results take bytes all the same. So a layer could keep the results of its products, and repeat everything
# else. Our model is the first nine layers of SmolLM2, without logits. `kept` runs a step, and returns the bytes of
# activations at their highest moment.

# %%
smol, tokenizer = models.smollm2()
smol.config.num_hidden_layers = 9
del smol.model.layers[9:]
ids = texts.batch(tokenizer, batch_size=1, seq_len=64)


def step():
    smol.zero_grad()
    smol.model(input_ids=ids).last_hidden_state.square().mean().backward()


def kept():
    with MemoryTracker(smol, live=False) as tracker:
        step()
    return max(tracker.timeline.by_category["activations"])


# %%
question = "Repeat all but products and attention: how many per cent fewer bytes?"
guess_a = predict_first("8.a", question, unit="percent")

# %% [markdown]
# PyTorch's checkpoint takes a **policy** for this: a function that it asks about every operation `op`, such as
# `torch.ops.aten.mm.default`, a matrix product. The answer is `MUST_SAVE`, or `PREFER_RECOMPUTE`. The policy
# `keep_products` keeps what is costly. Inside `with by_policy(make)`, each layer has a checkpoint with a new policy from
# `make()`. `count_operations` counts the multiplications and additions of products and attention.

# %%
KEEP, REPEAT = Policy.MUST_SAVE, Policy.PREFER_RECOMPUTE
aten = torch.ops.aten
PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default)


def keep_products(ctx, op, *args, **kwargs):
    return KEEP if op in PRODUCTS or "attention" in str(op) else REPEAT


@contextmanager
def by_policy(make):
    def two_contexts():
        return create_selective_checkpoint_contexts(make())

    smol.activation_checkpointing_enable(
        {"use_reentrant": False, "context_fn": two_contexts}
    )
    yield
    smol.activation_checkpointing_disable()


# %%
points = {}


def look(name):
    points[name] = kept(), count_operations(step)
    print(f"{name:<22}{points[name][0]:>12,} bytes{points[name][1]:>17,} operations")


look("nothing")
with by_policy(lambda: keep_products):
    look("elementwise")
guess_a.reveal(measured=round(100 - 100 * points["elementwise"][0] / points["nothing"][0]))

# %% [markdown]
# Two fifths of the bytes are gone, and no product runs twice.
# <!-- holds: round(points["elementwise"][0] / points["nothing"][0], 1) == 0.6 and points["elementwise"][1] == points["nothing"][1] -->
# A policy may also count what it is asked about.

# %% [markdown]
# ### Exercise 8.1 · a policy
#
# ●●○ · 5 minutes · trains: telling a checkpoint, operation by operation, what to keep
#
# Write `every_second_product()`, which returns a new policy. Of the matrix products of its layer, the policy keeps the
# first, the third and so on. Everything else runs again. Some versions of PyTorch ask once more in the second run, where
# `ctx.is_recompute` is true: the answers must be the same.
#
# <details><summary>Hint 1: what is asked</summary>
#
# `policy(ctx, op, *args, **kwargs)`. A product is `op in PRODUCTS`. Return `KEEP` or `REPEAT`.
#
# <details><summary>Hint 2: where to count</summary>
#
# In `counts = [0, 0]`, made inside `every_second_product`, so that each layer starts from 0:
# `counts[ctx.is_recompute] += 1`.
#
# </details></details>


# %%
def every_second_product():
    """Return policy(ctx, op, *args, **kwargs)."""
    raise NotImplementedError  # SOLUTION in gradmem_lib/course/lessons/lesson_08/exercises.py


every_second_product = check("8.1", every_second_product)

# %% [markdown]
# Now measure lesson 04's schedules, single parts of each layer (`checkpoint_parts`) and your policy. Suppose that you may
# repeat a seventh of the work. Which of them keeps the fewest bytes then?

# %%
for name, every in {"every layer": 1, "√n": "sqrt", "best": "best"}.items():
    with checkpoint_layers(smol, every):
        step()  # "best" measures the layers in its first step
        look(name)
for part in ("attention", "mlp"):
    with checkpoint_parts(smol, part):
        look(part)
with by_policy(every_second_product):
    look("every second product")

# %%
show_frontier(points, title="SmolLM2's first nine layers, 64 tokens")

# %% [markdown]
# The line is a **frontier**: no other way keeps fewer bytes for as few operations. Your policy is on it, and beats the
# MLP alone on both axes. <!-- holds: all(n < mlp for n, mlp in zip(points["every second product"], points["mlp"])) -->
# So take your policy, if you may repeat a seventh of the work.
# <!-- holds: min((n, name) for name, (n, work) in points.items() if work <= 8 / 7 * points["nothing"][1])[1] == "every second product" -->
# √n is not on it, as lesson 04 found. <!-- holds: all(n < root for n, root in zip(points["every layer"], points["√n"])) -->
# Attention alone is not on it either, although it is often recommended.
# <!-- holds: all(n < part for n, part in zip(points["elementwise"], points["attention"])) -->
# The advice is older than fused attention, which never stores the scores, so that there is little to save.

# %%
claims.show("C45")

# %% [markdown]
# ## 2 · Move
#
# What backward needs can also wait elsewhere. Under `saved_tensors_hooks(pack, unpack)`, autograd gives every tensor
# that it saves to `pack`, and keeps what `pack` returns. In backward, `unpack` gets what `pack` returned, and must
# return the tensor. PyTorch's `save_on_cpu` moves each saved tensor from the card to the memory of its computer,
# the **host**. The way between them is the **bus**. On a CPU there is nothing to move, so we count what would leave:

# %%
leaves = Counter()
weights = {p.untyped_storage().data_ptr() for p in smol.parameters()}


def pack(tensor):
    of_weight = tensor.untyped_storage().data_ptr() in weights
    leaves["weights" if of_weight else "activations"] += tensor.nbytes
    return tensor


with saved_tensors_hooks(pack, lambda tensor: tensor):
    step()
for name, nbytes in leaves.items():
    print(f"{nbytes:>12,} bytes of {name} would leave")

# %% [markdown]
# Most of it is weights, since a linear layer saves its weight too. <!-- holds: leaves["weights"] > leaves["activations"] -->
# They stay on the card anyway, so moving them gains nothing. And more activations would leave than the
# {{points["nothing"][0] / 1e6:.1f}} MB of section 1, because a tensor leaves twice if two operations save it.
# <!-- holds: leaves["activations"] > points["nothing"][0] -->

# %% [markdown]
# ### Exercise 8.3 · saved tensors that move
#
# ●●○ · 5 minutes · trains: hooks that see each tensor that autograd saves
#
# Write `pack` and `unpack` of `Disk`, which autograd calls as above. Write each tensor to a file of its own in
# `folder`. The weights stay, since they are in memory anyway. The gradients must stay the same. A step takes 3.6 MB
# now. Its budget is **1.6 MB**.
#
# <details><summary>Hint 1: the weights</summary>
#
# What autograd saves of a weight is often a view of it. `tensor.untyped_storage().data_ptr() in self.stay` finds
# them all. Return such a tensor as it is.
#
# <details><summary>Hint 2: too many bytes</summary>
#
# `torch.save` writes the whole storage of a view: `torch.save(tensor.detach().clone(), path)`.
#
# <details><summary>Hint 3: wrong gradients</summary>
#
# Number the files. An `id` or a `data_ptr` comes again as soon as a tensor is gone.
#
# </details></details></details>


# %%
class Disk:
    def __init__(self, folder, weights):
        self.folder, self.number = folder, 0
        self.stay = {w.untyped_storage().data_ptr() for w in weights}

    def pack(self, tensor):
        raise NotImplementedError  # SOLUTION in gradmem_lib/course/lessons/lesson_08/exercises.py

    def unpack(self, packed):
        raise NotImplementedError  # SOLUTION in gradmem_lib/course/lessons/lesson_08/exercises.py


Disk = check("8.3", Disk)

# %% [markdown]
# `offload_activations` does this. It moves each storage once, so nothing leaves twice.
# <!-- holds: moved.bytes < points["nothing"][0] --> From a card it moves to **pinned** memory of the host. The system may not swap this memory out, so the card can copy by itself.

# %%
question = "All that is saved moves: how many per cent of the activations stay?"
guess_b = predict_first("8.b", question, unit="percent")

# %%
from gradmem_lib import offload_activations

smol.zero_grad()
with MemoryTracker(smol, live=False) as tracker:
    with offload_activations(model=smol) as moved:
        loss = smol.model(input_ids=ids).last_hidden_state.square().mean()
    loss.backward()
stay = max(tracker.timeline.by_category["activations"])
print(f"{moved.bytes:,} bytes moved in {moved.tensors} storages, at most {stay:,} here")
guess_b.reveal(measured=round(100 * stay / points["nothing"][0]))

# %% [markdown]
# What stays is what the step is working with at that moment. The price is the trip: each byte goes there and back.
#
# ### When is the bus faster?

# %% [markdown]
# ### Exercise 8.4 · break-even
#
# ●○○ · 2 minutes · trains: seconds on a bus against seconds of arithmetic
#
# Write `break_even(nbytes, operations, bandwidth, speed)`: the time to move `nbytes` away and back, as a multiple of
# the time to compute them again by so many `operations`. `bandwidth` is in bytes a second each way, `speed` in
# operations a second.
#
# <details><summary>Hint</summary>
#
# Seconds over seconds. The bytes cross the bus twice, and nothing overlaps.
#
# </details>


# %%
def break_even(nbytes, operations, bandwidth, speed):
    raise NotImplementedError  # SOLUTION in gradmem_lib/course/lessons/lesson_08/exercises.py


break_even = check("8.4", break_even)

# %% [markdown]
# Now ask it about one layer of Llama-2-7B in bf16, on 2,048 tokens. We assume half of the speed in a card's data sheet,
# and the bus's full rate. The first four columns move all that the layer keeps: **below 1, moving is faster.** The last
# column moves only its input, the boundary, over the card's own bus, and computes the inside again.

# %%
from gradmem_lib import BUSES, find_card

seven = accounting.SHAPES["Llama-2-7B"]


def forward(tokens):
    """Operations of one layer's forward. Causal attention needs half of the pairs."""
    attention = 4 * tokens**2 * seven.hidden / 2
    return 2 * tokens * sum(seven.matrices.values()) + attention


everything = sum(accounting.block_activations(seven, 1, 2048).values())
boundary = 2 * 2048 * seven.hidden  # bytes in bf16
print(" " * 15, *(f"{bus:>11}" for bus in BUSES), "   boundary")
for name in ("T4 16GB", "RTX 3060 12GB", "RTX 4090 24GB", "A100 80GB", "H100 80GB"):
    card = find_card(name)
    ways = [(everything, bus) for bus in BUSES.values()] + [(boundary, card.bus)]
    ratios = [break_even(n, forward(2048), bus, card.half / 2) for n, bus in ways]
    print(f"{name:<15}", *(f"{ratio:>11.2f}" for ratio in ratios))

# %% [markdown]
# Take the column of your card's bus: here PCIe 3 for the T4, PCIe 5 for the H100, and PCIe 4 for the others.
# <!-- holds: [find_card(name).bus for name in ("T4 16GB", "H100 80GB", "RTX 3060 12GB", "RTX 4090 24GB", "A100 80GB")]
# == [BUSES[f"PCIe {n}"] for n in (3, 5, 4, 4, 4)] --> On a slow card moving can win.
# <!-- holds: break_even(everything, forward(2048), BUSES["PCIe 4"], find_card("RTX 3060 12GB").half / 2) < 1 -->
# On a fast card it loses. On the fastest bus, NVLink-C2C (NVIDIA's link to its own processors), it is at best equal for an H100.
# <!-- holds: break_even(everything, forward(2048), BUSES["PCIe 5"], find_card("RTX 4090 24GB").half / 2) > 1 > ratios[3] -->
# **The faster the card, the higher is the price of the trip.** But the boundary alone is cheap to move everywhere, with less than a
# twentieth of the bytes. <!-- holds: boundary < everything / 20 and ratios[-1] < 1 / 3 --> So do both: recompute the inside of each layer, and move the boundaries. Here that is
# `Recipe(checkpointing="per-layer", offload="boundaries")`. A claim about moving everything:

# %%
claims.show("C48")

# %% [markdown]
# ## 3 · As much as the budget asks
#
# A run that is a little too large may need checkpoints on a few layers only. So checkpoint the first k layers, each by
# itself, and keep the others as they are. Why the first ones? Backward comes to them last, when what the others kept
# is gone. So each further layer lowers the peak, or leaves it as it is.

# %% [markdown]
# ### Exercise 8.5 · as few layers as the budget allows
#
# ●●○ · 4 minutes · trains: searching with few predictions, on a second model
#
# `peak(k)` predicts a step's peak in bytes when the first `k` layers run again. Write
# `layers_to_recompute(peak, layers, budget)`: the smallest `k` from 0 to `layers` whose peak is at most `budget`. Some
# `k` always fits, and `peak` never grows with `k`. A prediction is slow: call `peak` at most eight times for 63 layers.
# Then a GPT-2 of 8 layers trains with your `k`, in **2.07 MB**.
#
# <details><summary>Hint 1: halve</summary>
#
# The answer lies between `low = 0` and `high = layers`. Ask in the middle. If it fits, `high = middle`.
#
# <details><summary>Hint 2: otherwise</summary>
#
# The middle does not fit, so the answer is above it: `low = middle + 1`. Stop when both are the same.
#
# </details></details>


# %%
def layers_to_recompute(peak, layers, budget):
    raise NotImplementedError  # SOLUTION in gradmem_lib/course/lessons/lesson_08/exercises.py


layers_to_recompute = check("8.5", layers_to_recompute)

# %% [markdown]
# For a recipe, `fit` searches like this with `predict`. The recipe here is LoRA on the nine layers, which needs
# {{predict(made.model.config, recipe=Recipe(lora_rank=8), batch_size=2, seq_len=128, target="cpu").peak.total / 2**20:.0f}} MiB
# and may take 430:

# %%
import copy

from gradmem_lib import fit, prepare
from gradmem_lib import step as train_step

sizes = {"batch_size": 2, "seq_len": 128, "target": "cpu"}
recipe = fit(smol.config, "430 MiB", recipe=Recipe(lora_rank=8), **sizes)
peak = predict(smol.config, recipe=recipe, **sizes).peak.total
print(f"{recipe.checkpointing}: {peak:,} bytes predicted")

# %%
made = prepare(copy.deepcopy(smol), recipe)
rows = texts.batch(tokenizer, batch_size=2, seq_len=128)
with MemoryTracker(made.model, made.optimizer, budget="430 MiB", live=False) as training:
    for _ in range(2):
        train_step(made.model, made.optimizer, {"input_ids": rows, "labels": rows}, recipe)
print(f"{training.peak.total:,} measured")

# %% [markdown]
# With the first five layers checkpointed, the run fits, and the prediction is right to the byte.
# <!-- holds: training.peak.total == peak <= 430 * 2**20 -->
# `checkpoint_layers(model, every="fit", budget="430 MiB", batch_size=2, seq_len=128)` does the same for a model of
# yours. Transformers has an option that sounds similar:

# %%
claims.show("C47")

# %% [markdown]
# ## 4 · Long sequences
#
# What grows with the number of tokens, and what with its square? The table is for one row of a 7B in bf16: all that one
# layer keeps, with eager and with fused attention, the boundaries of 32 layers, and the logits in float32.

# %%
print("tokens         eager          fused     boundaries         logits   (GiB)")
for n in (2048, 8192, 32768, 131072):
    eager = sum(accounting.block_activations(seven, 1, n, attention="eager").values())
    fused = sum(accounting.block_activations(seven, 1, n).values())
    parts = eager, fused, 32 * 2 * n * seven.hidden, 4 * n * seven.vocab
    print(f"{n:>7,}", *(f"{nbytes / 2**30:>14,.2f}" for nbytes in parts))

# %% [markdown]
# The scores of eager attention grow with the square. With fused attention all bytes grow with the number of tokens, and
# only the *time* with its square. <!-- holds: eager > 100 * fused and fused == 64 * everything --> Now repair the
# lesson's first run, with two more techniques.

# %%
changes = {"checkpointing": "per-layer", "chunked_loss": True, "offload": "boundaries"}
long = []
for name, value in changes.items():
    lora[name] = value
    long.append(predict(config, recipe=Recipe(**lora), **row))
    parts = long[-1].peak.by_category | {"total": long[-1].peak.total}
    large = (f"{part} {n / 2**30:.1f}" for part, n in parts.items() if n > 2**29)
    print(f"{name + '=' + str(value):<24}", ", ".join(large), "GiB")

# %% [markdown]
# {{long[0].peak.total / 2**30:.0f}} GiB do not fit on a card of 24. Beside the weights there are the inputs of all layers
# ({{long[2].offload_traffic_bytes / 2 / 2**30:.0f}} GiB, as in the table) and the logits with their gradients. The loss
# in chunks (lesson 05) takes the logits away. Then the peak is in the backward of a layer, and **the checkpoints'
# boundaries are the largest part of the activations**.
# <!-- holds: long[1].peak.phase == "backward" and long[2].offload_traffic_bytes > long[1].peak.by_category["activations"] -->
# When they move away, the run fits. <!-- holds: long[2].peak.total < 23 * 2**30 --> Over PCIe 4 they take
# {{8 * 2**30 / BUSES["PCIe 4"]:.1f}} s each way, and a forward takes
# {{32 * forward(32768) / (find_card("RTX 4090").half / 2):.1f}} s. (Section 2's formulas say so.)
#
# Activations fall by less than 8 GiB, because the peak moves to another moment of that backward, with more activations
# and fewer temporaries.
# <!-- holds: 0 < long[1].peak.by_category["activations"] - long[2].peak.by_category["activations"] < 8 * 2**30 - 2**28
# and long[1].peak.by_category["temporaries"] - long[2].peak.by_category["temporaries"] > 2**30 -->
# What is left beside the weights is mostly one layer, which has run again. Two thirds of its bytes are the MLP's.
# <!-- holds: abs(sum(accounting.mlp_activations(seven, 1, 2048).values()) / everything - 2 / 3) < 0.03 --> An optional section cuts these too.

# %% [markdown]
# ## 5 · Recompute, move or shrink?
#
# Here is lesson 06's chart for the run that failed. The column "at best" takes whole parts of the peak away.
# It cannot tell the boundaries from the logits, and does not know that this run has checkpoints already. So section 4 saved less.

# %%
from gradmem_lib import show_decisions

show_decisions(long[0], card="23 GiB")

# %% [markdown]
# If activations are a large part of the peak, go down this list, and predict after each step:
#
# 1. **Shrink** with what costs little: fused attention, the loss in chunks, `use_cache=False` in evaluations, and
#    micro-batches that still fill the card.
# 2. **Recompute** the elementwise operations, then whole layers, as few as the budget asks for.
# 3. **Move** the boundaries, once they are most of what is left. On a slow card, or over NVLink-C2C, even moving
#    everything can be faster.
#    <!-- holds: break_even(everything, forward(2048), BUSES["PCIe 4"], find_card("RTX 3060 12GB").half / 2) < 1 > ratios[3] -->
# 4. **Recompute in tiles** (slices of the sequence, in an optional section) when one layer alone is too large.
#
# ## 6 · What you can now do
#
# - **A policy keeps what is costly and repeats what is cheap.**
# - **Compare bytes / bandwidth with operations / speed**, before you move. Weights need not leave, and a storage leaves
#   once.
# - **Recompute as few layers as the budget asks for**, the first ones first.
# - **At long sequences** logits, then boundaries, then one layer are the peak. Each has its own answer. So the first
#   run fell from {{failed.peak.total / 2**30:.0f}} to {{long[2].peak.total / 2**30:.0f}} GiB, and fits on its card.
#
# ## Optional: count what runs again
#
# How does `count_operations` count? PyTorch's own counter is `FlopCounterMode`. First look at what it counts. Fused
# attention with 8 heads of 64 numbers, on 128 tokens, should be 4 · 8 · 128² · 64 operations:

# %%
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

q = torch.randn(1, 8, 128, 64)
with FlopCounterMode(display=False) as counter:
    F.scaled_dot_product_attention(q, q, q)
print(f"counted: {counter.get_total_flops()}   expected: {4 * 8 * 128**2 * 64:,}")

# %% [markdown]
# The counter does not know the CPU's kernel, and gives no warning.

# %% [markdown]
# ### Exercise 8.2 · what runs again
#
# ●●○ · 5 minutes · optional · trains: counting operations with a counter that does not see all of them
#
# `plain()` and `checkpointed()` each run a whole step. Write `repeated(plain, checkpointed)`: how many more operations
# the second one runs than the first. A multiplication and an addition are two. `FlopCounterMode` has no formula for the
# CPU's fused attention, so you also write `formula`: the operations of its two products, from the shapes (rows, heads,
# tokens, size of a head).
#
# <details><summary>Hint 1: the counter</summary>
#
# `with FlopCounterMode(display=False, custom_mapping={FUSED: formula}) as counter:`, then
# `counter.get_total_flops()`.
#
# <details><summary>Hint 2: the formula</summary>
#
# Queries times keys: each of `rows · heads · queries · keys` scores takes `size` multiplications and as many additions.
# Scores times values: as many again.
#
# </details></details>

# %%
FUSED = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def formula(query, key, value, *args, out_val=None, **kwargs):
    """Operations of fused attention. query, key, value: shapes (rows, heads, tokens, size of a head)."""
    ### BEGIN SOLUTION
    rows, heads, queries, size = query
    return 2 * (2 * rows * heads * queries * key[2] * size)
    ### END SOLUTION


def repeated(plain, checkpointed):
    """plain, checkpointed: functions without arguments that run forward and backward."""
    ### BEGIN SOLUTION
    counts = []
    for step in (plain, checkpointed):
        with FlopCounterMode(display=False, custom_mapping={FUSED: formula}) as counter:
            step()
        counts.append(counter.get_total_flops())
    return counts[1] - counts[0]
    ### END SOLUTION


repeated = check("8.2", repeated)

# %% [markdown]
# ## Optional: the compiler's budget
#
# `torch.compile` also recomputes as much as a budget asks for. The option
# `torch._functorch.config.activation_memory_budget` is a number from 0 (repeat all that can be repeated) to 1 (keep what
# is kept by default). The compiler knows the bytes and the operations of every tensor, and solves a **knapsack
# problem**: keep what costs most to repeat, within the budget.
#
# The cell uses `aot_module`. This is the part of `torch.compile` that splits a module's work into a forward and a
# backward, and decides what is kept between them. It still runs one operation after another, so the tracker can
# watch. The model is a chain of lesson 04. We count bytes in boundaries, and try six budgets from 1 to 0.

# %%
import torch._functorch.config as functorch_config
from functorch.compile import aot_module, min_cut_rematerialization_partition, nop

chain = models.chain(6, width=64, keeps=5)
x = torch.randn(256, 64, requires_grad=True)


def boundaries(moment):
    return round((moment.total - moment.by_category["parameters"]) / x.nbytes)


# %%
guess_c = predict_first("8.c", "Which budget has the lowest peak?", unit="of 1")

# %%
print("budget  after forward  at the peak (boundaries)")
peaks = {}
for budget in (1.0, 0.5, 0.3, 0.2, 0.1, 0.0):
    with functorch_config.patch(activation_memory_budget=budget):
        compiled = aot_module(chain, nop, partition_fn=min_cut_rematerialization_partition)
        compiled(x).square().sum().backward()  # compiles
    with MemoryTracker(chain, live=False) as tracker:
        loss = compiled(x).square().sum()
        after = boundaries(tracker.current)
        loss.backward()
    peaks[budget] = boundaries(tracker.peak)
    print(f"{budget:>6}{after:>15}{peaks[budget]:>13}")
guess_c.reveal(measured=min(peaks, key=peaks.get))

# %% [markdown]
# The smaller the budget, the less is kept after forward, as asked. But the *peak* rises again below
# {{min(peaks, key=peaks.get)}}. <!-- holds: peaks[0.2] < peaks[0.1] < peaks[0.0] --> With a budget of 0, nearly everything is repeated at the beginning of backward, and is there at once, like lesson 04's single
# segment. **The budget is for what is kept, not for the peak.** So try several, and measure. `fit`'s budget is for the
# peak.
#
# ## Optional: an MLP in tiles
#
# An MLP works on each token by itself. So it can take a long sequence in **tiles** (slices), each in a checkpoint of its
# own.
#
# ### Exercise 8.6 · an MLP in tiles
#
# ●●○ · 3 minutes · optional · trains: cutting a long sequence where tokens do not meet
#
# Write `tiled_mlp(mlp, x, tiles)`: `mlp(x)` for `x` (rows, tokens, width), with the tokens cut into at most `tiles` tiles,
# each in a checkpoint of its own. The longest tile must be as short as possible, and the gradients must stay the same.
# The budget for 250 tokens in 5 tiles is **0.8 MB**, where the plain MLP takes 1.8 MB.
#
# <details><summary>Hint 1: what does not divide evenly</summary>
#
# `x.tensor_split(tiles, dim=1)` also cuts what does not divide evenly.
#
# <details><summary>Hint 2: the rest</summary>
#
# `checkpoint(mlp, part, use_reentrant=False)` for each part, and `torch.cat(parts, dim=1)`.
#
# </details></details>


# %%
from torch.utils.checkpoint import checkpoint


def tiled_mlp(mlp, x, tiles):
    ### BEGIN SOLUTION
    parts = [
        checkpoint(mlp, part, use_reentrant=False) for part in x.tensor_split(tiles, dim=1)
    ]
    return torch.cat(parts, dim=1)
    ### END SOLUTION


tiled_mlp = check("8.6", tiled_mlp)

# %% [markdown]
# `tiled(mlp, tiles)` does the same to a module that you have. Here it works inside checkpointed layers:

# %%
from gradmem_lib import tiled

with checkpoint_layers(smol, 1):
    tiles = [tiled(layer.mlp, 8) for layer in smol.model.layers]
    look("every layer, 8 slices")
for tile in tiles:
    tile.remove()

# %% [markdown]
# A third of what "every layer" keeps is gone, for a sixth more operations: each MLP now runs three times, in forward,
# in its layer's second run and in its tiles' own.
# <!-- holds: round(3 * points["every layer, 8 slices"][0] / points["every layer"][0], 1) == 2
# and round(6 * points["every layer, 8 slices"][1] / points["every layer"][1], 1) == 7 -->
#
# ## Optional: the key-value cache
#
# A model that writes text keeps the keys and values of all tokens so far, layer by layer, so that it need not compute them
# again for the next token. Training has no use for such a cache, but many runs stop to evaluate or to generate.
#
# ### Exercise 8.7 · the key-value cache
#
# ●○○ · 3 minutes · optional · trains: what is kept of each token, and what grouped heads share
#
# Write `kv_cache(config, rows, tokens, bytes_per_number)`: the bytes of the keys and values that generation keeps of
# `rows` sequences of `tokens` tokens. The config has `num_hidden_layers`, `num_key_value_heads` and `head_dim`, the
# width of a head.
#
# <details><summary>Hint</summary>
#
# Each layer keeps one key and one value per token and key-value head. Several query heads share such a pair.
#
# </details>


# %%
def kv_cache(config, rows, tokens, bytes_per_number):
    raise NotImplementedError  # SOLUTION in gradmem_lib/course/lessons/lesson_08/exercises.py


kv_cache = check("8.7", kv_cache)

# %% [markdown]
# Compare your formula with a real forward, without and with a cache:

# %%
smol.eval()
with torch.no_grad():
    for use_cache in (False, True):
        with MemoryTracker(smol, live=False) as tracker:
            smol(input_ids=ids, use_cache=use_cache)
        print(f"use_cache={use_cache!s:<6} peak {tracker.peak.total:,}")
print("your formula:", f"{kv_cache(smol.config, 1, 64, 4):,}")

# %% [markdown]
# The difference is the cache, to the byte. It grows with every row and every token, and a training run that just fits has
# no room for it. So evaluate with `use_cache=False`, and generate few rows at a time.
#
# ## Optional: frozen layers
#
# Train only the last two of all 30 layers. The others get no gradient and keep nothing, so checkpoints have nothing to do
# there. But transformers' `activation_checkpointing_enable()` also calls `enable_input_require_grads()`:
# the embedding's output then requires a gradient. Reentrant checkpoints need this (lesson 04). What does it cost here,
# compared with no checkpoints?

# %%
question = "28 of 30 layers frozen, checkpoints on: how many times the work?"
guess_e = predict_first("8.e", question, unit="times")

# %%
smol = models.smollm2()[0].requires_grad_(False)
smol.model.layers[-2:].requires_grad_(True)
plain = count_operations(step)
smol.activation_checkpointing_enable()
more = count_operations(step) / plain
smol.disable_input_require_grads()
print(f"with it {more:.2f} times, without it {count_operations(step) / plain:.2f} times")
guess_e.reveal(measured=round(more, 2))

# %% [markdown]
# With it, backward goes on through 28 frozen layers, and each runs again, for a gradient that nobody uses. Without it,
# only two layers run again. So call `disable_input_require_grads()` where the first layers train nothing, or checkpoint
# the trained layers alone: `checkpoint_layers(smol.model.layers[-2:], 1)`.
