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
# # 11 · Make it fit
#
# *60 minutes, and 8 more for optional exercises and sections. You need: lesson 06, and the techniques of lessons 07 to
# 10.*
#
# Here is a model, and here is a card. Does it fit, and which way of training it is the fastest that fits? You have seen
# every technique, so this lesson teaches no new one. It is a game of twelve puzzles, two of them optional, from easy to
# impossible. After it you can
#
# - read the parts of a peak, and choose the one change that counts;
# - say from a few sums what can never fit;
# - turn the bytes that are left over into speed.

# %%
from gradmem_lib import MemoryTracker, check, plan, predict, predict_first, prepare, step
from gradmem_lib.course import models, puzzle, stars, texts

# %% [markdown]
# ## 1 · The rules
#
# A puzzle gives you a model, a card, the rows and tokens of one update, and sometimes a condition. You write a recipe.
#
# - **Bytes.** The predicted peak, the allocator's idle blocks, CUDA's context and the workspace of its matrix
#   products (cuBLAS) must fit together.
# - **Time.** It is an estimate for each token, and the planner's best recipe sets the mark. Any recipe that fits has ★.
#   With 70 % of the planner's speed it has ★★, and with 95 % it has ★★★.
# - **Fair play.** Adapters have at least rank 16 and are on every linear layer. Plain SGD is not allowed.
# - **Try as often as you like.** Your fastest recipe counts. If it is faster than the planner's, `check` says so.
#   A new recipe takes some seconds to predict, and a 70B's takes a minute.
#
# An answer is a dictionary with options of `Recipe`. What you leave out is as in `Recipe()`: float32 and AdamW. Join
# dictionaries with `|`. Here are six that you will need often:

# %%
bf16 = {"precision": "bf16", "optimizer": "adamw-fused"}
lora = bf16 | {"lora_rank": 16}
qlora = lora | {"quantized_base": True}  # the frozen weights in 4 bits
again = {"checkpointing": "per-layer"}  # every layer runs again in backward
chunks = {"chunked_loss": True}
adafactor = {"optimizer": "adafactor-torch"}

# %% [markdown]
# Your toolbox (more: `help("gradmem_lib.Recipe")`):
#
# | option | makes smaller | what it costs |
# |---|---|---|
# | `accumulation=n` | activations, logits | gradients stay until the last micro-batch |
# | `optimizer="adamw-8bit"`, `"adafactor-torch"` | states | exactness |
# | `in_backward=True` | gradients: none waits | no accumulation |
# | `checkpointing="per-layer"` or `"first-8"`, or `every_n_layers=2` alone | activations | a second forward, in whole or part |
# | `checkpointing="attention"` or `"mlp"` | some activations | that part of each layer again |
# | `checkpointing="elementwise"` | some activations; with adapters, see below | norms, sums and activation functions again |
# | `offload="activations"`, or `"boundaries"` of checkpoints | activations | the bus |
# | `chunked_loss=True` | logits (temporaries) | one card only |
# | `lora_rank=16`, `quantized_base=True` | gradients, states, frozen weights | what can be learned; decoding |
# | `sharding="ddp"`, `"zero1"`, `"zero2"`, `"fsdp"` | what cards share | sending |
#
# `"elementwise"` keeps every product's result, and each adapter adds two. With adapters on every linear layer, the peak
# of a Llama of 8 small layers *grew* from 106 to 115 MiB.
#
# ## 2 · One puzzle together
#
# Llama-3.2-1B has 1.24 billion weights. Train every one of them on a card of 12 GB. `show` draws the card with a recipe
# on it. The first try is bf16, one row at a time:

# %%
recipe = bf16 | {"accumulation": 8}
puzzle("11.0").show(recipe)

# %% [markdown]
# The bar is longer than the card. Every weight is trained, so weights and gradients stay. Of the rest, the
# activations can shrink without changing the update. Run every layer again:

# %%
recipe = recipe | again
puzzle("11.0").show(recipe)

# %% [markdown]
# The activations fell to a quarter, and it is still not enough. Look at the temporaries: 2 GiB at the beginning of
# backward. The model knows 128,256 words, so a row of 2,048 tokens has 263 million logits. At that moment each has 8
# bytes of temporaries. Compute the loss in chunks:

# %%
recipe = recipe | chunks
puzzle("11.0").show(recipe)

# %% [markdown]
# **It fits**, with two stars. Where does the time go? Every layer runs twice. Without checkpoints, activations would need
# some 3.5 GiB more, so these bytes must come from elsewhere. The largest part is now the optimizer's states. Keep them
# in 8 bits, and run no layer twice:

# %%
recipe = bf16 | chunks | {"accumulation": 8, "optimizer": "adamw-8bit"}
puzzle("11.0").show(recipe)

# %% [markdown]
# Three stars. The last recipe needs no fewer bytes than the one before. It spends them better. So a puzzle has two halves:
#
# 1. **Make it fit.** Which part is too large, and which option shrinks that part? Change one thing at a time.
# 2. **Make it fast.** Which option costs time, and which bytes could replace it?
#
# Write an answer into each cell, run it, look, and run it again.
#
# ## 3 · Warming up
#
# The first card is not a card but a budget on the CPU. It has no context and no allocator, and at the end of this lesson
# your recipe really runs there.

# %% [markdown]
# ### Exercise 11.1 · half a GiB
#
# ●○○ · 2 minutes · trains: the first look: weights, gradients, states, and what rows cost
#
# SmolLM2-135M, 4 rows of 128 tokens, 512 MiB. Train whatever you like.
#
# <details><summary>Hint 1: every weight</summary>
#
# `bf16` needs 1.39 GiB: parameters 0.25, optimizer 0.50, activations 0.45, temporaries 0.19.
#
# <details><summary>Hint 2: adapters</summary>
#
# `lora` needs 0.88 GiB: parameters 0.26, activations 0.42, temporaries 0.19. What is left depends on the rows.
# The temporaries are logits, as in section 2.
#
# </details></details>

# %%
answer = lora | chunks | {"accumulation": 2}  # SOLUTION
found_1 = check("11.1", answer)
puzzle("11.1").show(answer)

# %% [markdown]
# ## 4 · One 7B, four cards
#
# Llama-2-7B has 6.74 billion weights: 12.6 GiB in bf16. From puzzle to puzzle the card gets smaller, and each has another
# condition. Add up the parts that do not depend on the batch first.

# %% [markdown]
# ### Exercise 11.3 · every weight of a 7B
#
# ●●○ · 2 minutes · trains: gradients that never wait, and states that hardly are
#
# 8 rows of 2,048 tokens, an RTX 4090 of 24 GB. Every weight is trained.
#
# <details><summary>Hint 1: one row at a time</summary>
#
# `bf16 | again | adafactor | {"accumulation": 8}` needs 28.2 GiB: parameters 12.6, gradients 12.6, activations 0.8.
#
# <details><summary>Hint 2: without waiting gradients</summary>
#
# `bf16 | again | {"in_backward": True}` needs 50.9 GiB: parameters 12.6, optimizer 25.1, activations 6.5, temporaries
# 3.9. Which of the four must become smaller, and by how much?
#
# </details></details>

# %%
answer = bf16 | again | chunks | adafactor | {"in_backward": True}  # SOLUTION
found_3 = check("11.3", answer)
puzzle("11.3").show(answer)

# %% [markdown]
# ### Exercise 11.4 · a 7B in 16 bits
#
# ●●○ · 2 minutes · trains: what is left of a card that is full of frozen weights
#
# 8 rows of 2,048 tokens, an RTX 4080 of 16 GB. No weight is kept in 4 bits.
#
# <details><summary>Hint 1: all rows at once</summary>
#
# `lora | again` needs 24.5 GiB: parameters 12.6, activations 6.2, temporaries 3.9.
#
# <details><summary>Hint 2: one row at a time</summary>
#
# `lora | {"accumulation": 8}` needs 25.7 GiB: parameters 12.6, activations 10.6, temporaries 0.5. What may the
# activations be at most?
#
# </details></details>

# %%
answer = lora | again | {"accumulation": 8}  # SOLUTION
found_4 = check("11.4", answer)
puzzle("11.4").show(answer)

# %% [markdown]
# ### Exercise 11.5 · a 7B, and nothing twice
#
# ●●○ · 3 minutes · trains: moving instead of computing again
#
# 8 rows of 2,048 tokens, an RTX 3060 of 12 GB. No layer runs twice: checkpoints are not allowed.
#
# <details><summary>Hint 1: the base</summary>
#
# The weights in bf16 are more than the card. In 4 bits they leave 8 GiB.
#
# <details><summary>Hint 2: one row at a time</summary>
#
# `qlora | {"accumulation": 8}` needs 16.3 GiB: parameters 3.7, activations 10.6, temporaries 0.5. The activations wait
# for their backward. Must they wait on the card?
#
# </details></details>

# %%
answer = qlora | {"accumulation": 2, "offload": "activations"}  # SOLUTION
found_5 = check("11.5", answer)
puzzle("11.5").show(answer)

# %% [markdown]
# ### Exercise 11.6 · a 7B on the smallest card
#
# ●●○ · 3 minutes · trains: the smallest card, where every part counts
#
# 8 rows of **4,096** tokens, an RTX 3070 of 8 GB. Nothing waits in the host's memory.
#
# <details><summary>Hint 1: nothing twice</summary>
#
# `qlora | chunks | {"accumulation": 8}` needs 26.8 GiB: parameters 3.7, activations 20.8, temporaries 0.3.
#
# <details><summary>Hint 2: checkpoints</summary>
#
# `qlora | again | {"accumulation": 8}` needs 8.1 GiB: parameters 3.7, activations 1.6, temporaries 1.0. It is close.
# What are temporaries at the start of backward?
#
# </details></details>

# %%
answer = qlora | again | chunks | {"accumulation": 8}  # SOLUTION
found_6 = check("11.6", answer)
puzzle("11.6").show(answer)

# %% [markdown]
# Compare the four times. Cards differ, and saved bytes cost time: layers run twice, activations cross the bus, 4 bits are
# decoded.
#
# In 11.5, gigabytes stay free. `offload` moves all activations or none, and those of one row are 10.6 GiB. Larger pieces
# hardly help: four rows at once save 2 % of the time.
#
# ## 5 · Too many of something
#
# In each of the next two puzzles, one number is far larger than in section 4: words, then tokens. Before you write a
# recipe, say which category grows with that number.

# %% [markdown]
# ### Exercise 11.7 · 128,256 words
#
# ●●○ · 3 minutes · trains: what a large vocabulary costs, and where
#
# Llama-3-8B, 8 rows of 4,096 tokens, an RTX 4090 of 24 GB. No weight is kept in 4 bits.
#
# <details><summary>Hint 1: one row at a time</summary>
#
# `lora | again | {"accumulation": 8}` needs 24.5 GiB: parameters 15.0, activations 3.0, temporaries 3.9.
#
# <details><summary>Hint 2: all rows at once</summary>
#
# `lora | again | chunks` needs 32.9 GiB: parameters 15.0, activations 12.8, temporaries 2.9. Between one row and eight
# there are others, and larger pieces are faster.
#
# </details></details>

# %%
answer = lora | again | chunks | {"accumulation": 4}  # SOLUTION
found_7 = check("11.7", answer)
puzzle("11.7").show(answer)

# %% [markdown]
# ### Exercise 11.8 · 32,768 tokens
#
# ●●● · 3 minutes · trains: what grows with a row's length, when nothing else can be cut
#
# Mistral-7B, **one** row of 32,768 tokens, an RTX 4090 of 24 GB. One row cannot be cut into micro-batches.
#
# <details><summary>Hint 1: the usual things</summary>
#
# `qlora | again` needs 27.1 GiB: parameters 3.9, activations 13.4, temporaries 7.8.
#
# <details><summary>Hint 2: what a checkpoint keeps</summary>
#
# `lora | again | chunks` needs 34.9 GiB: parameters 13.6, activations 16.2, temporaries 2.9. Checkpoints keep the
# boundaries, the inputs of all layers: 32,768 tokens × 4,096 numbers × 2 bytes, times 32 layers.
#
# </details></details>

# %%
answer = qlora | again | chunks | {"offload": "boundaries"}  # SOLUTION
found_8 = check("11.8", answer)
puzzle("11.8").show(answer)

# %% [markdown]
# Words cost temporaries, and tokens cost activations. (In an optional puzzle, experts cost parameters.)
#
# ## 6 · Several cards
#
# From here on several cards train one model, so a recipe needs `sharding`. Rows are those of *all* cards, and
# `accumulation` cuts what each card gets. The picture shows one of the cards. Divide what is cut by the number of
# cards, and ask what each card still needs for itself. (NCCL, the library that sends, needs bytes too.)

# %% [markdown]
# ### Exercise 11.10 · every weight of a 13B
#
# ●●● · 3 minutes · trains: what several cards share, and what each needs for itself
#
# Llama-2-13B, 16 rows of 2,048 tokens, eight RTX 3090s of 24 GB. Every weight is trained.
#
# <details><summary>Hint 1: gathered until backward</summary>
#
# `bf16 | again | {"sharding": "zero2"}` needs 39.7 GiB: parameters 27.3, optimizer 6.1, activations 2.9.
#
# <details><summary>Hint 2: float32 copies</summary>
#
# `bf16 | again | {"sharding": "fsdp", "precision": "float32-master"}` needs 30.9 GiB: parameters 7.3, gradients 5.6,
# optimizer 12.1, activations 0.9.
#
# </details></details>

# %%
answer = bf16 | again | {"sharding": "fsdp"}  # SOLUTION
found_10 = check("11.10", answer)
puzzle("11.10").show(answer)

# %% [markdown]
# ### Exercise 11.11 · a 70B on two cards
#
# ●●● · 3 minutes · trains: a model that no card of the two can hold
#
# Llama-2-70B, 4 rows of 1,024 tokens, two RTX 4090s of 24 GB. In lesson 10 each card had one row. Now each has two.
#
# <details><summary>Hint 1: in 16 bits</summary>
#
# `lora | again | {"sharding": "fsdp"}` needs 77.8 GiB: parameters 67.0, activations 2.5, temporaries 3.2.
#
# <details><summary>Hint 2: in 4 bits</summary>
#
# `qlora | again | {"sharding": "fsdp"}` needs 25.3 GiB: parameters 18.5, activations 3.1, temporaries 1.1. One row at a
# time comes very close. Must the activations stay on the card?
#
# </details></details>

# %%
answer = qlora | again | {"sharding": "fsdp", "offload": "boundaries"}  # SOLUTION
found_11 = check("11.11", answer)
puzzle("11.11").show(answer)

# %% [markdown]
# ## 7 · The one that cannot be done
#
# The last puzzle has no recipe. You can try some in this cell:

# %%
puzzle("11.12").show(bf16 | again | adafactor | {"accumulation": 8})

# %% [markdown]
# ### Exercise 11.12 · the impossible one
#
# ●●● · 2 minutes · trains: naming what no recipe makes small enough
#
# Llama-2-7B, 8 rows of 2,048 tokens, an RTX 4090 of 24 GB. Every weight is trained, and the optimizer steps *after*
# backward. The bar names six categories: `"parameters"`, `"gradients"`, `"optimizer"`, `"activations"`, `"temporaries"`,
# `"other"`. One of them forbids it, whatever the recipe. Which?
#
# <details><summary>Hint 1: one after another</summary>
#
# Of each category, ask for the option that makes it as small as possible. How many bytes are left then?
#
# <details><summary>Hint 2: puzzle 11.3</summary>
#
# It is this model on this card, and it can be done. Which part was missing in its picture?
#
# </details></details>

# %%
answer = "gradients"  # SOLUTION
found_12 = check("11.12", answer)

# %% [markdown]
# ## 8 · Your stars

# %%
stars()

# %% [markdown]
# `python -m gradmem_lib progress --all` shows the same table. A puzzle with one star or two is worth a second visit.
#
# ## 9 · Carry it out
#
# So far everything was predicted. Is it true? The first puzzle fits on your machine. The next cells train SmolLM2, with
# real weights and real text, by the recipe that `check("11.1", ...)` handed back. It is yours if yours passed, and
# the planner's otherwise. A first step on eight tokens of each row makes the optimizer's states, and the second is the
# puzzle's. So is the budget: one byte above 512 MiB would be an error.

# %%
question = "SmolLM2 by the recipe of 11.1: by how many bytes is the predicted peak wrong?"
guess_a = predict_first("11.a", question)

# %%
smol, tokenizer = models.smollm2()
recipe = puzzle("11.1").recipe(found_1)
sizes = {"batch_size": puzzle("11.1").rows, "seq_len": puzzle("11.1").tokens}
predicted = predict(smol.config, **sizes, recipe=recipe, target="cpu").peak
ids = texts.batch(tokenizer, **sizes)
short, batch = ({"input_ids": rows, "labels": rows} for rows in (ids[:, :8], ids))

# %%
net, optimizer, _ = prepare(smol.train(), recipe)
with MemoryTracker(net, optimizer, budget="512 MiB", title="puzzle 11.1") as tracker:
    step(net, optimizer, short, recipe)  # makes the optimizer's states
    step(net, optimizer, batch, recipe)

# %%
print(f"predicted {predicted.total:,} bytes, in {predicted.phase}")
print(f"measured  {tracker.peak.total:,} bytes, in {tracker.peak.phase}")
guess_a.reveal(measured=abs(predicted.total - tracker.peak.total))

# %% [markdown]
# The prediction is right to the byte, and the model trains within half a GiB. Its weights in float32 alone are more.
#
# ## 10 · Your model, your card
#
# Now write your own model, card, rows and tokens into this cell. `plan` knows more than 150 models by
# name, and takes any config of transformers. For a large model it may need a minute.

# %%
ask = {"card": "RTX 3070 8GB", "seq_len": 1024, "global_batch": 8, "method": "qlora"}
yours = plan("Qwen3-1.7B", **ask)
print(yours.best)
print(yours.code)

# %% [markdown]
# The last lines are its training program.
#
# ## 11 · What you can now do
#
# - **Add up first.** In most puzzles, weights, gradients and states are more than half of the bytes, and no batch is
#   small enough to change them.
# - **Then look at the peak.** The largest part that an option can shrink comes next, one change at a time.
# - **Spend what is left.** A recipe that merely fits pays for memory with time.
# - **Some things cannot be done.** A few sums say so before you rent the card.
# - **Measure one step.** Then you know.
#
# You came with a run that was out of memory. Now you know why, before the first step. Go and train something.
#
# ## More practice
#
# ### Exercise 11.2 · every weight of GPT-2 XL
#
# ●●○ · 2 minutes · optional · trains: which optimizer's states a small card has room for
#
# GPT-2 XL, 8 rows of 1,024 tokens, an RTX 3070 of 8 GB. Every weight is trained.
#
# <details><summary>Hint 1: the first try</summary>
#
# `bf16 | again | {"accumulation": 8}` needs 13.5 GiB: parameters 2.9, gradients 2.9, optimizer 5.8, activations 0.3.
#
# <details><summary>Hint 2: states in 8 bits</summary>
#
# `bf16 | again | {"accumulation": 8, "optimizer": "adamw-8bit"}` needs 10.5 GiB: parameters 2.9, gradients 2.9,
# optimizer 2.9. By how much is it too long, and what would be left without any states?
#
# </details></details>

# %%
answer = bf16 | again | adafactor | {"accumulation": 8}  # SOLUTION
found_2 = check("11.2", answer)
puzzle("11.2").show(answer)

# %% [markdown]
# ### Exercise 11.9 · a mixture of experts
#
# ●●● · 3 minutes · optional · trains: weights that a token hardly uses, and that are there all the same
#
# OLMoE-1B-7B, 8 rows of 2,048 tokens, an RTX 4080 of 16 GB. Each layer has 64 experts, and a token goes through 8 of
# them. The other 56 wait on the card too.
#
# <details><summary>Hint 1: one row at a time</summary>
#
# `lora | {"accumulation": 8}` needs 19.6 GiB: parameters 12.9, activations 4.5, temporaries 0.8.
#
# <details><summary>Hint 2: 4 bits</summary>
#
# `qlora | {"accumulation": 8}` needs 19.2 GiB: parameters 12.5, activations 4.5, temporaries 0.8. Here, 4 bits are for
# linear layers, and experts are no linear layers.
#
# <details><summary>Hint 3: when it fits with one star</summary>
#
# One row at a time is 4 GiB too long. Running every layer again gives back enough, and takes the most time. The toolbox
# has a row that repeats less.
#
# </details></details></details>

# %%
answer = lora | chunks | {"checkpointing": "elementwise", "accumulation": 8}  # SOLUTION
found_9 = check("11.9", answer)
puzzle("11.9").show(answer)
