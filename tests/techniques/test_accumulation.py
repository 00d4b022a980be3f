"""accumulate_gradients against the full batch, however it is cut; its bytes; its errors; what its
micro-batches share.
"""

import copy
import textwrap
import warnings
from dataclasses import make_dataclass
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.gradients import error, own_loss, ragged
from support.gradients import taken_gradient as gradient
from support.nightly import ALL
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint
from transformers import BatchEncoding

from gradmem_lib import (
    MemoryTracker,
    accumulate_gradients,
    check_pieces_add_up,
    count_targets,
    next_token_loss,
    split,
)
from gradmem_lib.course import models
from gradmem_lib.techniques import accumulation

VOCAB, LONGEST = 31, 12
EXAMPLES = 1000 if ALL else 60


def tiny(dtype=torch.float32, **sizes):
    sizes = dict(layers=1, hidden=16, heads=2, vocab=VOCAB, positions=LONGEST) | sizes
    return models.tiny_gpt2(dtype=dtype, **sizes)


MODELS = {dtype: tiny(dtype) for dtype in (torch.float32, torch.float64)}
LIMITS = {torch.float32: 1e-5, torch.float64: 1e-12}


def full_gradient(model, batch):
    loss = own_loss(model, batch)
    loss.backward()
    return gradient(model), loss.item()


def loss_of(model, kind="sum"):
    def loss_and_count(micro):
        total, count = next_token_loss(model, micro)
        if kind == "sum":
            return total, count
        mean = total / count  # of nothing, it is not a number
        return mean if kind == "mean" else mean * count, count

    return loss_and_count


def count_of(micro):
    return count_targets(micro["labels"])


# The same gradient.


@st.composite
def cut_batches(draw):
    """A batch of sequences, some without labels, and its pieces, which may be padded to their own
    longest sequence.
    """
    lengths = draw(
        st.lists(st.integers(1, LONGEST), min_size=1, max_size=8).filter(lambda n: max(n) > 1)
    )
    rows = len(lengths)
    cuts = sorted(draw(st.lists(st.integers(0, rows), max_size=6)))
    unlabelled = sorted(draw(st.sets(st.integers(0, rows - 1), max_size=3)))
    trim = draw(st.booleans())
    batch = ragged(lengths, VOCAB, draw(st.integers(0, 999)))
    batch["labels"][unlabelled] = -100
    pieces = []
    for start, stop in zip([0, *cuts], [*cuts, rows], strict=True):
        if stop > start:
            width = max(lengths[start:stop]) if trim else max(lengths)
            pieces.append({name: tensor[start:stop, :width] for name, tensor in batch.items()})
    return batch, pieces


WAYS = ["corrected after", "corrected after, model given", "total known", "counted first"]


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    cut=cut_batches(),
    way=st.sampled_from(WAYS),
    dtype=st.sampled_from(list(LIMITS)),
    kind=st.sampled_from(["sum", "mean", "mean times count"]),
    before=st.sampled_from([None, 0.0, 0.5]),
)
def test_the_gradient_is_the_full_batchs(cut, way, dtype, kind, before):
    """``before``: what the last parameter has as its gradient already."""
    batch, pieces = cut
    model, count = MODELS[dtype], count_of(batch)
    expected, loss = full_gradient(model, batch) if count else (None, None)
    model.zero_grad(set_to_none=True)
    last = list(model.parameters())[-1]
    if before is not None:
        last.grad = torch.full_like(last, before)
    options = {
        "corrected after": {},
        "corrected after, model given": {"model": model},
        "total known": {"total_items": count},
        "counted first": {"count_items": count_of},
    }[way]
    given = pieces if way == "counted first" else iter(pieces)
    reduction = "mean" if kind == "mean" else "sum"
    run = partial(accumulate_gradients, given, loss_of(model, kind), reduction=reduction, **options)
    if before and way.startswith("corrected") and (count or "given" in way):
        with pytest.raises(ValueError, match=r"1 parameters have gradients from before.*zero_grad"):
            run()
        assert [p for p in model.parameters() if p.grad is not None] == [last]
        assert (last.grad == before).all()
    elif not count:
        with pytest.raises(ValueError, match="nothing to learn from"):
            run()
    else:
        result = run()
        last.grad -= before or 0
        assert error(gradient(model), expected) <= LIMITS[dtype]
        assert result.items == count and result.loss == pytest.approx(loss, rel=LIMITS[dtype])
        assert (type(result.items), type(result.loss)) == (int, float)
    model.zero_grad(set_to_none=True)


def test_a_sum_beside_a_count_of_0_is_added():
    """As of a focal loss that is divided by its positives: images without any teach, too."""
    torch.manual_seed(0)
    model = nn.Linear(6, 10).double()
    batch = {"x": torch.randn(8, 6, dtype=torch.float64), "labels": torch.eye(8, 10) * 5}
    batch["labels"][1:] = 0

    def loss_and_count(micro):
        return (model(micro["x"]) - micro["labels"]).square().sum(), count(micro)

    def count(micro):
        return int(micro["labels"].sum())

    total, positives = loss_and_count(batch)
    (total / positives).backward()
    expected = gradient(model)
    parts = list(split(batch, 2))  # the first alone has positives
    for known in ({"count_items": count}, {"total_items": positives}):
        found = accumulate_gradients(parts, loss_and_count, **known)
        assert error(gradient(model), expected) <= 1e-12
        assert found.loss == pytest.approx(total.item() / positives, rel=1e-12)
    with pytest.raises(ValueError, match="a micro-batch with a count of 0 has the loss"):
        accumulate_gradients(parts, loss_and_count)
    check_pieces_add_up(model, batch, loss_and_count)


def test_a_sum_over_very_many_items_stays_within_float16():
    """Without a provisional divisor the scaled gradient of the sum, 65,536 x 8, would be infinite
    in float16.
    """
    weight = nn.Parameter(torch.ones(1, dtype=torch.float16))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    result = accumulate_gradients([16, 16], lambda n: (weight.float().sum() * n, n), scaler=scaler)
    assert weight.grad.item() == 2.0**12 and result == (1.0, 32)


# Parameters that are not in the loss's graph: what runs again in backward has a graph of its own.


@pytest.mark.parametrize("given", [True, False])
def test_parameters_inside_what_runs_again(given):
    layer, x = nn.Linear(3, 3), torch.randn(4, 3, requires_grad=True)
    layer(x).square().sum().div(4).backward()
    of_x, x.grad = x.grad, None
    expected = gradient(layer)

    def loss_and_count(rows):
        return checkpoint(layer, rows, use_reentrant=True).square().sum(), len(rows)

    accumulate_gradients([x[:1], x[1:]], loss_and_count, model=layer if given else None)
    if not given:  # with a model, its parameters alone are corrected
        torch.testing.assert_close(x.grad, of_x)
        with pytest.raises(ValueError, match="2 parameters have gradients from before"):
            accumulate_gradients([x.detach().requires_grad_()], loss_and_count)
    assert error(gradient(layer), expected) <= 1e-6


# Bytes.


@pytest.mark.parametrize("known", [True, False])
def test_the_peak_does_not_depend_on_the_number_of_micro_batches(known):
    model = tiny(hidden=32, vocab=256)

    def micro():
        ids = torch.zeros(2, LONGEST, dtype=torch.long)
        return {"input_ids": ids, "labels": ids}

    def peak(k):
        model.zero_grad(set_to_none=True)
        micro_batches = (micro() for _ in range(k))
        total = 22 * k if known else None
        with MemoryTracker(model, live=False) as tracker:
            accumulate_gradients(micro_batches, loss_of(model), total_items=total)
        return tracker.peak.total

    # the second forward runs beside the first one's gradients
    assert peak(1) < peak(2) == peak(3) == peak(17)


# What cannot be right.

W = nn.Parameter(torch.ones(3))


def counted(n):
    return W.sum() * n, n


@pytest.mark.parametrize(
    ("loss_and_count", "options", "says"),
    [
        (lambda n: W.sum(), {}, "must return two things, .* and returned Tensor"),
        (lambda n: (W.sum(), 1, 2), {}, "must return two things"),
        (lambda n: (W * 2, 3), {}, r'a tensor of shape \(3,\): use reduction="sum"'),
        (lambda n: (3.0, 3), {}, "and was float"),
        (lambda n: (W.mean().detach(), 3), {}, "has no gradient"),
        (lambda n: (W.sum(), -1), {}, "cannot be negative"),
        (lambda n: (W.sum(), float("nan")), {}, "must be a number of items.*was nan"),
        (lambda n: (W.sum(), torch.ones(3)), {}, "must be a number of items"),
        (lambda n: [(W.sum(), 1), (W.sum(), 2)], {}, "must be known before the first"),
        (lambda n: (W.sum(), 0), {}, "give total_items= or count_items="),
        (lambda n: (W.sum() * 0, 0), {}, "nothing to learn from"),
        (lambda n: (W.bfloat16().sum(), 3), {}, r"logits.float\(\)"),
        (lambda n: [counted(n)] * 2, {"total_items": 3}, "2 pairs .* where 1 were expected"),
        (counted, {"count_items": lambda n: (n,) * n}, "1 counts for one .* 2 for another: return"),
        (counted, {"micro_batches": []}, "nothing to learn from"),
        (counted, {"total_items": 0}, "nothing to learn from"),
        (counted, {"total_items": 4}, "was 4 items, and loss_and_count counted 3"),
        (counted, {"total_items": -3}, "cannot be negative"),
        (counted, {"total_items": 1, "count_items": int}, "give one of them"),
        (counted, {"reduction": "none"}, "reduction='none'"),
        (counted, {"micro_batches": iter([1, 2]), "count_items": int}, "second time.*give a list"),
    ],
)
def test_what_cannot_be_right_is_said(loss_and_count, options, says):
    W.grad = None
    with pytest.raises((TypeError, ValueError), match=says):
        accumulate_gradients(
            **{"micro_batches": [1, 2], "loss_and_count": loss_and_count} | options
        )
    assert W.grad is None or loss_and_count is counted


@pytest.mark.parametrize("kind", [float, np.uint8, torch.tensor])
def test_counts_are_whole_numbers_of_any_kind(kind):
    W.grad = None
    found = accumulate_gradients([2, 3], lambda n: (W.sum() * n, kind(n)), total_items=kind(5))
    assert found.items == 5 and type(found.items) is int
    assert torch.equal(W.grad, torch.ones(3))


def test_an_interrupt_passes_through_and_leaves_no_hook():
    def interrupted(_):
        raise KeyboardInterrupt

    hooks = len(nn.modules.module._global_forward_pre_hooks)
    with pytest.raises(KeyboardInterrupt):
        accumulate_gradients([1], interrupted)
    assert len(nn.modules.module._global_forward_pre_hooks) == hooks


def test_splitting():
    batch = {"input_ids": torch.arange(10).view(5, 2)}
    parts = list(split(batch, 2))
    assert [len(part["input_ids"]) for part in parts] == [2, 2, 1]
    assert parts[0]["input_ids"].data_ptr() == batch["input_ids"].data_ptr()  # a view
    flagged = list(split(batch | {"flag": True, "scale": torch.tensor(2.0), "size": [8, 8]}, 3))
    assert [part["flag"] for part in flagged] == [True, True] and flagged[1]["scale"].item() == 2
    assert flagged[1]["size"] == [8, 8]  # no list of rows
    encoding = BatchEncoding({"input_ids": torch.arange(3), "more": {"x": torch.arange(3)}})
    assert [part["more"]["x"].tolist() for part in split(encoding, 2)] == [[0, 1], [2]]
    pairs = (["a", "b", "c"], torch.arange(3))
    assert len(list(split(pairs, 3))) == 1  # in one piece, a list need not be cut
    as_dataclass = make_dataclass("Batch", ["input_ids"])(torch.arange(4))
    for wrong, size, says in (
        (batch, 0, "micro-batches of 0"),
        (batch | {"more": {"x": torch.zeros(2)}}, 2, r"\[2, 5\] rows"),
        (as_dataclass, 2, r"no tensor with rows is found \(found: Batch\)"),
        (pairs, 2, "only tensors are cut"),
        (batch | {"weights": [1.0] * 5}, 2, "only tensors are cut"),
    ):
        with pytest.raises(ValueError, match=says):
            next(split(wrong, size))


@pytest.mark.parametrize("cache, mask", [(True, None), (False, []), (False, [20])])
def test_packed_rows_do_not_see_each_other(cache, mask):
    """With a cache or a mask, transformers takes rows of a packed batch as one."""
    model = models.tiny_llama(
        layers=1, hidden=16, heads=2, intermediate=32, vocab=VOCAB, dtype=torch.float64
    )
    lengths = [5, 9, 7]
    batch = ragged(lengths, VOCAB)
    expected, _ = full_gradient(model, batch)
    model.config.use_cache = cache
    ids = torch.cat([batch["input_ids"][i, :n] for i, n in enumerate(lengths)])[None]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    labels = ids.masked_fill(positions == 0, -100)
    packed = {"input_ids": ids, "position_ids": positions, "labels": labels}
    if mask is not None:  # the tokens that it hides
        packed["attention_mask"] = torch.ones_like(ids)
        packed["attention_mask"][0, mask] = 0
    if mask:
        with pytest.raises(ValueError, match="leave attention_mask out of rows with several texts"):
            accumulate_gradients([packed], loss_of(model))
        return
    accumulate_gradients([packed], loss_of(model))
    assert error(gradient(model), expected) <= 1e-6  # the norms of Llama are in float32


def test_the_loop_at_the_head_of_the_file_can_be_pasted():
    lines = accumulation.__doc__.splitlines()
    loop = textwrap.dedent("\n".join(line for line in lines if line.startswith("    ")))
    model, batch = MODELS[torch.float64], ragged((3, 12, 5, 9), VOCAB)
    expected, _ = full_gradient(model, batch)
    given = {
        "micro_batches": list(split(batch, 1)),
        "count_items": count_of,
        "loss_and_count": loss_of(model),
    }
    exec(loop, given)
    assert error(gradient(model), expected) <= 1e-12


# A module whose forward in training changes its buffers is named, and the way out is exact.


def classified():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(8, 6, generator=generator, dtype=torch.float64)
    return {"x": x, "labels": torch.tensor([0, 1, 2, 3, 4, 0, 1, 2])}


def with_spectral_norm():
    torch.manual_seed(0)
    model = nn.Sequential(spectral_norm(nn.Linear(6, 16)), nn.Tanh(), nn.Linear(16, 5))
    return model.double()


def summed(model, micro):
    return F.cross_entropy(model(micro["x"]), micro["labels"], reduction="sum"), len(micro["x"])


def full(model):
    """The full batch's gradient, in one forward of a copy."""
    model = copy.deepcopy(model)
    F.cross_entropy(model(classified()["x"]), classified()["labels"]).backward()
    return gradient(model)


def accumulated(model, rows=2):
    pieces = split(classified(), rows)
    accumulate_gradients(pieces, lambda m: summed(model, m), total_items=8, model=model)
    return gradient(model)


def test_a_spectral_norm_is_named_and_the_way_out_is_exact():
    model = with_spectral_norm()
    expected = full(model)
    first = copy.deepcopy(model)
    with pytest.warns(UserWarning, match=r"of 0\.parametrizations\.weight\.0 .*: _u\."):
        found = accumulated(first)
    assert error(found, expected) > 1e-6  # the warning is true

    with torch.no_grad():
        model(classified()["x"][:1])
    model.get_submodule("0.parametrizations.weight.0").eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = accumulated(model)
    assert error(found, expected) <= 1e-12


class Replacing(nn.Linear):
    """Puts a new tensor in the place of its buffer, instead of changing it."""

    def __init__(self):
        super().__init__(6, 5)
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, x):
        self.seen = self.seen + x.detach().mean(0)
        return super().forward(x)


class Caching(nn.Linear):
    """Fills a buffer in its first forward, and only there."""

    def __init__(self):
        super().__init__(6, 5)
        self.register_buffer("positions", None)
        self.register_buffer("scale", torch.zeros(1))

    def forward(self, x):
        if self.positions is None:
            self.positions = torch.ones(6, dtype=x.dtype)
            self.scale.fill_(1.0)
        return super().forward(x * self.positions * self.scale)


def normed():
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5))


NORMED = "1 is a BatchNorm1d, which normalizes each micro-batch by its own rows"


@pytest.mark.parametrize(
    ("model", "rows", "says"),
    [
        (Replacing(), 2, "of the model (Replacing): seen"),
        (Caching(), 2, None),
        (normed(), 2, NORMED),
        (normed(), 8, None),  # one micro-batch
        (nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5).eval()), 2, None),
    ],
)
def test_what_micro_batches_share_is_said_and_nothing_else(model, rows, says):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        accumulated(model.double(), rows)
    assert (says in str(said[0].message)) if says else not said
