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
# # 10 · Beyond one card
#
# *60 minutes: sections 1 to 8, with exercises 10.1, 10.2, 10.4, 10.6 and 10.7. 58 more are optional. You need: lessons
# 03 and 04, the dtypes of lesson 07, and LoRA in 4 bits from lesson 09.*
#
# Some models fit on no single card. Then several cards train one model together. What does each of them hold, and
# what do they send to each other? Here each card is a process on your CPU, with the same code as on cards. After this
# lesson you can
#
# - say how many bytes a card holds if the model is copied (DDP) or cut (ZeRO, FSDP), and check it in every process;
# - write DDP's averaging by hand, and shard a real model in the right order;
# - say what each way of sharing a batch among cards holds and sends;
# - plan a 70B model for two cards of 24 GB, and tell when a second card does not help.

# %%
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import init_device_mesh
from torch.distributed.fsdp import fully_shard

# %%
from gradmem_lib import CARDS, MemoryTracker, Recipe, Waterfall, check, known_model
from gradmem_lib import predict, predict_first, prepare
from gradmem_lib.course import claims, models, quiet_arguments, run_ranks

# %% [markdown]
# You have rented eight cards for lesson 07's 13B, and `Trainer` takes `fsdp=True`, which cuts the model. Each card
# should hold an eighth of the weights. Before it costs money, you try the settings in two processes on the CPU, with a small Llama of
# {{4 * llama().num_parameters():,}} bytes of weights.

# %%
ids = torch.randint(0, 257, (4, 32), generator=torch.Generator().manual_seed(0))


def llama():
    return models.tiny_llama(layers=8, hidden=64, heads=4, intermediate=172, vocab=257)


# %%
question = "Trainer with fsdp=True, in two CPU processes: bytes of weights in each?"
guess_d = predict_first("10.d", question)


# %%
def trainer_weights():
    from transformers import Trainer

    rows = [{"input_ids": row, "labels": row} for row in ids]
    with quiet_arguments(
        max_steps=1, fsdp=True, fsdp_config={"version": 2}, ddp_find_unused_parameters=False
    ) as arguments:
        trainer = Trainer(llama(), arguments, train_dataset=rows)
        trainer.train()
    net = trainer.model_wrapped
    local = [p.to_local() if hasattr(p, "to_local") else p for p in net.parameters()]
    return type(net).__name__, sum(p.nbytes for p in local)


name, nbytes = run_ranks(trainer_weights)[0]
guess_d.reveal(measured=nbytes)
print(name)

# %% [markdown]
# **Nothing is cut, and there is no warning.** <!-- holds: name == "DistributedDataParallel" --> `Trainer` leaves `fsdp`
# to accelerate, which uses FSDP on accelerators alone. So check bytes, not settings. This lesson takes FSDP from PyTorch
# itself, which runs on the CPU too. (`make_trainer` refuses FSDP: take `prepare` and `step`.)
#
# ## 1 · Ranks
#
# The processes that train together form a **group**. Each has a number, its **rank**. All run the same program, each
# on its own rows of the batch. `run_ranks` runs a function in several processes, and returns a list of what each rank
# returned. Here each rank brings a power of 10, and `all_reduce` adds them up:


# %%
def hello():
    rank, ranks = dist.get_rank(), dist.get_world_size()
    number = torch.tensor(10.0**rank)
    dist.all_reduce(number)
    print(f"one of {ranks}: the sum is {number.item():.0f}")


_ = run_ranks(hello, ranks=4, everyone=True)

# %% [markdown]
# `all_reduce` is a **collective**: every rank has to call it, and waits for the others. If one rank skips a
# collective, the others wait until they give up. This lesson needs three collectives:
#
# | collective | before | after |
# |---|---|---|
# | all-gather | each rank has a piece | each has all pieces |
# | reduce-scatter | each rank has a whole tensor | each has one piece of the sum |
# | all-reduce | each rank has a whole tensor | each has the whole sum |
#
# An all-reduce is a reduce-scatter, and then an all-gather.
#
# ## 2 · What is copied, and what is cut
#
# **Distributed data parallel (DDP)** gives every rank a copy of everything. The ranks only average their
# gradients. So it saves no memory, except for activations, as each rank has fewer rows. **ZeRO** ([Rajbhandari et
# al. 2020](https://arxiv.org/abs/1910.02054)) cuts instead of copying: each of N ranks keeps one Nth, its
# **shard**. Stage 1 cuts the optimizer states, stage 2 the gradients too, and stage 3 the weights too. PyTorch
# calls stage 3 *fully sharded data parallel* (**FSDP**).

# %% [markdown]
# ### Exercise 10.1 · what is copied, and what is cut
#
# ●○○ · 3 minutes · trains: deriving ZeRO's table from the parts of a step
#
# Mixed precision keeps weights and gradients in bf16. The optimizer keeps a float32 copy of the weights and two
# float32 moments. Write `bytes_per_rank(parameters, ranks, way)`. It returns the bytes of `(weights, gradients,
# states)` on each rank, where `way` is `"ddp"`, `"zero1"`, `"zero2"` or `"fsdp"`. `ranks` divides `parameters`.
#
# <details><summary>Hint 1: the whole</summary>
#
# 2, 2 and 12 bytes a parameter.
#
# <details><summary>Hint 2: the order</summary>
#
# ZeRO cuts the largest part first. <!-- holds: bytes_per_rank(1, 2, "zero1") == (2, 2, 12 / 2) --> Each stage cuts one part more.
#
# </details></details>


# %%
def bytes_per_rank(parameters, ranks, way):
    ### BEGIN SOLUTION
    parts = [2 * parameters, 2 * parameters, 12 * parameters]
    cut = ["ddp", "zero1", "zero2", "fsdp"].index(way)
    return tuple(n / ranks if i >= 3 - cut else n for i, n in enumerate(parts))
    ### END SOLUTION


bytes_per_rank = check("10.1", bytes_per_rank)

# %% [markdown]
# What does that mean for lesson 07's 13B on eight cards?

# %%
for way in ("ddp", "zero1", "zero2", "fsdp"):
    print(f"{way:<6}{sum(bytes_per_rank(13e9, 8, way)) / 1e9:>4.0f} GB on each card")

# %% [markdown]
# From ZeRO-1 on, these bytes fit on a card of 80 GB.
#
# Now measure it, in float32, on the small Llama. A batch has 4 rows, and each rank takes its part.


# %%
def my_batch():
    mine = ids.chunk(dist.get_world_size())[dist.get_rank()].clone()
    return {"input_ids": mine, "labels": mine}


# %%
def update(net, optimizer, batch):
    loss = net(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def track(net, optimizer, **options):
    batch = my_batch()
    update(net, optimizer, batch)  # the first one makes states and buffers
    with MemoryTracker(net, optimizer, **options) as tracker:
        update(net, optimizer, batch)
    return tracker


# %% [markdown]
# With plain AdamW, a process alone keeps 12 bytes a weight between steps: the weight and two moments.
# <!-- holds: round(measured[2][None][0] / llama().num_parameters(), 1) == 12 -->
# `measure` trains alone and in all four ways.

# %%
question = "DDP on two ranks: bytes a weight that a rank keeps between steps?"
guess_a = predict_first("10.a", question, unit="bytes a weight")


# %%
def measure(ways):
    figures = {}
    for way in ways:
        net, optimizer, _ = prepare(llama(), Recipe(sharding=way))
        tracker = track(net, optimizer, live=False)
        figures[way] = tracker.current.total, tracker.peak.total
    return figures


ways = None, "ddp", "zero1", "zero2", "fsdp"
measured = {ranks: run_ranks(measure, ways, ranks=ranks)[0] for ranks in (2, 4)}
kept = measured[2]["ddp"][0] / 429_248

# %%
guess_a.reveal(formula=16, measured=round(kept, 2))

# %% [markdown]
# DDP copies the gradients into **buckets**, so that it can send many at once. The buckets stay when the gradients are
# gone: 4 bytes a weight more. <!-- holds: round(kept, 1) == 12 + 4 --> Here is the whole table: what rank 0 keeps between steps, and its peak.

# %%
print("(MiB)      2 ranks: between    peak    4 ranks: between    peak")
for way in ways:
    row = [n / 2**20 for ranks in (2, 4) for n in measured[ranks][way]]
    print("{:<11}{:>17.2f}{:>8.1f}{:>20.2f}{:>8.1f}".format(way or "alone", *row))

# %% [markdown]
# "alone" is a process that trains without the others, on one rank's rows.
#
# - **DDP needs more than a process alone**: its buckets.
#   <!-- holds: all(measured[n]["ddp"][i] > measured[n][None][i] for n in (2, 4) for i in (0, 1)) -->
# - **ZeRO-1 cuts the states**, but has DDP's buckets. On two ranks they take what it saves.
#   <!-- holds: abs(measured[2]["zero1"][0] / measured[2][None][0] - 1) < 0.005 -->
# - **ZeRO-2 and FSDP keep the same between steps.** <!-- holds: all(abs(measured[n]["zero2"][0] - measured[n]["fsdp"][0]) < 5000 for n in (2, 4)) --> Unlike the paper's, PyTorch's ZeRO-2 cuts the weights too. It gathers
#   them in forward, and keeps them whole until backward. FSDP frees each layer's weights after its forward, so its
#   peak is lower. <!-- holds: all(measured[n]["fsdp"][1] < measured[n]["zero2"][1] for n in (2, 4)) -->
#
# Here is an update under FSDP, on both ranks:


# %%
def watch():
    net, optimizer, _ = prepare(llama(), Recipe(sharding="fsdp"))
    track(net, optimizer, title="An update under FSDP")


_ = run_ranks(watch)

# %% [markdown]
# Each layer's weights are gathered when its turn comes, and freed after it. The notches in the parameters are the
# moments between two layers.
#
# ## 3 · DDP by hand
#
# After backward, DDP leaves the mean of all ranks' gradients on every rank.

# %% [markdown]
# ### Exercise 10.2 · DDP by hand
#
# ●●○ · 4 minutes · trains: what every rank sends, and that all of them send the same
#
# Every rank has run its backward. Write `average_gradients(model)`, which every rank calls: afterwards each
# trained weight's `.grad` is the mean over the ranks. A rank may have no gradient for some weight (its rows took
# another way through the model). There the gradient counts as zeros. Frozen weights get none.
#
# <details><summary>Hint 1: the sum</summary>
#
# `dist.all_reduce(tensor)` adds up a tensor over all ranks, in place. `dist.get_world_size()` is their number.
#
# <details><summary>Hint 2: the same calls</summary>
#
# A rank that skips a weight meets the others in the wrong call. So begin with
# `if p.grad is None: p.grad = torch.zeros_like(p)`, for each `p` that requires a gradient.
#
# </details></details>


# %%
def average_gradients(model):
    ### BEGIN SOLUTION
    for p in model.parameters():
        if p.requires_grad:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
    ### END SOLUTION


average_gradients = check("10.2", average_gradients)

# %% [markdown]
# Yours sends after backward. DDP sends a bucket as soon as all gradients in it are complete, while backward
# computes the next ones. With `no_sync` from lesson 03, two micro-batches send as much as one.
#
# ## 4 · FSDP2 on a real model
#
# Under FSDP a rank keeps only its shard of each weight. It needs the whole matrix for a moment in forward, and again in
# backward. So it calls an all-gather before each use, and frees the whole matrix after it. A reduce-scatter gives each
# rank the mean gradient of its own shard.
#
# `fully_shard`, PyTorch's second FSDP (**FSDP2**), does this to any module, in place. The parameters of one call are
# a **unit**: they are gathered together in one buffer, and freed together. On cards, the next unit is gathered while one computes
# (*prefetching*), so about two units are whole at a time. Every parameter becomes a `DTensor`, a tensor that knows
# its shards. `p.to_local()` is this rank's shard.
#
# What if we call `fully_shard(model)`, and nothing else? A process alone peaks at {{measured[2][None][1] / 2**20:.1f}}
# MiB.

# %%
question = "FSDP on two ranks, the whole model as one unit: peak on a rank?"
guess_b = predict_first("10.b", question, unit="MiB")


# %%
def peak_of(wrap):
    net = wrap(llama())
    optimizer = torch.optim.AdamW(net.parameters(), foreach=False)
    return round(track(net, optimizer, live=False).peak.total / 2**20, 1)


# %%
guess_b.reveal(measured=run_ranks(peak_of, fully_shard)[0])

# %% [markdown]
# With one unit, all weights are whole from the start of forward to the end of backward, and beside them all
# gradients wait for their reduce-scatter. **This is worse than no sharding.** <!-- holds: run_ranks(peak_of, fully_shard)[0] > measured[2][None][1] / 2**20 --> With a unit for each layer, as in
# section 2, the peak was {{measured[2]["fsdp"][1] / 2**20:.1f}} MiB.
#
# The largest part of this peak is activations, so add checkpoints. <!-- holds: (parts := predict(llama().config,
# recipe=Recipe(sharding="fsdp"), batch_size=2, seq_len=32, ranks=2, target="cpu").peak.by_category)["activations"]
# == max(parts.values()) --> A checkpoint runs each layer's forward twice.
#
# ### Exercise 10.4 · a model of sharded layers
#
# ●●○ · 4 minutes · trains: units of FSDP2, and checkpoints under them
#
# Write `wrap(model, mesh)` for a Llama of transformers, and return the model. `mesh` names the ranks that share it.
# Each layer is a unit of `fully_shard`, and all other weights are one more. Each layer is also a checkpoint. A
# forward and a backward of a tiny Llama of six layers, 2 rows of 32 tokens, on one of 2 ranks may take **2,550,000
# bytes**. The gradients must equal those of one process.
#
# <details><summary>Hint 1: units</summary>
#
# `fully_shard(module, mesh=mesh)` takes all of `module`'s parameters that no unit has taken yet. So the layers
# come first.
#
# <details><summary>Hint 2: checkpoints</summary>
#
# `model.activation_checkpointing_enable({"use_reentrant": False})`. The layers are in `model.model.layers`.
#
# </details></details>


# %%
def wrap(model, mesh):
    ### BEGIN SOLUTION
    model.activation_checkpointing_enable({"use_reentrant": False})
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)
    ### END SOLUTION


wrap = check("10.4", wrap)


# %%
def yours(net):
    return wrap(net, init_device_mesh("cpu", (dist.get_world_size(),)))


print("yours, on two ranks:", run_ranks(peak_of, yours)[0], "MiB")

# %% [markdown]
# Checkpoints lower the peak from {{measured[2]["fsdp"][1] / 2**20:.1f}} to {{run_ranks(peak_of, yours)[0]}} MiB.
#
# <details><summary>More options of <code>fully_shard</code></summary>
#
# - `mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)` gathers and computes in bf16,
#   and adds up gradients in float32. The shards stay in float32: they are the master copy of lesson 07.
# - `reshard_after_forward=False` is the ZeRO-2 of section 2, with one all-gather less for each layer.
# - `offload_policy=CPUOffloadPolicy()` keeps shards, gradients and states in the host's memory (*ZeRO-Offload*).
#
# `Recipe(sharding="fsdp", precision="float32-master")`, `sharding="zero2"` and `offload="parameters"` choose these.
#
# </details>
#
# ## 5 · What no rank knows alone
#
# DDP and FSDP average gradients over the ranks. If rows are not equally long, this is lesson 03's mistake again.
# Divide each summed loss by the number of labels on *all* ranks, and multiply it by the number of ranks (exercise
# 10.5, optional). `accumulate_gradients(..., model=net)` does so.
#
# Two more things need all ranks (see the optional sections):
#
# - **clipping**: the norm is that of the whole gradient, not of a rank's shards;
# - **saving**: `torch.save(net.state_dict(), ...)` on rank 0 writes rank 0's shards alone.
#
# ## 6 · What it costs to send
#
# Ranks usually form a ring: each sends to its neighbour.
#
# ### Exercise 10.6 · what communication costs
#
# ●●○ · 3 minutes · trains: bytes over a link, and which of them accumulation saves
#
# In a ring, each rank sends `(ranks - 1) / ranks` of a tensor's bytes for an all-gather, as much for a
# reduce-scatter, and twice as much for an all-reduce. Write `communication_seconds(way, nbytes, ranks,
# micro_batches, bandwidth)` for one update of `"ddp"` (with `no_sync`), `"zero2"` (weights stay gathered from forward
# to backward) or `"fsdp"`. Weights are `nbytes`, gradients too, and a rank sends `bandwidth` bytes a second. Here FSDP
# and ZeRO-2 reduce gradients after every micro-batch. (They may also wait for the last one, with `set_requires_gradient_sync(False)`. But until then each rank keeps whole gradients: 26 GB instead of
# 3, for the 13B in bf16. So accumulation can make FSDP run out of memory: an optional section shows it.)
#
# <details><summary>Hint 1: one way after the other</summary>
#
# When does a rank need weights of other ranks, and when do gradients have to meet? Note for each way which collectives
# these are, and if they come once an update or in each micro-batch.
#
# <details><summary>Hint 2: passes</summary>
#
# | way | once an update | for each micro-batch |
# |---|---|---|
# | DDP | an all-reduce | |
# | PyTorch's ZeRO-1 | an all-reduce, an all-gather | |
# | ZeRO-2 | | an all-gather, a reduce-scatter |
# | FSDP | | two all-gathers (forward, backward), a reduce-scatter |
#
# </details></details>


# %%
def communication_seconds(way, nbytes, ranks, micro_batches, bandwidth):
    ### BEGIN SOLUTION
    passes = {"ddp": 2, "zero2": 2 * micro_batches, "fsdp": 3 * micro_batches}[way]
    return passes * nbytes * (ranks - 1) / ranks / bandwidth
    ### END SOLUTION


communication_seconds = check("10.6", communication_seconds)

# %% [markdown]
# Sending can hide behind computing, if computing takes longer. Take Llama-2-7B in bf16 with FSDP, on two cards. A
# token costs about 6 operations a weight (2 forward, 4 backward). An RTX 4090 computes {{card.half / 1e12:.0f}} trillion operations a second. We take 80 % of a
# link's rate: PCIe 4 has {{card.link / 1e9:.1f}} GB/s each way, and an H100's NVLink has {{CARDS["H100 80GB"].link / 1e9:.0f}}.
# The next cell prints how many tokens a micro-batch needs until a card computes as long as it sends:


# %%
def tokens(card):
    seconds = communication_seconds("fsdp", 2 * 6.74e9, 2, 1, 0.8 * card.link)
    return round(seconds * card.half / (6 * 6.74e9))


print("RTX 4090s over PCIe 4:", tokens(CARDS["RTX 4090 24GB"]))
print("H100s over NVLink:", tokens(CARDS["H100 80GB"]))

# %% [markdown]
# An H100's link is much faster, but so is its computing.
# <!-- holds: CARDS["H100 80GB"].link > 5 * card.link and CARDS["H100 80GB"].half > 5 * card.half --> Real cards compute below
# their full rate, so fewer tokens are enough. RTX 4090s send through the host alone, so they need more.
#
# Here is what each of N ranks holds and sends in each way. W is the bytes of the weights, and
# gradients are as many. Multiply W by (N − 1) / N for a ring.
#
# | way | a rank holds | a rank sends |
# |---|---|---|
# | DDP | all weights, gradients and states | 2 W an update |
# | PyTorch's ZeRO-1 | all weights and gradients, 1/N of the states | 2 W for gradients and W for new weights, an update (the paper's: W and W) |
# | PyTorch's ZeRO-2 | 1/N of all three; whole weights until backward | 2 W a micro-batch |
# | ZeRO-3, FSDP | 1/N of all three; two whole units | 3 W a micro-batch |
# | hybrid sharding: FSDP in each machine of n cards | 1/n of all three; two whole units | 3 W a micro-batch inside, 2 W / n between machines |
#
# All of these cut the batch by rows. Other ways cut the model, or the rows themselves: see an optional section.
#
# When not to shard:
#
# - **The model fits on one card.** Accumulate there, or take DDP, which sends once an update.
# - **Micro-batches are small and the link is slow.** Checkpoints make room for more rows, and more rows hide the sending.
# - **Only activations are too large.** FSDP does not cut them. Lessons 04 and 08 do.
#
# ## 7 · A 70B on two cards
#
# Llama-2-70B has 69 billion weights: 138 GB in bf16. Can two cards of 24 GB fine-tune it? `predict(..., ranks=2)`
# computes one rank's memory, and starts no process. `batch_size` is the rows of *one* rank.

# %%
guess_f = predict_first(
    "10.f", "QLoRA with FSDP, 1,024 tokens: peak on a card?", unit="GiB"
)

# %% [markdown]
# ### Exercise 10.7 · a 70B on two cards
#
# ●●○ · 3 minutes · trains: which part of a card's memory each choice cuts
#
# Write `two_cards()`. It returns a `Recipe` that trains adapters of rank 16 on every linear layer of Llama-2-70B, on
# two RTX 4090s of 24 GB, with a row of 1,024 tokens on each. It must fit: the check predicts one card's peak.
#
# <details><summary>Hint 1: the base</summary>
#
# 69 billion weights: 138 GB in bf16, 35 GB in 4 bits, half of that on each card if they are cut.
#
# <details><summary>Hint 2: names</summary>
#
# `precision`, `sharding`, `lora_rank`, `quantized_base`, `checkpointing`.
#
# </details></details>


# %%
def two_cards():
    ### BEGIN SOLUTION
    small = {"precision": "bf16", "quantized_base": True, "checkpointing": "per-layer"}
    return Recipe(sharding="fsdp", lora_rank=16, **small)
    ### END SOLUTION


two_cards = check("10.7", two_cards)

# %% [markdown]
# Compare it with a base in bf16, and with twice the tokens:


# %%
def seventy(tokens, ranks=2, precision="bf16", **choice):
    recipe = Recipe(precision, sharding="fsdp", checkpointing="per-layer", **choice)
    config = known_model("Llama-2-70B")[1]
    return predict(
        config, batch_size=1, seq_len=tokens, recipe=recipe, ranks=ranks, target="cuda"
    ).peak


# %%
card, qlora = CARDS["RTX 4090 24GB"], {"lora_rank": 16, "quantized_base": True}
chart = Waterfall(budget=card.nbytes, title="Llama-2-70B, one of two RTX 4090s")
short = seventy(1024, **qlora)
chart.add("LoRA, 1,024 tokens", seventy(1024, lora_rank=16))
chart.add("base in 4 bits", short)
chart.add("2,048 tokens", seventy(2048, **qlora), aside=True)
guess_f.reveal(measured=round(short.total / 2**30, 1), what="predicted")
chart

# %% [markdown]
# CUDA's context and NCCL's buffers take about a GiB more (lesson 06). So 1,024 tokens fit, and 2,048 do not. <!-- holds: short.total < card.nbytes - 2**30 < chart.bars[2].total < card.nbytes --> Most of the
# peak is the base: each rank keeps half of the 4-bit weights, and a layer or two are gathered, still in 4 bits.
# <!-- holds: short.total / 2 < short.by_category["parameters"] --> In
# bf16, half of the base alone is too large. <!-- holds: chart.bars[0].by_category["parameters"] > 2 * card.nbytes -->
# (With bitsandbytes, set `bnb_4bit_quant_storage=torch.bfloat16`. By default its 4-bit weights are uint8, and accelerate
# leaves those out when it shards: each card would keep the whole base.) The claim below counts in GB: the card's {{card.nbytes / 2**30:.1f}} GiB are {{card.nbytes / 1e9:.1f}} GB.

# %%
claims.show("C17")

# %% [markdown]
# <details><summary>And to generate text with it?</summary>
#
# Then each card also keeps the *keys and values* of all tokens so far. Llama-2-70B has
# {{known_model("Llama-2-70B")[1].num_hidden_layers}} layers. Its {{known_model("Llama-2-70B")[1].num_attention_heads}}
# query heads share {{known_model("Llama-2-70B")[1].num_key_value_heads}} heads of keys and values, of
# {{known_model("Llama-2-70B")[1].head_dim}} numbers each. In bf16 that is 80 × 2 × 8 × 128 ×
# 2 = 327,680 bytes a token. A text of 8,192 tokens takes 2.5 GiB. If each query head had keys of its own, it would be 20
# GiB.
#
# </details>
#
# ## 8 · What you can now do
#
# - **DDP copies everything**, and keeps buckets besides. ZeRO and FSDP cut states, gradients and weights. The 13B, with
#   a float32 master copy and checkpoints, takes {{predict(known_model("Llama-2-13B")[1], batch_size=1, seq_len=2048, ranks=8,
#   recipe=Recipe("float32-master", "adamw-fused", sharding="fsdp", checkpointing="per-layer"), target="cuda").peak.total
#   / 1e9:.0f}} GB on each of eight cards.
# - **FSDP gathers unit by unit.** Each layer is a unit, and the model comes last.
# - **A collective needs every rank**, in saving and in clipping too.
# - **Divide by the labels of all ranks**, and undo the mean that DDP or FSDP takes.
# - **Check bytes, not settings.**
# - **Shard only what does not fit.** FSDP sends up to three times the model's size in each micro-batch.
#   <!-- holds: 2.9 < communication_seconds("fsdp", 1, 1000, 1, 1) < 3 -->
#
# ## Optional: a puzzle of sending
#
# Eight cards of 80 GB train every weight of lesson 07's 13B, with a float32 master copy and 8 rows of 2,048 tokens on each
# card. No layer runs twice: you have no checkpoints. A puzzle has two targets: bytes, and a price in time. The price is
# counted, by exercise 10.6's rule: the GB that each card sends in one update.
#
# ### Exercise 10.8 · who sends least?
#
# ●●● · 5 minutes · optional · trains: bytes that a card holds against bytes that it sends
#
# Write a dict with `sharding` and `accumulation`, such as `{"sharding": "ddp", "accumulation": 2}`. A card may hold **78 GB** of
# tensors, and send **400 GB**. Much less is possible. (A new choice takes some seconds to predict.)
#
# <details><summary>Hint 1: what does not shrink</summary>
#
# DDP and ZeRO-1 keep all weights and gradients on each card. The activations of 8 rows are too many in every way, so there
# must be micro-batches.
#
# <details><summary>Hint 2: who needs fewer micro-batches?</summary>
#
# In each micro-batch ZeRO-2 sends less than FSDP. But what does it hold until backward, and how many rows fit beside that?
#
# </details></details>

# %%
from gradmem_lib.course import SHARING

way = {"sharding": "fsdp", "accumulation": 4}  # SOLUTION
check("10.8", way)
SHARING.show(way)

# %% [markdown]
# ZeRO-2 sends two thirds of what FSDP sends in a micro-batch. Yet here it sends more in an update, since it needs twice as
# many micro-batches.
# <!-- holds: SHARING.run({"sharding": "zero2", "accumulation": 4})[0].peak.total > 78e9
# and SHARING.run({"sharding": "zero2", "accumulation": 8})[1] > SHARING.run(way)[1] -->
#
# ## Optional: what DDP sends
#
# A *hook* sees each bucket. Here it notes the bytes that one update sends:


# %%
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel


def buckets(accumulate):
    sent, ddp = [], DistributedDataParallel(llama(), bucket_cap_mb=0.25)

    def hook(state, bucket):
        sent.append(bucket.buffer().nbytes)
        return allreduce_hook(state, bucket)

    ddp.register_comm_hook(None, hook)
    ddp(**my_batch()).loss.backward()  # from here on DDP knows the order
    sent.clear()
    if accumulate:
        with ddp.no_sync():
            ddp(**my_batch()).loss.backward()
    ddp(**my_batch()).loss.backward()
    return sent


# %%
for accumulate in (False, True):
    sent = run_ranks(buckets, accumulate)[0]
    print(f"micro-batches: {1 + accumulate}, buckets: {len(sent)}, bytes: {sum(sent):,}")

# %% [markdown]
# The buckets hold all {{sum(sent):,}} bytes of gradients, with one micro-batch and with two.
# <!-- holds: sum(sent) == 4 * llama().num_parameters() == sum(run_ranks(buckets, False)[0]) -->
#
# `gradient_as_bucket_view=True` makes each gradient a *view* of its bucket, so that there is no second copy. But
# then `zero_grad()` frees nothing.
#
# ## Optional: clip with sharded gradients
#
# `clip_grad_norm_` computes the norm of the whole gradient from the shards of all ranks. The norm of the local shards is
# another number: <!-- holds: mine < total -->


# %%
def norms():
    net = yours(llama())
    net(**my_batch()).loss.backward()
    mine = torch.stack([p.grad.to_local().norm() for p in net.parameters()]).norm()
    total = nn.utils.clip_grad_norm_(net.parameters(), max_norm=1.0).full_tensor()
    return round(mine.item(), 3), round(total.item(), 3)


for rank, (mine, total) in enumerate(run_ranks(norms)):
    print(f"rank {rank}: norm of its shards {mine}, of the gradient {total}")

# %% [markdown]
# If each rank clipped by its own norm, the shards would be scaled by different numbers.
#
# ## Optional: a sharded layer by hand
#
# With sharded weights, each rank needs a whole matrix for a moment: in forward, and again in backward. At all other
# times it has only its shard.
#
# ### Exercise 10.3 · a linear layer that is cut over ranks
#
# ●●● · 6 minutes · optional · trains: all-gather in forward and in backward, reduce-scatter after
#
# `ShardedLinear(linear)` below, for an `nn.Linear` without bias that is the same on every rank, keeps this rank's rows of
# the weight as its one parameter. Write its autograd function `Gathered`. The output is the whole layer's. The shard's
# gradient is this rank's rows of the *mean* over the ranks (no rank receives all of it), and `x.grad` is this rank's
# own. The whole weight exists only while it is used: six layers of 256 x 256 on 4 ranks may take **1,700,000 bytes**.
# `gather(shard)` and `own_mean(whole)` are given.
#
# <details><summary>Hint 1: what to save</summary>
#
# Save `x` and the shard, not the whole weight. Backward can gather it again.
#
# <details><summary>Hint 2: backward</summary>
#
# For `out = x @ weight.T`, the gradient of `x` is `d_out @ weight`. The weight's own is a product of `d_out` and `x`, in
# which all rows of all sequences are added up: `flatten(0, -2)` makes one long list of rows.
#
# <details><summary>Hint 3: which ranks</summary>
#
# Only the weight's gradient is a mean over the ranks: `own_mean(d_out.flatten(0, -2).T @ x.flatten(0, -2))`.
#
# </details></details></details>


# %%
def gather(shard):
    """The shards of all ranks (rows, columns), one below the other: (ranks * rows, columns)."""
    whole = shard.new_empty(dist.get_world_size() * len(shard), shard.shape[1])
    dist.all_gather(list(whole.chunk(dist.get_world_size())), shard)
    return whole


def own_mean(whole):
    """This rank's rows of the mean over the ranks: (ranks * rows, columns) to (rows, columns)."""
    parts = list(whole.chunk(dist.get_world_size()))
    own = torch.empty_like(parts[0])
    dist.reduce_scatter(own, parts)
    return own / dist.get_world_size()


# %%
class Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, shard):
        ### BEGIN SOLUTION
        ctx.save_for_backward(x, shard)
        return x @ gather(shard).T
        ### END SOLUTION

    @staticmethod
    def backward(ctx, d_out):
        ### BEGIN SOLUTION
        x, shard = ctx.saved_tensors
        d_weight = d_out.flatten(0, -2).T @ x.flatten(0, -2)
        return d_out @ gather(shard), own_mean(d_weight)
        ### END SOLUTION


# %%
class ShardedLinear(nn.Module):
    def __init__(self, linear):
        super().__init__()
        rows = linear.weight.detach().chunk(dist.get_world_size())[dist.get_rank()]
        self.shard = nn.Parameter(rows.clone())

    def forward(self, x):
        return Gathered.apply(x, self.shard)


ShardedLinear = check("10.3", ShardedLinear)

# %% [markdown]
# ## Optional: how often FSDP gathers
#
# Checkpoints run each layer's forward twice, and FSDP gathers a layer's weights to run it. How many all-gathers is that?
# A dispatch mode sees every operator. Here it counts collectives, first without checkpoints:


# %%
from torch.utils._python_dispatch import TorchDispatchMode


class Collectives(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = {"allgather": 0, "reduce_scatter": 0, "all_reduce": 0}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for name in self.seen:
            self.seen[name] += name in str(func)
        return func(*args, **(kwargs or {}))


# %%
def count(checkpointing):
    net, _, _ = prepare(llama(), Recipe(sharding="fsdp", checkpointing=checkpointing))
    with Collectives() as collectives:
        net(**my_batch()).loss.backward()
    return collectives.seen


print("without checkpoints:", run_ranks(count, None)[0])

# %% [markdown]
# Eight layers are gathered twice each, in forward and in backward. The rest of the model is the ninth
# unit. It is gathered once, since backward begins where forward ends.

# %%
guess_c = predict_first(
    "10.c", "All-gathers with a checkpoint on every layer?", unit="all-gathers"
)

# %%
guess_c.reveal(formula=8 * 2 + 1, measured=run_ranks(count, "per-layer")[0]["allgather"])

# %% [markdown]
# There are no more. <!-- holds: run_ranks(count, "per-layer") == run_ranks(count, None) --> Backward gathers a layer once, runs it again, computes its gradients, and frees it. So checkpoints
# under FSDP cost no more than on one card.
# <!-- holds: run_ranks(count, "per-layer")[0]["allgather"] == 8 * 2 + 1 -->

# %% [markdown]
# And accumulation? Here are four micro-batches. FSDP reduces gradients after each of them, or only after the last one
# (`waits`):


# %%
def four(waits):
    net, _, _ = prepare(llama(), Recipe(sharding="fsdp"))
    with MemoryTracker(net, live=False) as tracker, Collectives() as collectives:
        for last in (False, False, False, True):
            net.set_requires_gradient_sync(last or not waits)
            net(**my_batch()).loss.backward()
    return collectives.seen["reduce_scatter"], tracker.peak.total / 2**20


for waits in (False, True):
    often, most = run_ranks(four, waits)[0]
    print(f"waits={waits!s:<6} reduce-scatters {often:>3}, peak {most:.1f} MiB")

# %% [markdown]
# Waiting sends a quarter as often, and keeps whole gradients. <!-- holds: 4 * often == run_ranks(four, False)[0][0]
# and most > run_ranks(four, False)[0][1] --> So a run that fits without accumulation may not fit with it: accelerate and `Trainer` wait.

# %%
claims.show("C49")

# %% [markdown]
# ## Optional: save, and go on with other ranks
#
# `torch.save(net.state_dict(), ...)` on rank 0 writes rank 0's shards alone. With `torch.distributed.checkpoint`
# each rank writes its own part, and an index says what is where. Here two ranks save after one update, and train two
# more. Then four ranks load, and train the same two:


# %%
import tempfile

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


def train(folder, go_on):
    net, batch = yours(llama()), my_batch()
    optimizer = torch.optim.AdamW(net.parameters(), foreach=False)
    if not go_on:
        update(net, optimizer, batch)
    model, optim = get_state_dict(net, optimizer)
    states = {"model": model, "optim": optim}
    (dcp.load if go_on else dcp.save)(states, checkpoint_id=folder)
    set_state_dict(net, optimizer, model_state_dict=model, optim_state_dict=optim)
    losses = torch.stack([update(net, optimizer, batch) for _ in range(2)])
    dist.all_reduce(losses)
    return [round(loss, 3) for loss in (losses / dist.get_world_size()).tolist()]


# %%
folder = tempfile.TemporaryDirectory()
print("2 ranks:          ", run_ranks(train, folder.name, False)[0])
print("4 ranks, resumed: ", run_ranks(train, folder.name, True, ranks=4)[0])

# %% [markdown]
# The four ranks continue as the two do. For one ordinary file,
# `get_model_state_dict(net, options=StateDictOptions(full_state_dict=True, cpu_offload=True))` gathers the weights
# on rank 0. It is a collective: **call it on every rank**, and save on rank 0. Inside `if rank == 0:` it hangs.
#
# ## Optional: a plan, carried out
#
# The recipe for the 70B also runs here, on SmolLM2's first two layers with their real weights:


# %%
def carried_out(recipe):
    smol = models.smollm2()[0]
    smol.model.layers = smol.model.layers[:2]
    net, optimizer, _ = prepare(smol, recipe)
    return track(net, optimizer, live=False).peak.total


# %%
recipe = Recipe("bf16", sharding="fsdp", checkpointing="per-layer", **qlora)
config = known_model("SmolLM2-135M")[1]
config.num_hidden_layers = 2
found = predict(config, batch_size=2, seq_len=32, recipe=recipe, ranks=2, target="cpu")
print(f"predicted {found.peak.total:,} bytes")
print("measured ", *(f"{nbytes:,} bytes" for nbytes in run_ranks(carried_out, recipe)))

# %% [markdown]
# The prediction is exact. <!-- holds: run_ranks(carried_out, recipe) == 2 * [found.peak.total] --> And training **every weight** of the 70B, on cards of 80 GB, with 2,048 tokens on each?

# %%
for ranks, precision in ((8, "bf16"), (8, "float32-master"), (16, "float32-master")):
    whole = seventy(2048, ranks, precision).total
    print(f"{ranks:>2} cards, {precision:<15}{whole / 1e9:>4.0f} GB each")

# %% [markdown]
# Eight cards can hold it in pure bf16, where small updates are lost (lesson 07). With float32 master weights it
# takes sixteen. <!-- holds: whole < CARDS["H100 80GB"].nbytes < seventy(2048, 8, "float32-master").total --> Fewer cards can keep shards and states on the host with `offload="parameters"`. Then each
# micro-batch moves a rank's shards to the card twice, in forward and in backward, and its gradients back.
# <!-- holds: 2.9 < predict(llama().config, recipe=Recipe(sharding="fsdp", offload="parameters"), batch_size=2,
# seq_len=32, ranks=2, target="cuda").offload_traffic_bytes / (2 * llama().num_parameters()) < 3 -->
#
# ## Optional: several machines
#
# On real cards a script runs in one process for each card. `torchrun` starts the processes. With one machine:
# `torchrun --nproc-per-node=2 train.py`. With two machines of eight cards, give this command on each of them. The ranks
# find each other at the first machine's name:
#
# ```
# torchrun --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint=FIRST:29500 --rdzv-id=1 train.py
# ```
#
# The network between machines is much slower than the links inside. **Hybrid sharding** (HSDP) sends little over it:
# each machine has a whole copy of the model, sharded over its own cards. The mesh below has two dimensions for this. The
# first one says which ranks hold copies, and the second one which ranks share a copy. This is the whole script:
#
# ```python
# import torch
# import torch.distributed as dist
# from torch.distributed import init_device_mesh
# from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
# from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
# from torch.utils.data import DataLoader, DistributedSampler
# from transformers import AutoModelForCausalLM
#
# from my_rows import rows  # a list of token ids, all of one length: tensors (tokens,)
#
# MACHINES, CARDS = 2, 8  # of each machine
# mesh = init_device_mesh("cuda", (MACHINES, CARDS), mesh_dim_names=("copies", "shards"))
#
# model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-4B", dtype=torch.float32)
# model.activation_checkpointing_enable({"use_reentrant": False})
# half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
# for layer in model.model.layers:
#     fully_shard(layer, mesh=mesh, mp_policy=half)
# fully_shard(model, mesh=mesh, mp_policy=half)
# optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
#
# sampler = DistributedSampler(rows)  # each rank takes its own rows
# for epoch in range(2):
#     sampler.set_epoch(epoch)  # another order
#     for ids in DataLoader(rows, batch_size=1, sampler=sampler):
#         ids = ids.to(mesh.device_type)
#         loss = model(input_ids=ids, labels=ids, use_cache=False).loss
#         loss.backward()
#         torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
#         optimizer.step()
#         optimizer.zero_grad()
#
# options = StateDictOptions(full_state_dict=True, cpu_offload=True)
# weights = get_model_state_dict(model, options=options)  # a collective: on every rank
# if dist.get_rank() == 0:
#     torch.save(weights, "weights.pt")
# dist.destroy_process_group()
# ```
#
# `plan(..., cards=8, machines=2)`, or `gradmem plan` with `--cards 8 --machines 2`, chooses a recipe for such machines.
# It prints the recipe's script, and the command that starts it. The estimated time counts what machines send each other.
#
# Each process first loads the whole model into the *host's* memory. Eight processes that each load a 70B in bf16 need 8 ×
# 138 GB there. accelerate can let rank 0 alone read the weights, and send each rank its shards:
# `fsdp_cpu_ram_efficient_loading`. Start with `accelerate launch --config_file fsdp.yaml train.py`, and these settings:

# %%
settings = """\
distributed_type: FSDP
num_processes: 2
mixed_precision: bf16
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_reshard_after_forward: true
  fsdp_activation_checkpointing: true
  fsdp_cpu_ram_efficient_loading: true
  fsdp_state_dict_type: SHARDED_STATE_DICT
"""

# %% [markdown]
# With `mixed_precision: bf16`, accelerate first makes all trained weights float32, so each shard is a master copy.
#
# Write the file, and let accelerate read it as `accelerate launch` does:

# %%
import tempfile

from accelerate.commands.config.config_args import load_config_from_file

with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
    file.write(settings)
    file.flush()
    read = load_config_from_file(file.name)
print(read.num_processes, "processes,", read.distributed_type.value)

# %% [markdown]
# A misspelled key is an error, but not inside `fsdp_config`.
#
# ## Optional: cut the model itself
#
# | way | a rank holds | a rank sends |
# |---|---|---|
# | tensor parallel | 1/N of each layer's matrices | two all-reduces a layer, after attention and after the MLP, and two in backward, each as large as the layer's input |
# | pipeline | 1/N of the layers | a boundary forward and a gradient back, each micro-batch |
# | context parallel | 1/N of each row's activations | each layer's keys and values, forward and backward |
# | expert parallel | 1/N of the experts | each token to its experts and back, forward and backward |
#
# **Tensor parallel** cuts each matrix. An MLP's first matrix is cut by its outputs, so each rank computes some of the
# inner numbers. The second one is cut by its inputs, so each rank gets one *summand* of the result, and an all-reduce adds
# the summands. Attention is cut in the same way, by heads. PyTorch's `parallelize_module` follows a plan, which says
# for each module how it is cut. In ours, `whole` marks the tensor that the cut matrices read: it is whole on every rank,
# and so is its gradient.


# %%
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleOutput
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module


# %%
def cut_layers(net):
    whole = PrepareModuleOutput(
        output_layouts=Replicate(),
        desired_output_layouts=Replicate(),
        use_local_output=False,
    )
    plan = {"input_layernorm": whole, "post_attention_layernorm": whole}
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
        plan[name] = ColwiseParallel()  # by outputs
    plan |= {"mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel()}
    plan |= {"self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()}
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in net.model.layers:
        parallelize_module(layer, mesh, plan)


# %%
def in_tensors():
    batch = {"input_ids": ids, "labels": ids}  # the same rows on every rank
    alone, net = llama(), llama()
    cut_layers(net)
    with Collectives() as collectives:  # of the section on FSDP's gathers
        loss = net(**batch).loss
        loss.backward()
    local = [p.to_local() if hasattr(p, "to_local") else p for p in net.parameters()]
    print(f"{sum(p.nbytes for p in local):,} bytes of weights, {collectives.seen}")
    print("the loss of one process:", torch.allclose(loss, alone(**batch).loss))


_ = run_ranks(in_tensors)

# %% [markdown]
# Each rank holds {{4 * llama().num_parameters() - sum(2 * p.numel() for p in llama().model.layers.parameters()
# if p.ndim == 2):,}} of {{4 * llama().num_parameters():,}} bytes: half of the layers' matrices, and the whole embedding and head. The eight
# layers need four all-reduces each, two in forward and two in backward. Each is as large as the layer's input, and the
# rank has nothing else to do meanwhile. So tensor parallel stays within one machine, where links are fast.
#
# A **pipeline** gives each rank some of the layers. A rank sends its last boundary to the next rank, and gets its
# gradient back. With one batch at a time, only one rank would work. So the batch is cut into micro-batches, and each
# rank works on another one. `Schedule1F1B` runs *one forward, one backward* in turn, so that few micro-batches wait for
# their backward. At the start and at the end some ranks have nothing to do: the *bubble*. Here four micro-batches go
# through eight layers on two ranks:


# %%
from torch.distributed.pipelining import PipelineStage, Schedule1F1B


def stack():
    torch.manual_seed(0)  # the same weights on every rank
    return nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)])


def step_of(stage, x, goal):
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
    if dist.get_rank() == 0:
        schedule.step(x)
    else:
        schedule.step(target=goal)


# %%
def by_layers(x, goal):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    own = slice(8 * rank // ranks, 8 * (rank + 1) // ranks)
    mine, alone = stack()[own], stack()
    step_of(PipelineStage(mine, rank, ranks, torch.device("cpu")), x, goal)
    nn.functional.mse_loss(alone(x), goal).backward()
    pairs = zip(mine.parameters(), alone[own].parameters(), strict=True)
    same = all(torch.allclose(p.grad, q.grad) for p, q in pairs)
    print(f"layers {own.start} to {own.stop - 1}, the gradients of one process: {same}")


_ = run_ranks(by_layers, *torch.randn(2, 8, 64), everyone=True)

# %% [markdown]
# Each rank trains its own layers, and sends only boundaries and their gradients. (The cell makes the whole stack on each
# rank, but only to compare.)
#
# **Context parallel** cuts each *row* by its tokens, for rows that are too long for one card. All operations but
# attention work on each token by itself, so they need nothing from other ranks. Attention needs the keys and values of
# all earlier tokens. They go around the ring, rank by rank, and each rank adds up its part of the result (*ring
# attention*, [Liu et al. 2023](https://arxiv.org/abs/2310.01889)). Activations are cut by N. Weights are not, so it is
# used together with FSDP. PyTorch has a prototype, for cards:
#
# ```python
# from torch.distributed.tensor.experimental import context_parallel
#
# with context_parallel(mesh, buffers=[ids, labels, positions], buffer_seq_dims=[1, 1, 1]):
#     ...  # forward and backward
# ```
#
# Inside, these tensors are cut by tokens, in place, and `scaled_dot_product_attention` is ring attention. A model that
# shifts its labels itself would now shift each piece, and lose the label at each cut. So shift them before.
#
# **Expert parallel** is for a mixture of experts. Each rank holds some of the experts. A token goes to those that its
# layer chose for it, wherever they are, and comes back: one *all-to-all* there and one back, in forward, and the same for
# the gradients in backward. A rank whose experts are popular gets more tokens, and the others wait for it.
#
# These ways are combined, in a mesh with one dimension for each: for example tensor parallel inside a machine, a
# pipeline over a few machines, and FSDP over the rest.
#
# ## Optional: more practice
#
# ### Exercise 10.5 · uneven rows over uneven ranks
#
# ●●○ · 4 minutes · optional · trains: one mean over all labels, where each rank sees some
#
# DDP and FSDP average gradients over the ranks, whatever each rank has seen. Write `loss_scale(micro_batches)`,
# which every rank calls with its own list of label tensors, one for each micro-batch. Labels of -100 do not count.
# It returns the number by which each micro-batch's *summed* loss is multiplied, so that the averaged gradients are
# those of the mean loss over all labels of all ranks. Ranks may have different numbers of micro-batches, and one
# may have no label at all.
#
# <details><summary>Hint 1: what is undone</summary>
#
# The gradients are divided by the number of ranks afterwards. Multiply by it first.
#
# <details><summary>Hint 2: what all ranks must know</summary>
#
# The number of labels on all ranks: count your own over all micro-batches, put it in a tensor, and
# `dist.all_reduce` it once.
#
# </details></details>


# %%
def loss_scale(micro_batches):
    ### BEGIN SOLUTION
    count = torch.tensor(sum(int((labels != -100).sum()) for labels in micro_batches))
    dist.all_reduce(count)
    return dist.get_world_size() / count.item()
    ### END SOLUTION


loss_scale = check("10.5", loss_scale)
