"""MemoryTracker against independent counters: PyTorch's own MemTracker, and the CPU allocator's events."""

import contextlib
import gc
import signal
import sys
import threading
import weakref

import nbformat
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from nbclient import NotebookClient
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from gradmem_lib.measure.budget import BudgetExceeded
from gradmem_lib.measure.timeline import Timeline
from gradmem_lib.measure.tracker import MemoryTracker
from gradmem_lib.measure.watch import Watch
from gradmem_lib.names import CATEGORIES, PHASES

LLAMA = dict(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=172,
    num_hidden_layers=3,
    num_attention_heads=4,
    max_position_embeddings=64,
    use_cache=False,
)
BERT = dict(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    hidden_dropout_prob=0,
    attention_probs_dropout_prob=0,
)
GPT2 = dict(
    vocab_size=256, n_embd=64, n_layer=2, n_head=4, n_positions=64, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
)


class Blocks(nn.Module):
    """Blocks in a row, each of which can be checkpointed, and a loss."""

    def __init__(self, blocks, head, checkpointed):
        super().__init__()
        self.blocks, self.head, self.checkpointed = nn.ModuleList(blocks), head, checkpointed

    def forward(self, x, labels):
        for block in self.blocks:
            # nothing here is random, and the tracker cannot see saved random-number states
            x = (
                checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)
                if self.checkpointed
                else block(x)
            )
        return F.cross_entropy(self.head(x.flatten(1)).float(), labels)


def conv_net(checkpointed):
    blocks = [
        nn.Sequential(
            nn.Conv2d(c, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1)
        )
        for c in (3, 32, 32)
    ]
    return Blocks(blocks, nn.Linear(32 * 16 * 16, 10), checkpointed)


def mlp(checkpointed):
    blocks = [nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(4)]
    return Blocks(blocks, nn.Linear(256, 10), checkpointed)


def hf(model_class, config_class, config, **more):
    def build(checkpointed):
        model = model_class(config_class(**config, **more))
        if checkpointed:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return model

    return build


MODELS = {
    "llama": hf(LlamaForCausalLM, LlamaConfig, LLAMA),
    "llama_gqa": hf(LlamaForCausalLM, LlamaConfig, LLAMA, num_key_value_heads=2),
    "llama_tied": hf(LlamaForCausalLM, LlamaConfig, LLAMA, tie_word_embeddings=True),
    "gpt2": hf(GPT2LMHeadModel, GPT2Config, GPT2, use_cache=False, bos_token_id=0, eos_token_id=0),
    "bert": hf(BertForMaskedLM, BertConfig, BERT),
    "cnn": conv_net,
    "mlp": mlp,
}
OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, foreach=False),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "sgd_momentum": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9, foreach=False),
}


def build(name, *, precision="float32", checkpointed=False, optimizer="adamw", seq_len=48):
    """A model, its optimizer, a batch, and one training step on it."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    model = MODELS[name](checkpointed).to(dtype).train()
    opt = OPTIMIZERS[optimizer](model.parameters())
    if name in ("cnn", "mlp"):
        x = torch.randn(32, 3, 16, 16, dtype=dtype) if name == "cnn" else torch.randn(64, 256, dtype=dtype)
        batch = (x, torch.randint(0, 10, (len(x),)))
    else:
        ids = torch.randint(0, 256, (2, seq_len))
        batch = (ids, ids.clone())

    def step():
        cast = torch.autocast("cpu", torch.bfloat16) if precision == "autocast" else contextlib.nullcontext()
        with cast:
            if name in ("cnn", "mlp"):
                loss = model(*batch)
            else:
                loss = model(input_ids=batch[0], labels=batch[1]).loss
        loss.backward()
        del loss
        opt.step()
        opt.zero_grad(set_to_none=True)

    return model, opt, batch, step


def both_peaks(model, opt, batch, step):
    """Peaks of the tracker and of PyTorch's MemTracker over one and the same step.

    The same, because MemTracker's own hooks keep some gradients a little longer: alone, it is 8192 bytes above the
    allocator's events on the checkpointed BERT, and the tracker is not.
    """
    oracle = MemTracker()
    oracle.track_external(model, opt, *batch)
    with oracle, MemoryTracker(model, opt, live=False) as tracker:
        tracker.watch(batch, "other")
        step()
    return tracker, oracle.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]


def allocator_peak(step):
    """Most bytes over those at the start, from the CPU allocator's events of one step.

    Memory that a convolution's kernel takes and gives back before it returns is left out: no dispatch mode sees it.
    """
    from torch._C._profiler import _EventType

    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        step()

    def walk(nodes, convolution=None):
        for node in nodes:
            inside = convolution or (
                node.id if "mkldnn_conv" in node.name or "convolution" in node.name else None
            )
            yield node, inside
            yield from walk(node.children, inside)

    events = sorted(
        (n.start_time_ns, n.extra_fields.alloc_size, n.extra_fields.ptr, convolution)
        for n, convolution in walk(prof.profiler.kineto_results.experimental_event_tree())
        if n.tag == _EventType.Allocation
    )
    scratch, open_blocks = set(), {}
    for i, (_, size, ptr, convolution) in enumerate(events):
        if size > 0:
            open_blocks[ptr] = (i, convolution)
        elif ptr in open_blocks:
            start, taken_by = open_blocks.pop(ptr)
            if convolution is not None and taken_by == convolution:
                scratch |= {start, i}
    return max(np.cumsum([e[1] for i, e in enumerate(events) if i not in scratch]))


@pytest.mark.parametrize("checkpointed", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("precision", ["float32", "bf16", "autocast"])
@pytest.mark.parametrize("name", MODELS)
def test_peak_equals_pytorchs_memtracker(name, precision, optimizer, checkpointed):
    model, opt, batch, step = build(name, precision=precision, checkpointed=checkpointed, optimizer=optimizer)
    step()
    tracker, expected = both_peaks(model, opt, batch, step)
    assert tracker.peak.total == expected
    assert sum(tracker.peak.by_category.values()) == tracker.peak.total
    assert sum(h.nbytes for h in tracker.largest_at_peak(10**6)) == tracker.peak.total
    assert all(n >= 0 for n in tracker.peak.by_category.values())


@pytest.mark.parametrize("checkpointed", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("name", MODELS)
def test_peak_is_the_cpu_allocators_within_a_thousandth(name, checkpointed, monkeypatch):
    # Large enough that the random-number states (5056 bytes a checkpoint), which the tracker cannot see, are small.
    for config in (LLAMA, BERT, GPT2):
        monkeypatch.setitem(config, "n_embd" if config is GPT2 else "hidden_size", 512)
    monkeypatch.setitem(LLAMA, "intermediate_size", 1024)
    model, opt, batch, step = build(name, checkpointed=checkpointed, seq_len=64)
    step()
    with MemoryTracker(model, opt, live=False) as tracker:
        tracker.watch(batch, "other")
        start = tracker.current.total
        step()
    assert tracker.peak.total - start == pytest.approx(allocator_peak(step), rel=1e-3)


def test_the_first_step_counts_states_as_they_appear():
    model, opt, batch, step = build("llama")
    with MemoryTracker(model, opt, live=False) as tracker:
        tracker.watch(batch, "other")
        step()
    states = sum(v.nbytes for s in opt.state.values() for v in s.values())
    assert tracker.current.by_category["optimizer"] == states
    seen = tracker.timeline.by_category["optimizer"]
    assert len(set(seen)) > 10 and seen == sorted(seen), "states appear one by one, while the step runs"


def test_later_steps_repeat_the_second_to_the_byte():
    model, opt, _, step = build("llama")
    step()
    peaks = []
    with MemoryTracker(model, opt, live=False) as tracker:
        step()
        for _ in range(3):
            tracker.reset_peak()
            step()
            peaks.append(tracker.peak)
    assert peaks[0] == peaks[1] == peaks[2]


def test_categories_are_what_they_say():
    model, opt, _, step = build("llama")
    parameters = sum(p.nbytes for p in model.parameters())
    with MemoryTracker(model, opt, live=False) as tracker:
        step()
        model(
            input_ids=torch.ones(1, 4, dtype=torch.long), labels=torch.ones(1, 4, dtype=torch.long)
        ).loss.backward()
        now = tracker.current.by_category
    assert now["parameters"] == now["gradients"] == parameters
    assert now["temporaries"] == 0


def test_tied_weights_are_counted_once():
    model = MODELS["llama_tied"](False)
    with MemoryTracker(model, live=False) as tracker:
        pass
    assert tracker.current.by_category["parameters"] == sum(p.nbytes for p in model.parameters())


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_activations_are_activations(reentrant):
    """A checkpointed block's internals come back in the backward pass, under their own name."""
    block = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    x = torch.randn(32, 64, requires_grad=True)
    with MemoryTracker(block, live=False) as tracker:
        y = checkpoint(block, x, use_reentrant=reentrant)
        after_forward = tracker.current.by_category["activations"]
        y.sum().backward()
    timeline = tracker.timeline
    in_backward = [
        n
        for n, phase in zip(timeline.by_category["activations"], timeline.phases, strict=True)
        if phase == "backward"
    ]
    internals = 2 * 32 * 256 * 4
    assert after_forward < internals <= max(in_backward)


@pytest.mark.parametrize("mode", ["hf", "hf_reentrant", "sequential", "offload"])
def test_every_checkpoint_mode_equals_memtracker(mode):
    model, opt, batch, step = build("llama")
    if mode.startswith("hf"):
        kwargs = {"use_reentrant": mode.endswith("reentrant")}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
    elif mode == "sequential":
        model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(6)])
        opt = OPTIMIZERS["adamw"](model.parameters())
        batch = (torch.randn(32, 64, requires_grad=True),)

        def step():
            checkpoint_sequential(model, 3, batch[0], use_reentrant=False).sum().backward()
            opt.step()
            opt.zero_grad(set_to_none=True)
            batch[0].grad = None
    else:
        plain = step

        def step():
            with torch.autograd.graph.save_on_cpu():
                plain()

    step()
    tracker, expected = both_peaks(model, opt, batch, step)
    assert tracker.peak.total == expected


def test_several_optimizers_and_frozen_parts():
    model, *_ = build("llama")
    model.model.embed_tokens.requires_grad_(False)
    first = torch.optim.AdamW(model.model.parameters(), foreach=False)
    second = torch.optim.SGD(model.lm_head.parameters(), lr=0.1, momentum=0.9)
    ids = torch.randint(0, 256, (2, 16))
    with MemoryTracker(model, [first, second], live=False) as tracker:
        for _ in range(2):
            model(input_ids=ids, labels=ids).loss.backward()
            first.step()
            second.step()
            model.zero_grad()
    states = sum(
        v.nbytes for o in (first, second) for s in o.state.values() for v in s.values() if v is not None
    )
    assert tracker.current.by_category["optimizer"] == states
    assert tracker.current.by_category["gradients"] == 0


def test_an_optimizer_that_steps_inside_the_backward_pass():
    model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(4)])
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
    size = model[0].weight.nbytes

    def step_now(p):
        optimizers[p].step()
        optimizers[p].zero_grad()

    def peak(hooked):
        handles = (
            [p.register_post_accumulate_grad_hook(step_now) for p in model.parameters()] if hooked else []
        )
        with MemoryTracker(model, live=False) as tracker:
            model(torch.randn(2, 64)).sum().backward()
        for handle in handles:
            handle.remove()
        model.zero_grad()
        return max(tracker.timeline.by_category["gradients"])

    assert peak(hooked=False) == 4 * size
    assert peak(hooked=True) == size


def test_in_the_hf_trainer(tmp_path):
    model, _, _, _ = build("llama")
    data = [{"input_ids": torch.arange(16), "labels": torch.arange(16)} for _ in range(8)]
    args = TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=2,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        optim="adamw_torch",
    )
    steps = []

    class Watch(TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            steps.append(tracker.peak.total)
            tracker.reset_peak()

    trainer = Trainer(model=model, args=args, train_dataset=data, callbacks=[Watch()])
    with MemoryTracker(model, live=False) as tracker:
        trainer.train()
    states = sum(v.nbytes for s in trainer.optimizer.state.values() for v in s.values())
    assert tracker.current.by_category["optimizer"] == states
    assert {"forward", "backward", "optimizer_step"} <= set(tracker.timeline.phases)
    assert len(steps) == 2


def test_a_learners_own_step_can_be_named():
    weight = torch.randn(64, 64, requires_grad=True)
    with MemoryTracker(live=False) as tracker:
        tracker.watch(weight, "parameters")
        (weight * 2).sum().backward()
        tracker.watch(weight.grad, "gradients")
        with tracker.phase("optimizer_step"), torch.no_grad():
            moment = torch.zeros_like(weight)
            tracker.watch(moment, "optimizer")
            weight -= 0.1 * weight.grad
    by_category = tracker.current.by_category
    assert by_category["parameters"] == by_category["gradients"] == by_category["optimizer"] == weight.nbytes
    assert tracker.peak_by_phase["optimizer_step"] == 4 * weight.nbytes
    assert max(tracker.timeline.by_category["activations"]) > 0, "a forward pass written without modules"


def test_evaluation_keeps_no_activations():
    model, *_ = build("llama")
    ids = torch.randint(0, 256, (2, 16))
    with MemoryTracker(model, live=False) as tracker, torch.no_grad():
        model(input_ids=ids)
    assert max(tracker.timeline.by_category["activations"]) == 0
    assert tracker.peak_by_phase["forward"] > tracker.current.total


def test_sparse_gradients_have_bytes_too():
    table = nn.Embedding(100, 16, sparse=True)
    with MemoryTracker(table, live=False) as tracker:
        table(torch.tensor([1, 2, 3])).sum().backward()
        now = tracker.current.by_category["gradients"]
    assert now == 3 * 16 * 4 + 3 * 8  # values and indices


def test_storages_that_are_resized():
    with MemoryTracker(live=False) as tracker:
        x = torch.zeros(100)
        x.untyped_storage().resize_(40)
        x.view(torch.uint8)
        assert tracker.current.total == 40


def test_a_dtype_change_inside_the_block_is_followed():
    model = nn.Linear(64, 64, bias=False)
    with MemoryTracker(model, live=False) as tracker:
        model.to(torch.bfloat16)
        assert tracker.current.by_category["parameters"] == 64 * 64 * 2
        assert tracker.current.total == 64 * 64 * 2


# Budgets ---------------------------------------------------------------------------------------------------------


def reachable():
    """Every dense tensor that Python can reach, by its storage's address."""
    gc.collect()
    tensors = [t for t in gc.get_objects() if issubclass(type(t), torch.Tensor) and t.layout == torch.strided]
    return {t.untyped_storage()._cdata: t for t in tensors}


@pytest.mark.parametrize("where", ["forward", "backward", "optimizer_step"])
def test_budget_raises_where_it_is_crossed_and_leaks_nothing(where):
    model, opt, batch, step = build("llama")
    with MemoryTracker(model, live=False) as tracker:
        step()
    phases = ["forward", "backward", "optimizer_step"]
    peaks = [tracker.peak_by_phase[p] for p in phases]
    model, opt, batch, step = build("llama")
    if where == "backward":
        step = forward_then_backward(model, batch)
        with MemoryTracker(model, live=False) as tracker:
            step()
        peaks = [tracker.peak_by_phase[p] for p in phases]
        model.zero_grad()
    elif where == "optimizer_step":
        with MemoryTracker(model, live=False) as tracker:
            tracker.watch(batch, "other")
            forward_then_backward(model, batch)()
        peaks[2] = tracker.peak.total + 1000
        model.zero_grad()
    budget = {"forward": peaks[0] - 1, "backward": peaks[0] + 1, "optimizer_step": peaks[2]}[where]
    before = reachable()
    with (
        pytest.raises(BudgetExceeded) as caught,
        MemoryTracker(model, opt, budget=budget, live=False) as tracker,
    ):
        step()
    error = caught.value
    assert error.snapshot.phase == where
    assert error.snapshot.total > budget == error.budget
    assert error.snapshot.total - error.asked <= budget, "not an allocation too late"
    # `caught` still holds the exception and its traceback, as a notebook does: the tensors must be gone all the same.
    model.zero_grad()
    opt.state.clear()
    leaked = [t.shape for address, t in reachable().items() if address not in before]
    assert leaked == []
    assert tracker.current.by_category["activations"] == 0, "the failed step is gone from the count as well"
    with MemoryTracker(model, opt, live=False):
        forward_then_backward(model, (batch[0][:1], batch[1][:1]))()


def test_in_a_notebook_a_failed_cell_leaks_nothing():
    """A kernel keeps the last exception, with its traceback, for its debugger; tensors must not hang on it."""
    cells = [
        """
import gc, torch
from gradmem_lib import MemoryTracker
from gradmem_lib.course import models
model = models.tiny_llama(layers=2)
optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
ids = torch.zeros(4, 64, dtype=torch.long)
def live():
    gc.collect()
    tensors = [t for t in gc.get_objects() if issubclass(type(t), torch.Tensor)]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())
before = live()
""",
        """
def step(ids):
    output = model(input_ids=ids, labels=ids)
    output.loss.backward()
with MemoryTracker(model, optimizer, budget="48 MiB") as tracker:
    step(ids)
""",
        "model.zero_grad(); print(live() - before)",  # gradients that came before the error stay, as they should
        """
with MemoryTracker(model, optimizer, budget="48 MiB") as tracker:
    step(ids[:1, :8])
print(tracker.peak.phase)
""",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c.strip()) for c in cells])
    NotebookClient(notebook, kernel_name="python3", allow_errors=True, timeout=120).execute()
    said = ["".join(o.get("text", o.get("ename", "")) for o in c.outputs).strip() for c in notebook.cells]
    assert said[1].endswith("BudgetExceeded")
    assert said[2] == "0"
    assert said[3].endswith("backward")


def forward_then_backward(model, batch):
    def step():
        model(input_ids=batch[0], labels=batch[1]).loss.backward()

    return step


def test_budget_message_says_who_holds_what():
    model, opt, batch, _ = build("llama", precision="bf16")
    with pytest.raises(BudgetExceeded) as caught, MemoryTracker(model, opt, budget="1 MiB", live=False):
        forward_then_backward(model, batch)()
    message = str(caught.value)
    for part in (
        "1,048,576 allowed",
        "asked for",
        "parameters",
        "activations",
        "largest holders",
        "micro-batch",
    ):
        assert part in message
    assert isinstance(caught.value, torch.OutOfMemoryError), (
        "code that handles a card's error handles this one"
    )


def test_a_budget_below_the_model_raises_at_the_door():
    model, opt, _, _ = build("llama")
    with (
        pytest.raises(BudgetExceeded, match="before the first step"),
        MemoryTracker(model, opt, budget=1000, live=False),
    ):
        pytest.fail("the block must not start")
    assert MemoryTracker._running is None


def test_a_budget_equal_to_the_peak_is_enough():
    model, opt, _, step = build("llama")
    step()
    with MemoryTracker(model, opt, live=False) as tracker:
        step()
    with MemoryTracker(model, opt, budget=tracker.peak.total, live=False):
        step()
    with pytest.raises(BudgetExceeded), MemoryTracker(model, opt, budget=tracker.peak.total - 1, live=False):
        step()


# Always undone ---------------------------------------------------------------------------------------------------


def hook_counts(model):
    from torch.nn.modules import module as m
    from torch.optim import optimizer as o

    return (
        len(m._global_forward_pre_hooks),
        len(m._global_forward_hooks),
        len(o._global_optimizer_pre_hooks),
        len(o._global_optimizer_post_hooks),
        len(model._forward_pre_hooks),
        sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters()),
        torch._C._len_torch_dispatch_stack(),
    )


@pytest.mark.parametrize("how", ["end", "exception", "ctrl_c", "budget", "at_the_door"])
def test_everything_is_uninstalled(how, interruptible):
    model, opt, _, step = build("llama")
    before = hook_counts(model)
    error = {"exception": ZeroDivisionError, "ctrl_c": KeyboardInterrupt, "end": None}.get(
        how, BudgetExceeded
    )
    budget = {"budget": "1 MiB", "at_the_door": 1}.get(how)
    with (
        pytest.raises(error) if error else contextlib.nullcontext(),
        MemoryTracker(model, opt, budget=budget, live=False),
    ):
        if how == "ctrl_c":
            threading.Timer(0.05, signal.raise_signal, [signal.SIGINT]).start()
            while True:
                step()
        step()
        if how == "exception":
            raise ZeroDivisionError
    assert hook_counts(model) == before
    assert MemoryTracker._running is None


def test_the_model_is_not_kept_alive():
    model, opt, _, step = build("mlp")
    with MemoryTracker(model, opt, live=False) as tracker:
        step()
    gone = weakref.ref(model)
    del model, opt, step
    gc.collect()
    assert gone() is None
    assert tracker.peak.total > 0 and tracker.largest_at_peak(1)


# What is refused -------------------------------------------------------------------------------------------------


def test_trackers_do_not_nest_and_do_not_run_twice():
    with MemoryTracker(live=False) as tracker:
        with pytest.raises(RuntimeError, match="running already"), MemoryTracker(live=False):
            pass
        torch.zeros(10)
    with pytest.raises(RuntimeError, match="make a new one"), tracker:
        pass


def test_compiled_modules_are_refused():
    compiled = torch.compile(nn.Linear(4, 4))
    with pytest.raises(RuntimeError, match=r"torch\.compile"), MemoryTracker(compiled, live=False):
        pass
    with pytest.raises(RuntimeError, match=r"torch\.compile"), MemoryTracker(live=False):
        compiled(torch.zeros(1, 4))
    module = nn.Sequential(nn.Linear(4, 4))
    module[0].compile()
    with pytest.raises(RuntimeError, match="0 is compiled"), MemoryTracker(module, live=False):
        pass


def test_a_model_that_moves_to_another_device_is_refused():
    model = nn.Linear(4, 4)
    with pytest.raises(RuntimeError, match="moved while it was tracked"), MemoryTracker(model, live=False):
        model.to("meta")
        model(torch.zeros(1, 4, device="meta"))


def test_a_model_on_several_devices_needs_a_choice():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, device="meta"))
    with pytest.raises(ValueError, match="several devices"):
        MemoryTracker(model)


@pytest.mark.parametrize(
    ("kwargs", "error", "words"),
    [
        ({"model": {"weights": 1}}, TypeError, "takes a torch.nn.Module, and was given dict"),
        ({"optimizer": "adam"}, TypeError, "takes a torch.optim.Optimizer or a list"),
        ({"budget": "2 gigs"}, ValueError, 'such as "2 GiB"'),
        ({"budget": -1}, ValueError, "positive number of bytes"),
    ],
)
def test_bad_arguments_get_a_sentence(kwargs, error, words):
    with pytest.raises(error, match=words.replace(".", r"\.")):
        MemoryTracker(**kwargs)


def test_bad_names_get_a_sentence():
    with MemoryTracker(live=False) as tracker:
        with pytest.raises(ValueError, match="choose one of parameters"):
            tracker.watch(torch.zeros(1), "weights")
        with pytest.raises(ValueError, match="choose one of idle"), tracker.phase("warm-up"):
            pass
        with pytest.raises(ValueError, match="peak"):
            tracker.by_module(at="noon")


# The timeline ----------------------------------------------------------------------------------------------------


def test_timeline_holds_the_peak_and_every_phase():
    model, opt, _, step = build("llama")
    with MemoryTracker(model, opt, live=False) as tracker:
        step()
    timeline = tracker.timeline
    assert max(timeline.totals) == tracker.peak.total == timeline.totals[timeline.peak_index]
    assert timeline.phases[timeline.peak_index] == tracker.peak.phase
    assert [sum(parts) for parts in zip(*timeline.by_category.values(), strict=True)] == timeline.totals
    assert timeline.events == sorted(timeline.events)
    order = [p for i, p in enumerate(timeline.phases) if i == 0 or timeline.phases[i - 1] != p]
    assert [p for p in order if p != "idle"] == ["forward", "backward", "optimizer_step"]


def test_thinning_keeps_the_maximum(monkeypatch):
    monkeypatch.setattr("gradmem_lib.measure.tracker.TIMELINE_SAMPLES", 64)
    model, opt, _, step = build("llama")
    with MemoryTracker(model, opt, live=False) as tracker:
        for _ in range(3):
            step()
    assert 16 <= len(tracker.timeline) <= 65
    assert max(tracker.timeline.totals) == tracker.peak.total
    assert max(tracker.timeline.decimate(10).totals) == tracker.peak.total
    assert len(tracker.timeline.decimate(10)) <= 10


def test_decimate_by_hand():
    rows = np.zeros((5, 3 + len(CATEGORIES)), dtype=np.int64)
    rows[:, 0], rows[:, 2] = range(5), [1, 9, 3, 2, 7]
    assert Timeline(rows).decimate(3).totals == [9, 3, 7]
    assert Timeline(rows).decimate(5).totals == [1, 9, 3, 2, 7]
    assert len(Timeline(rows[:0])) == 0


def test_phases_come_back_step_after_step_under_checkpointing():
    """Recomputation leaves a block's forward early, by an exception: the next forward must still be seen as one."""
    model, opt, _, step = build("llama", checkpointed=True)
    with MemoryTracker(model, opt, live=False) as tracker:
        for _ in range(3):
            step()
    phases = tracker.timeline.phases
    order = [p for i, p in enumerate(phases) if p != "idle" and (i == 0 or phases[i - 1] != p)]
    assert order == ["forward", "backward", "optimizer_step"] * 3


def test_a_forward_that_failed_leaves_the_next_one_right():
    model, opt, _, step = build("llama")
    with MemoryTracker(model, opt, live=False) as tracker:
        with pytest.raises(IndexError):
            model(input_ids=torch.full((1, 4), 10**6))
        step()
    assert tracker.peak_by_phase["forward"] > 0 and tracker.peak_by_phase["backward"] > 0
    with MemoryTracker(model, opt, live=False) as alone:
        step()
    assert tracker.timeline.by_category["activations"][-1] == alone.timeline.by_category["activations"][-1]


def test_a_step_that_failed_leaves_the_next_forward_right():
    model, _, _, step = build("mlp")

    class Broken(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure=None):
            raise ZeroDivisionError

    with MemoryTracker(model, live=False) as tracker:
        with pytest.raises(ZeroDivisionError):
            Broken(model.parameters()).step()
        step()
    assert max(tracker.timeline.by_category["activations"]) > 0
    assert tracker.peak_by_phase["forward"] > 0 and tracker.peak_by_phase["backward"] > 0


def test_an_address_that_is_in_use_again_is_another_storage():
    with MemoryTracker(live=False) as tracker:
        reused = 0
        for _ in range(100):
            x = torch.zeros(64)
            address = x.untyped_storage()._cdata
            del x
            y = torch.from_dlpack(np.zeros(16, dtype=np.float32))  # does not dispatch
            reused += y.untyped_storage()._cdata == address
            tracker.watch(y, "other")
            assert tracker.current.total == 64
            del y
    assert reused, "the allocator gave no address twice, so this test showed nothing"


def test_by_module_adds_up_to_the_peak():
    model, opt, _, step = build("llama")
    with MemoryTracker(model, opt, live=False) as tracker:
        step()
    assert sum(tracker.by_module().values()) == tracker.peak.total
    assert any(name.startswith("model.layers.1") for name in tracker.by_module())
    assert sum(tracker.by_module(depth=2).values()) == tracker.peak.total


def test_html_and_repr_are_exact():
    model, opt, _, step = build("llama")
    with MemoryTracker(model, opt, live=False) as tracker:
        step()
        assert "now" in tracker._repr_html_()
    html = tracker._repr_html_()
    assert f"{tracker.peak.total:,}" in html and f"{tracker.current.total:,}" in html
    assert repr(tracker).startswith(f"MemoryTracker(peak {tracker.peak.total:,} bytes in ")
    assert tracker.allocator is None
    assert set(tracker.peak.by_category) == set(CATEGORIES) and tracker.peak.phase in PHASES


def test_the_watch_sees_backward_threads_too():
    """Where autograd runs on its own threads (as on CUDA), counts from several threads must not be lost."""
    done = []

    def work():
        with Watch(tracker._meter.observe):
            for _ in range(500):
                torch.zeros(64)
            done.append(torch.zeros(64))

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    with MemoryTracker(live=False) as tracker:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        sys.setswitchinterval(before)
        assert tracker.current.total == 4 * 256


def test_laps_have_peaks_of_their_own_and_the_run_keeps_its_own():
    with MemoryTracker(live=False) as tracker:
        small = torch.ones(1000)
        first = tracker.lap()
        large = torch.ones(5000)
        del large
        second = tracker.lap()
        middle = torch.ones(2000)
        third = tracker.lap()
        assert [lap.total for lap in (first, second, third)] == [4000, 24000, 12000]
        assert tracker.peak == second
        assert [holder.nbytes for holder in tracker.largest_at_peak()] == [20000, 4000]
        del middle
        highest = torch.ones(9000)
    assert tracker.peak.total == 4000 + 36000
    assert [holder.nbytes for holder in tracker.largest_at_peak()] == [36000, 4000]
    assert small.numel() + highest.numel() == 10000
