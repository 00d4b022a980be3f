"""Schedules against brute force and against measured bytes; checkpointed layers against plain ones, bit by bit."""

import copy
import itertools
import math
import pickle
import warnings
from functools import cache

import pytest
import torch
import torch.nn.functional as F
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gradmem_lib.compat import stand_in
from gradmem_lib.course import models
from gradmem_lib.measure.budget import BudgetExceeded
from gradmem_lib.measure.tracker import MemoryTracker
from gradmem_lib.techniques.checkpointing import checkpoint_layers
from gradmem_lib.techniques.schedules import best_segments, extra_forwards, schedule_peak, uniform_segments

# Schedules as lists --------------------------------------------------------------------------------------------------


def all_flat(n):
    """Every way to cut n layers into segments, by deciding at each of the n - 1 joints."""
    for cuts in itertools.product((False, True), repeat=n - 1):
        ends = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), n]
        yield [stop - start for start, stop in itertools.pairwise(ends)]


@cache
def all_nested(n):
    """Every schedule of n layers whose segments may be schedules of at least two segments themselves."""
    found = []
    for flat in all_flat(n):
        choices = [[k, *(s for s in all_nested(k) if len(s) > 1)] if k < n else [k] for k in flat]
        found += [list(items) for items in itertools.product(*choices)]
    return found


def slow_peak(segments, internal, boundary, temporaries=0):
    """The bytes at each layer's backward, by keeping the set of what is in memory. Slower than the library's way."""

    def lowest(items, start, held):
        tops = []
        for item in items:
            span = range(start, start + sum_all(item))
            if isinstance(item, int):
                inside = held | {("x", j) for j in span} | {("a", j) for j in span}
                tops.append(max(size({t for t in inside if t[1] <= j}) + temporaries for j in span))
            else:
                tops.append(lowest(item, start, held))
            held = held | {("x", start)}
            start = span.stop
        return max(tops)

    def size(things):
        return sum((internal if what == "a" else boundary)[j] for what, j in things)

    assert sum_all(segments) == len(internal)
    return lowest(segments, 0, set())


def sum_all(item):
    return item if isinstance(item, int) else sum(map(sum_all, item))


def slow_extra(segments, keep_last=True):
    """Forward calls beyond the first, layer by layer: every segment around a layer runs it once more, unless kept."""

    def runs(item, again):
        if isinstance(item, int):
            return [again] * item
        return [r for i, part in enumerate(item) for r in runs(part, again + (i < len(item) - 1))]

    last = [True] * (len(segments) - 1) + [not keep_last]
    return sum(sum(runs(part, again)) for part, again in zip(segments, last, strict=True))


GRID = [(0, 1), (1, 4), (1, 2), (1, 1), (5, 1), (23, 1), (3, 0)]  # a, x


@pytest.mark.parametrize("fraction", [0, 0.25, 0.5, 0.75, 1.0])
@pytest.mark.parametrize("n", range(1, 13))
def test_the_best_schedule_is_the_best_of_all(n, fraction):
    schedules = [s for s in all_flat(n) if slow_extra(s) <= fraction * n]
    for a, x in GRID:
        found = best_segments(n, a, x, fraction, temporaries=2)
        key = (slow_peak(found, [a] * n, [x] * n, 2), slow_extra(found), x * (len(found) - 1))
        # the library's own peak here, for speed; it is compared with slow_peak below
        best = min(
            (schedule_peak(s, a, x, temporaries=2), extra_forwards(s), x * (len(s) - 1)) for s in schedules
        )
        assert key == best, (a, x, found)


@pytest.mark.parametrize("fraction", [1.5, 2.0, 3.0])
@pytest.mark.parametrize("n", range(1, 8))
def test_with_more_than_one_extra_forward_it_is_the_best_of_all_nested_ones(n, fraction):
    for a, x in GRID:
        found = best_segments(n, a, x, fraction)
        assert slow_extra(found) <= fraction * n
        best = min(
            (schedule_peak(s, a, x), extra_forwards(s))
            for s in all_nested(n)
            if extra_forwards(s) <= fraction * n
        )
        assert (slow_peak(found, [a] * n, [x] * n), slow_extra(found)) == best, (a, x, found)


def test_peak_and_extra_forwards_agree_with_their_slow_twins_on_every_schedule():
    internal, boundary = [5, 1, 0, 7, 2, 3, 9], [2, 1, 4, 1, 3, 1, 2]
    for n in range(1, 8):
        for s in all_nested(n):
            args = internal[:n], boundary[:n]
            assert schedule_peak(s, *args, temporaries=3) == slow_peak(s, *args, 3)
            assert extra_forwards(s) == slow_extra(s)
            assert extra_forwards(s, keep_last=False) == slow_extra(s, keep_last=False)


whole = st.integers(0, 40)
tenths = st.integers(0, 400).map(lambda n: n / 8)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.data(), st.sampled_from([whole, tenths]), st.integers(1, 9), st.floats(0, 1))
def test_the_best_schedule_of_unequal_layers_is_the_best_of_all(data, number, n, fraction):
    sizes = st.lists(number, min_size=n, max_size=n)
    a, x, t = data.draw(sizes), data.draw(sizes), data.draw(sizes)
    found = best_segments(n, a, x, fraction, temporaries=t)
    assert extra_forwards(found) <= fraction * n + 1e-9

    def key(segments):
        starts = list(itertools.accumulate([0, *segments[:-1]]))
        kept = sum(x[start] for start in starts[:-1])
        return schedule_peak(segments, a, x, temporaries=t), extra_forwards(segments), kept

    assert key(found) == min(key(s) for s in all_flat(n) if extra_forwards(s) <= fraction * n + 1e-9)


def test_unequal_layers_get_plain_segments_however_many_forwards_are_allowed():
    a = list(range(1, 13))
    assert best_segments(12, a, 1, 3.0) == best_segments(12, a, 1, 1.0)


def test_long_segments_come_first_and_more_work_buys_a_lower_peak():
    peaks = []
    for extra in (0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0):
        segments = best_segments(64, 4, 1, extra)
        peaks.append(schedule_peak(segments, 4, 1))
    assert peaks == sorted(peaks, reverse=True) and len(set(peaks)) == len(peaks)
    flat = best_segments(64, 4, 1)
    assert flat == sorted(flat, reverse=True) and flat[0] >= 4 and flat[-1] == 1
    assert any(isinstance(item, list) for item in best_segments(64, 4, 1, 2.0))


def test_a_peak_in_real_bytes_is_exact_and_does_not_overflow():
    x = 4096 * 4096 * 2
    a = 23 * x + 12_345
    found = best_segments(96, a, x)
    assert schedule_peak(found, a, x) == slow_peak(found, [a] * 96, [x] * 96)
    assert extra_forwards(best_segments(512, 4, 1)) <= 512


def test_sizes_may_be_numpy_numbers_and_fractions():
    import numpy as np

    assert best_segments(9, np.int64(4), 1) == best_segments(9, 4.0, 1.0) == best_segments(9, 4, 1)
    assert best_segments(9, np.full(9, 4), [1] * 9) == best_segments(9, 4, 1)
    assert best_segments(9, 0.4, 0.1) == best_segments(9, 4, 1)


def test_uniform_segments_have_a_short_last_one():
    assert uniform_segments(9, 4) == [4, 4, 1]
    assert uniform_segments(8, 4) == [4, 4]
    assert uniform_segments(3, 8) == [3]


@pytest.mark.parametrize(
    "call",
    [
        lambda: uniform_segments(0, 3),
        lambda: uniform_segments(9, 0),
        lambda: uniform_segments(9, True),
        lambda: best_segments(0, 1, 1),
        lambda: best_segments(4, [1, 1], 1),
        lambda: best_segments(4, -1, 1),
        lambda: best_segments(4, math.nan, 1),
        lambda: best_segments(4, 1, 1, -0.5),
        lambda: best_segments(4, 1, 1, math.inf),
        lambda: best_segments(4, 1, 1, "all"),
        lambda: best_segments(4, 1, 1, 0.5, keep_last=False),
        lambda: best_segments(4, 1, 1, tail=-1),
        lambda: best_segments(4, "5 x", 1),
        lambda: schedule_peak([2, 0], 1, 1),
        lambda: schedule_peak([], 1, 1),
        lambda: schedule_peak([2, []], 1, 1),
        lambda: schedule_peak([2.0], 1, 1),
        lambda: extra_forwards([2, "3"]),
    ],
)
def test_numbers_that_are_no_schedule_are_refused_with_a_sentence(call):
    with pytest.raises(ValueError, match=r"\w+ .* \w+"):
        call()


# Predicted and measured bytes ----------------------------------------------------------------------------------------

ROWS, WIDTH = 16, 16
X = ROWS * WIDTH * 4
WEIGHTS = torch.rand(ROWS, WIDTH)  # so that the gradient which the loss sends back is a tensor of X bytes


def weighted(y):
    return y * WEIGHTS


def peak_of_chain(n, every, keeps, keep_last=None, loss=weighted):
    """Measured peak beyond the weights, in bytes: the input included."""
    net = models.chain(n, width=WIDTH, keeps=keeps)
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    handle = None if every is None else checkpoint_layers(net, every, keep_last=keep_last)
    with MemoryTracker(net, live=False) as tracker:
        loss(net(x)).sum().backward()
    return tracker.peak.total - sum(p.nbytes for p in net.parameters()), handle


def temporaries(keeps):
    """One layer's backward: the gradient that comes in, and two of the size of the larger GELU's input (the gradient
    before and after it). Beside them live the loss and its gradient, 4 bytes each."""
    return X + 2 * max(1, keeps - 1) * X + 8


@pytest.mark.parametrize("keeps", [1, 2, 5])
@pytest.mark.parametrize("n", [16, 32, 64, 128])
def test_the_predicted_peak_is_the_measured_one_to_the_byte(n, keeps):
    a = (keeps - 1) * X
    schedules = ["sqrt", "best", 1, 3, 7, n, [n - 3, 3], [3, n - 3], best_segments(n, a, X, 0.5)]
    if keeps > 1:
        schedules += [
            best_segments(n, a, X, 2.0),
            [[[4, 2, 1], [3, [2, 1]], 2], *uniform_segments(n - 15, 5)],
        ]
    for i, every in enumerate(schedules):
        keep_last = i % 2 == 0
        measured, handle = peak_of_chain(n, every, keeps, keep_last)
        predicted = schedule_peak(handle.segments, a, X, keep_last=keep_last, temporaries=temporaries(keeps))
        assert predicted == measured, (every, keep_last)
    assert schedule_peak([n], a, X, temporaries=temporaries(keeps)) == peak_of_chain(n, None, keeps)[0]


def test_a_kept_last_segment_has_the_same_peak_as_one_that_runs_again():
    for every in ("sqrt", 1, 5, [7, 5, 4], [[4, 3], 5, [3, 1]]):
        for keeps in (1, 2, 5):
            peaks = [peak_of_chain(16, every, keeps, keep_last)[0] for keep_last in (True, False)]
            assert peaks[0] == peaks[1], (every, keeps)


def test_segments_in_segments_of_layers_without_internals_need_what_a_forward_takes_in_passing():
    # a layer that runs again only to reach a later one holds its input, both halves of its sum and their sum, beside the
    # gradient that waits: one boundary more than its backward
    segments = best_segments(16, 0, X, 2.0)
    measured, _ = peak_of_chain(16, segments, keeps=1)
    assert schedule_peak(segments, 0, X, temporaries=temporaries(1)) == measured - X


def test_the_figures_for_64_layers_that_keep_five_boundaries():
    """In boundaries, above what is there before the step: the weights and the input."""

    def boundaries(every):
        return (peak_of_chain(64, every, 5)[0] - X) / X

    none, per_layer, root, best = (boundaries(every) for every in (None, 1, "sqrt", "best"))
    uniform = min(boundaries(k) for k in range(1, 10))
    assert (round(none), round(per_layer), round(root), round(uniform), round(best)) == (328, 76, 55, 43, 35)
    assert best <= 36
    assert boundaries(best_segments(64, 4 * X, X, 2.0)) < 22


def test_the_root_is_the_best_segment_length_where_a_layer_keeps_its_input_alone():
    peaks = {k: peak_of_chain(64, k, keeps=1)[0] for k in (1, 2, 4, 8, 16, 32, 64)}
    assert min(peaks, key=peaks.get) == 8
    assert peak_of_chain(64, "sqrt", keeps=1)[0] == peaks[8]


def test_a_loss_with_an_expanded_gradient_spares_the_last_layer_one_boundary():
    # sum()'s backward is one number seen as a whole tensor, so the last layer finds no gradient of X bytes
    sizes = [temporaries(5)] * 15 + [temporaries(5) - X]
    for every in (1, 2, 3, "sqrt", [8, 8], [3, 2, 2, 2, 2, 2, 1, 1, 1]):
        measured, handle = peak_of_chain(16, every, 5, loss=lambda y: y)
        assert measured == schedule_peak(handle.segments, 4 * X, X, temporaries=sizes), every


def test_layers_of_unequal_size_are_measured_and_predicted():
    widths = [1, 8, 2, 6, 1, 1, 4, 3, 2]
    net = nn.Sequential(*(models.chain(1, width=WIDTH, keeps=1 + w)[0] for w in widths))
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    with checkpoint_layers(net, "best") as handle, MemoryTracker(net, live=False) as tracker:
        weighted(net(x)).sum().backward()
    assert handle.internal == [w * X for w in widths] and handle.boundary == [X] * 9
    needs = [X + 2 * w * X + 8 for w in widths]
    measured = tracker.peak.total - sum(p.nbytes for p in net.parameters())
    assert measured == schedule_peak(handle.segments, handle.internal, handle.boundary, temporaries=needs)
    lowest = best_segments(9, handle.internal, handle.boundary, temporaries=needs)
    assert measured == schedule_peak(lowest, handle.internal, handle.boundary, temporaries=needs)


def test_the_measurement_of_best_holds_one_layer_at_a_time_and_leaves_no_trace():
    net = nn.Sequential(
        *(
            nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.Dropout(0.5), nn.Linear(64, 8))
            for _ in range(6)
        )
    )
    x = torch.randn(ROWS, 8, requires_grad=True)
    other = copy.deepcopy(net)
    checkpoint_layers(net, "best")
    torch.manual_seed(3)
    expected = other(x)
    torch.manual_seed(3)
    assert torch.equal(net(x), expected)
    assert all(p.grad is None for p in net.parameters())
    for (name, got), (_, wanted) in zip(net.named_buffers(), other.named_buffers(), strict=True):
        assert torch.equal(got, wanted), name


def test_an_autocast_copy_of_a_weight_is_counted_inside_each_layer():
    net = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(4)))
    x = torch.randn(4, 32, requires_grad=True)
    with checkpoint_layers(net, "best") as handle, torch.autocast("cpu", dtype=torch.bfloat16):
        net(x).sum().backward()
    # the first casts its float32 input; the others are given bf16. All cast their weight.
    assert handle.internal == [4 * 32 * 2 + 32 * 32 * 2] + [32 * 32 * 2] * 3
    assert handle.boundary == [4 * 32 * 4] + [4 * 32 * 2] * 3


# The same gradients --------------------------------------------------------------------------------------------------

N = 6
HF = {
    "llama": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=N, num_attention_heads=2,
            num_key_value_heads=1, attention_dropout=0.2,
        )
    ),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(
            vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=N, num_attention_heads=2,
            num_key_value_heads=1, attention_dropout=0.2,
        )
    ),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(
            vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=N, num_attention_heads=2,
            num_key_value_heads=1, head_dim=8, attention_dropout=0.2,
        )
    ),
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=50, n_embd=16, n_layer=N, n_head=2, n_positions=32, bos_token_id=0, eos_token_id=1)
    ),
    "bert": lambda: transformers.BertForMaskedLM(
        transformers.BertConfig(
            vocab_size=50, hidden_size=16, num_hidden_layers=N, num_attention_heads=2, intermediate_size=24,
            max_position_embeddings=32,
        )
    ),
    "vit": lambda: transformers.ViTForImageClassification(
        transformers.ViTConfig(
            hidden_size=16, num_hidden_layers=N, num_attention_heads=2, intermediate_size=24, image_size=8,
            patch_size=4, hidden_dropout_prob=0.2, attention_probs_dropout_prob=0.2,
        )
    ),
}  # fmt: skip


def block():
    return nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 12), nn.GELU(), nn.Dropout(0.3), nn.Linear(12, 8))


class Looped(nn.Module):
    """A ModuleList called in a loop, each layer with a mask by keyword; layers return a tuple."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = block()

        def forward(self, x, *, mask):
            return (x + self.body(x) * mask, None)

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(self.Layer() for _ in range(N))

    def forward(self, x):
        mask = torch.linspace(0, 1, 8)
        for layer in self.layers:
            x = layer(x, mask=mask)[0]
        return x


PLAIN = {"sequential": lambda: nn.Sequential(*(block() for _ in range(N))), "modulelist": Looped}
FAMILIES = HF | PLAIN


def made(family):
    torch.manual_seed(0)
    return FAMILIES[family]().train()


def batch_for(family):
    torch.manual_seed(1)
    if family in PLAIN:
        return torch.randn(3, 8)
    if family == "vit":
        return {"pixel_values": torch.randn(2, 3, 8, 8), "labels": torch.tensor([0, 1])}
    ids = torch.randint(2, 50, (2, 7))
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids}


def layers_of(family, model):
    return model.layers if family == "modulelist" else model


def step(family, model, batch):
    """Loss and gradients of one training step with a fixed random state."""
    torch.manual_seed(7)
    if family in PLAIN:
        loss = model(batch).square().sum()
    else:
        loss = model(**batch, **({} if family in ("vit", "bert") else {"use_cache": False})).loss
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return loss.detach(), found


def same(one, other):
    assert torch.equal(one[0], other[0])
    assert one[1].keys() == other[1].keys()
    for name, gradient in one[1].items():
        if gradient is None:
            assert other[1][name] is None, name
        else:
            assert torch.equal(gradient, other[1][name]), name


SCHEDULES = ["sqrt", "best", 1, 2, 4, N, [3, 2, 1], [1, 5], [[2, 1], [1, 1], 1], [[[1, 1], 1, 1], 2]]


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_the_same_to_the_bit_with_dropout(family):
    model, batch = made(family), batch_for(family)
    expected = step(family, model, batch)
    assert not torch.equal(expected[0], step(family, model.eval(), batch)[0]), "dropout must do something"
    model.train()
    keys = list(model.state_dict())
    names = [name for name, _ in model.named_modules()]
    for every in SCHEDULES:
        for keep_last in (True, False):
            with checkpoint_layers(layers_of(family, model), every, keep_last=keep_last) as handle:
                same(step(family, model, batch), expected)
                assert sum_all(handle.segments) == N
                assert list(model.state_dict()) == keys
                assert [name for name, _ in model.named_modules()] == names
                if every == "best":  # its first step measured
                    same(step(family, model, batch), expected)
    same(step(family, model, batch), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_layers_really_run_again(family):
    """Forward calls counted by hooks inside the layers, and by hooks on the layers themselves."""
    model, batch = made(family), batch_for(family)
    layers = (
        list(layers_of(family, model))
        if family == "sequential"
        else next(list(m) for m in model.modules() if isinstance(m, nn.ModuleList))
    )
    calls = {"inside": 0, "on": 0}

    def count(where):
        def hook(module, args):
            calls[where] += 1

        return hook

    for layer in layers:
        first = next(m for m in layer.modules() if not list(m.children()))
        first.register_forward_pre_hook(count("inside"))
        layer.register_forward_pre_hook(count("on"))
    for every in [1, 2, [3, 2, 1], [[2, 1], [1, 1], 1], [N]]:
        for keep_last in (True, False):
            calls.update(inside=0, on=0)
            with checkpoint_layers(layers_of(family, model), every, keep_last=keep_last) as handle:
                step(family, model, batch)
            expected = N + extra_forwards(handle.segments, keep_last)
            assert calls == {"inside": expected, "on": expected}, (every, keep_last)


@pytest.mark.parametrize("family", HF)
def test_collected_hidden_states_are_right_with_their_gradients(family):
    model, batch = made(family), batch_for(family)
    inputs = {k: v for k, v in batch.items() if k != "labels"}

    def hidden():
        torch.manual_seed(7)
        states = model(**inputs, output_hidden_states=True).hidden_states
        sum((s * i).sin().sum() for i, s in enumerate(states, 1)).backward()
        found = {name: p.grad for name, p in model.named_parameters()}
        model.zero_grad(set_to_none=True)
        return torch.stack([s.detach() for s in states]), found

    model.config.use_cache = False
    expected = hidden()
    assert len(expected[0]) == N + 1
    for every in (1, 3, [4, 2], [[2, 2], 2], "best"):
        with checkpoint_layers(model, every):
            same(hidden(), expected)
            same(step(family, model, batch), step(family, model, batch))
    with checkpoint_layers(next(m for m in model.modules() if isinstance(m, nn.ModuleList)), 3):
        same(hidden(), expected)  # without the model, through the hooks that transformers puts on layers


def test_hidden_states_of_a_model_that_gathers_them_in_its_loop():
    # its layers return tuples of one, too
    config = transformers.FNetConfig(vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=4)
    torch.manual_seed(0)
    model = transformers.FNetModel(config).train()
    ids = torch.randint(2, 50, (2, 7))

    def states(**kwargs):
        torch.manual_seed(7)
        return model(input_ids=ids, **kwargs)

    expected = states(output_hidden_states=True)
    for every in (2, "best", [[2, 1], 1]):
        with checkpoint_layers(model, every):
            found = states(output_hidden_states=True).hidden_states
            assert all(map(torch.equal, expected.hidden_states, found)) and len(found) == 5
            assert torch.equal(states().last_hidden_state, expected.last_hidden_state)
            model.config.output_hidden_states = True
            assert all(map(torch.equal, expected.hidden_states, states().hidden_states))
            model.config.output_hidden_states = False


def test_attentions_in_a_segment_are_right_or_refused():
    model, batch = made("llama"), batch_for("llama")
    model.set_attn_implementation("eager")
    model.config.use_cache = False
    torch.manual_seed(7)
    expected = model(**batch, output_attentions=True).attentions
    with checkpoint_layers(model, 3):
        torch.manual_seed(7)
        found = model(**batch, output_attentions=True).attentions
    assert len(found) == N and all(map(torch.equal, expected, found))


def test_layers_that_return_more_than_their_hidden_state_are_refused_in_segments():
    class Layer(nn.Linear):
        def forward(self, x):
            return super().forward(x), x.sum()

    layers = nn.ModuleList(Layer(4, 4) for _ in range(4))

    def run(x):
        for layer in layers:
            x, _ = layer(x)
        return x

    x = torch.randn(2, 4, requires_grad=True)
    with checkpoint_layers(layers, 1):
        run(x).sum().backward()
    with checkpoint_layers(layers, 2), pytest.raises(RuntimeError, match="every=1"):
        run(x)


def test_layers_with_masks_of_their_own_are_refused_in_one_segment():
    config = transformers.Gemma3TextConfig(
        vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, sliding_window=4, use_cache=False,
        layer_types=["sliding_attention", "sliding_attention", "full_attention", "full_attention"],
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Gemma3ForCausalLM(config).train()
    ids = torch.randint(2, 50, (2, 7))
    expected = model(input_ids=ids).logits
    with checkpoint_layers(model, [2, 2]):
        assert torch.equal(model(input_ids=ids).logits, expected)
    with checkpoint_layers(model, [3, 1]), pytest.raises(RuntimeError, match="other arguments"):
        model(input_ids=ids)
    with checkpoint_layers(model, 1):
        assert torch.equal(model(input_ids=ids).logits, expected)


def test_autocast_is_the_same_when_layers_run_again():
    model, batch = made("llama"), batch_for("llama")

    def bf16():
        torch.manual_seed(7)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(**batch, use_cache=False).loss
        loss.backward()
        found = {name: p.grad for name, p in model.named_parameters()}
        model.zero_grad(set_to_none=True)
        return loss.detach(), found

    expected = bf16()
    for every in (2, "best", [[2, 2], 2]):
        with checkpoint_layers(model, every):
            same(bf16(), expected)


def test_a_frozen_base_with_a_trained_adapter():
    model, batch = made("qwen3"), batch_for("qwen3")
    model.requires_grad_(False)
    for layer in list(model.model.layers)[2:]:
        layer.self_attn.q_proj.weight.requires_grad_(True)
    expected = step("qwen3", model, batch)
    assert sum(g is not None for g in expected[1].values()) == N - 2
    for every in ("best", 2, 1, [[2, 2], 2]):
        with checkpoint_layers(model, every):
            same(step("qwen3", model, batch), expected)


def test_layers_that_do_not_give_the_same_again_are_reported():
    class Fickle(nn.Module):
        turn = 0

        def forward(self, x):
            Fickle.turn += 1
            return torch.cat([x, x]).exp() if Fickle.turn > 2 else x.exp()

    net = nn.Sequential(Fickle(), Fickle())
    with (
        checkpoint_layers(net, [1, 1], keep_last=False),
        pytest.raises(torch.utils.checkpoint.CheckpointError),
    ):
        net(torch.randn(2, requires_grad=True)).sum().backward()


def test_batch_norm_counts_a_batch_twice_where_its_layer_runs_again():
    net = nn.Sequential(*(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4)) for _ in range(4)))
    with checkpoint_layers(net, [2, 2]):
        net(torch.randn(8, 4)).sum().backward()
    assert [layer[0].num_batches_tracked.item() for layer in net] == [2, 2, 1, 1]


# Putting on and taking off -------------------------------------------------------------------------------------------


def untouched(model):
    return not any(stand_in(m) or m._forward_pre_hooks for m in model.modules())


def test_remove_gives_every_layer_its_own_forward_back_and_may_be_repeated():
    model = made("llama")
    handle = checkpoint_layers(model, 2)
    assert not untouched(model)
    handle.remove()
    assert untouched(model)
    handle.remove()
    with checkpoint_layers(model, "best"), pytest.raises(ZeroDivisionError):
        _ = 1 / 0
    assert untouched(model)
    with pytest.raises(ValueError):
        checkpoint_layers(model, [1, 1])
    assert untouched(model)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
@pytest.mark.parametrize("when", ["forward", "backward"])
def test_an_interrupted_step_passes_through_and_the_next_one_is_right(error, when):
    model, batch = made("gpt2"), batch_for("gpt2")
    expected = step("gpt2", model, batch)
    stop_at, calls = N + 1 if when == "backward" else 3, 0

    def hook(module, args):
        nonlocal calls
        calls += 1
        if calls == stop_at:
            raise error("stop")

    with checkpoint_layers(model, 3):
        handles = [layer.ln_1.register_forward_pre_hook(hook) for layer in model.transformer.h]
        with pytest.raises(error):
            step("gpt2", model, batch)
        for handle in handles:
            handle.remove()
        model.zero_grad(set_to_none=True)
        same(step("gpt2", model, batch), expected)
    assert untouched(model)


def test_backward_may_come_after_the_schedule_is_taken_off():
    for family in ("llama", "modulelist"):
        model, batch = made(family), batch_for(family)
        expected = step(family, model, batch)
        torch.manual_seed(7)
        with checkpoint_layers(layers_of(family, model), [[2, 1], 2, 1]):
            out = model(batch).square().sum() if family in PLAIN else model(**batch, use_cache=False).loss
        out.backward()
        same((out.detach(), {name: p.grad for name, p in model.named_parameters()}), expected)


def test_a_budget_that_stops_a_checkpointed_step_leaves_no_trace():
    net = models.chain(16, width=WIDTH, keeps=5)
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    weights = sum(p.nbytes for p in net.parameters())
    with checkpoint_layers(net, [3, 2, 2, 2, 2, 2, 1, 1, 1]):
        tracker = MemoryTracker(net, budget=weights + 20 * X, live=False)
        with pytest.raises(BudgetExceeded), tracker:
            weighted(net(x)).sum().backward()
    assert untouched(net)


def test_best_fits_a_budget_from_the_very_first_step():
    net = models.chain(64, width=WIDTH, keeps=5)
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    budget = sum(p.nbytes for p in net.parameters()) + 36 * X + 8
    with checkpoint_layers(net, "best"), MemoryTracker(net, budget=budget, live=False):
        weighted(net(x)).sum().backward()
    for every in (1, "sqrt", 3):
        tracker = MemoryTracker(net, budget=budget, live=False)
        with checkpoint_layers(net, every), pytest.raises(BudgetExceeded), tracker:
            weighted(net(x)).sum().backward()


def test_a_second_schedule_on_the_same_layers_is_refused():
    model = made("llama")
    with checkpoint_layers(model, 2):
        for again in (model, model.model.layers):
            with pytest.raises(RuntimeError, match="already"):
                checkpoint_layers(again, 1)
    with checkpoint_layers(model.model.layers, [N]), pytest.raises(RuntimeError, match="already"):
        checkpoint_layers(model, 1)  # also where the one segment is kept, and nothing runs again


def switch(model, way):
    """transformers' own checkpointing "enable" or "disable", by its newer name where it has one."""
    name = f"activation_checkpointing_{way}"
    getattr(model, name if hasattr(model, name) else name.replace("activation", "gradient"))()


def test_transformers_own_checkpointing_is_refused_before_and_after():
    model, batch = made("llama"), batch_for("llama")
    switch(model, "enable")
    with pytest.raises(RuntimeError, match="transformers"):
        checkpoint_layers(model, 2)
    switch(model, "disable")
    with checkpoint_layers(model, 2):
        switch(model, "enable")
        with pytest.raises(RuntimeError, match="transformers"):
            step("llama", model, batch)


def test_eval_and_no_grad_run_as_if_nothing_were_there():
    model, batch = made("llama"), batch_for("llama")
    calls = 0

    def hook(module, args):
        nonlocal calls
        calls += 1

    for layer in model.model.layers:
        layer.register_forward_pre_hook(hook)
    with checkpoint_layers(model, 3):
        with torch.no_grad():
            model(**batch)
        assert calls == N
        model.eval()
        model(**batch).loss.backward()
        assert calls == 2 * N, "in eval mode nothing runs again"


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_generate_is_unaffected_also_in_training_mode(family):
    model = made(family).eval()
    ids = torch.randint(2, 50, (2, 5))

    def generated():
        return model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)

    expected = generated()
    with checkpoint_layers(model, 3):
        assert torch.equal(generated(), expected)
        model.train()
        step(family, model, batch_for(family))
        model.eval()
        assert torch.equal(generated(), expected)


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3"])
def test_a_key_value_cache_is_left_out_in_training_with_one_warning(family):
    model, batch = made(family), batch_for(family)
    expected = step(family, model, batch)
    with checkpoint_layers(model, 2):
        torch.manual_seed(7)
        with pytest.warns(UserWarning, match="use_cache"):
            loss = model(**batch, use_cache=True).loss
        loss.backward()
        same((loss.detach(), {name: p.grad for name, p in model.named_parameters()}), expected)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model(**batch, use_cache=True)


def test_a_cache_with_entries_is_refused_in_training():
    model, batch = made("llama"), batch_for("llama")
    past = model.eval()(input_ids=batch["input_ids"], use_cache=True).past_key_values
    model.train()
    with checkpoint_layers(model, 2), pytest.raises(RuntimeError, match="past_key_values"):
        model(input_ids=batch["input_ids"], past_key_values=past)


@pytest.mark.parametrize("every", [2, "best"])
def test_a_copy_is_a_plain_model(every, tmp_path):
    model, batch = made("llama"), batch_for("llama")
    expected = step("llama", model, batch)
    with checkpoint_layers(model, every):
        torch.save(model, tmp_path / "model.pt")
        copies = [
            copy.deepcopy(model),
            pickle.loads(pickle.dumps(model)),
            torch.load(tmp_path / "model.pt", weights_only=False),
        ]
        same(step("llama", model, batch), expected)
    for other in copies:
        same(step("llama", other, batch), expected)
        with checkpoint_layers(other, 3):  # not "already checkpointed"
            same(step("llama", other, batch), expected)
            other.config.output_hidden_states = True
    same(step("llama", model, batch), expected)


def test_saved_pretrained_and_state_dict_load_into_a_plain_model(tmp_path):
    model, batch = made("gpt2"), batch_for("gpt2")
    expected = step("gpt2", model, batch)
    with checkpoint_layers(model, "sqrt"):
        model.save_pretrained(tmp_path)
        state = copy.deepcopy(model.state_dict())
    plain = made("gpt2")
    plain.load_state_dict(state)
    same(step("gpt2", plain, batch), expected)
    same(step("gpt2", transformers.GPT2LMHeadModel.from_pretrained(tmp_path).train(), batch), expected)


def test_layers_called_out_of_order_or_with_something_else_are_refused():
    layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
    x = torch.randn(2, 4, requires_grad=True)
    with checkpoint_layers(layers, [2, 2]):
        with pytest.raises(RuntimeError, match="in order"):
            layers[1](x)
        layers[0](x)
        with pytest.raises(RuntimeError, match="in order"):
            layers[3](x)
        y = layers[0](x)
        with pytest.raises(RuntimeError, match="something else"):
            layers[1](y + 1)
        y = layers[0](x)
        with torch.no_grad(), pytest.raises(RuntimeError, match="switched off"):
            layers[1](y)
    with checkpoint_layers(layers, "best"), pytest.raises(RuntimeError, match="before layer 0"):
        layers[2](x)


def test_one_layer_and_segments_of_one():
    x = torch.randn(2, 8, requires_grad=True)
    for every in ("sqrt", "best", "per-layer", 1, 5, [1]):
        net = nn.Sequential(block())
        with checkpoint_layers(net, every) as handle:
            net(x).sum().backward()
            assert handle.segments == [1]


def test_a_sequential_may_hand_on_tuples():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, pair):
            return self.linear(pair[0]).sin(), pair[1] + 1

    net = nn.Sequential(*(Pair() for _ in range(4)))
    x = torch.randn(2, 4, requires_grad=True)
    expected, count = net((x, torch.zeros(1)))
    for every in (2, "best", [[1, 1], 2]):
        with checkpoint_layers(net, every):
            found, counted = net((x, torch.zeros(1)))
            found.sum().backward()
            assert torch.equal(found, expected) and counted == count == 4


def test_some_layers_in_eval_mode_train_with_the_rest():
    model, batch = made("bert"), batch_for("bert")
    list(model.bert.encoder.layer)[1].eval()
    expected = step("bert", model, batch)
    with checkpoint_layers(model, 3):
        same(step("bert", model, batch), expected)


class Bare(nn.Module):
    """Layers with no home in transformers."""

    def __init__(self):
        super().__init__()
        self.stack = nn.ModuleList([nn.Linear(2, 2)])


def bart():
    config = transformers.BartConfig(
        vocab_size=50, d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, max_position_embeddings=32,
    )  # fmt: skip
    return transformers.BartForConditionalGeneration(config)


@pytest.mark.parametrize(
    ("given", "every", "error", "says"),
    [
        (lambda: models.chain(4), 0, ValueError, "at least 1"),
        (lambda: models.chain(4), -2, ValueError, "at least 1"),
        (lambda: models.chain(4), True, ValueError, "every=True"),
        (lambda: models.chain(4), 2.0, ValueError, "every=2.0"),
        (lambda: models.chain(4), None, ValueError, "every=None"),
        (lambda: models.chain(4), "root", ValueError, "sqrt"),
        (lambda: models.chain(4), [2, 1], ValueError, "3 layers, and there are 4"),
        (lambda: models.chain(4), [2, 3], ValueError, "5 layers, and there are 4"),
        (lambda: models.chain(4), [4, 0], ValueError, "at least 1"),
        (lambda: models.chain(4), [], ValueError, "at least 1"),
        (lambda: models.chain(4), [2, [2, []]], ValueError, "at least 1"),
        (lambda: models.chain(4), ["2", 2], ValueError, "segment lengths"),
        (lambda: nn.Sequential(), 1, ValueError, "no layers"),
        (lambda: nn.ModuleList(), 1, ValueError, "no layers"),
        (lambda: nn.Linear(2, 2), 1, ValueError, "none was found"),
        (Bare, 1, ValueError, "Give the nn.Sequential or nn.ModuleList"),
        (bart, [2], ValueError, "model.encoder.layers, model.decoder.layers"),
        (lambda: [nn.Linear(2, 2)], 1, TypeError, "nn.ModuleList"),
        (
            lambda: (lambda layer: nn.Sequential(layer, layer))(nn.Linear(2, 2)),
            1,
            ValueError,
            "more than once",
        ),
    ],
)
def test_what_cannot_be_checkpointed_is_refused_with_a_sentence(given, every, error, says):
    model = given()
    with pytest.raises(error, match=says):
        checkpoint_layers(model, every)
    assert not isinstance(model, nn.Module) or untouched(model)


def test_encoder_and_decoder_can_each_have_their_own():
    model = bart().train()
    model.config.use_cache = False
    ids = torch.randint(3, 50, (2, 6))

    def run():
        torch.manual_seed(2)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        found = {name: p.grad for name, p in model.named_parameters()}
        model.zero_grad(set_to_none=True)
        return loss.detach(), found

    expected = run()
    with checkpoint_layers(model.model.encoder.layers, 1), checkpoint_layers(model.model.decoder.layers, 1):
        same(run(), expected)


def test_a_layer_without_a_positional_argument_is_refused_or_found_by_its_name():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, hidden_states=None, x=None):
            return self.linear(hidden_states if x is None else x)

    layers = nn.ModuleList(Named() for _ in range(2))
    x = torch.randn(2, 4, requires_grad=True)
    with checkpoint_layers(layers, [2], keep_last=False):
        y = layers[1](hidden_states=layers[0](hidden_states=x))
        expected = F.linear(
            F.linear(x, layers[0].linear.weight, layers[0].linear.bias),
            layers[1].linear.weight,
            layers[1].linear.bias,
        )
        assert torch.equal(y, expected)
        y.sum().backward()
        with pytest.raises(TypeError, match="first argument"):
            layers[0](x=x)


def test_the_tracker_sees_what_runs_again_as_activations_in_backward_and_names_the_layer():
    net = models.chain(8, width=WIDTH, keeps=5)
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    with checkpoint_layers(net, [8], keep_last=False), MemoryTracker(net, live=False) as tracker:
        weighted(net(x)).sum().backward()
    assert tracker.peak.phase == "backward"
    assert tracker.peak.by_category["activations"] >= 8 * 4 * X
    owners = {h.module.split(".")[0] for h in tracker.largest_at_peak(100) if h.category == "activations"}
    assert {str(i) for i in range(8)} <= owners


def test_chain_refuses_numbers_below_one():
    for kwargs in ({"n": 0}, {"n": 2, "width": 0}, {"n": 2, "keeps": 0}):
        with pytest.raises(ValueError, match="at least 1"):
            models.chain(**kwargs)
