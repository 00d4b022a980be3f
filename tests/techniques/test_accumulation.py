"""accumulate_gradients against the full batch, however it is cut; its bytes; its errors."""

import copy
import os
import textwrap
import warnings
from dataclasses import make_dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import BatchEncoding

from gradmem_lib.course.material import models
from gradmem_lib.measure.tracker import MemoryTracker
from gradmem_lib.techniques import accumulation
from gradmem_lib.techniques.accumulation import Accumulated, accumulate_gradients, split
from gradmem_lib.techniques.losses import count_targets, next_token_loss
from gradmem_lib.techniques.pieces import check_pieces_add_up

VOCAB, LONGEST = 31, 12
# Splits in each of four ways: 240 for each dtype, and 800 every night.
EXAMPLES = 200 if os.environ.get("GRADMEM_ALL") else 60


def tiny(dtype=torch.float32, **sizes):
    sizes = dict(layers=1, hidden=16, heads=2, vocab=VOCAB, positions=LONGEST) | sizes
    return models.tiny_gpt2(dtype=dtype, **sizes)


MODELS = {dtype: tiny(dtype) for dtype in (torch.float32, torch.float64)}


def padded(lengths, seed=0, width=None):
    """A batch of random sequences of these lengths, padded to the longest, with padding masked and
    not predicted.
    """
    width = width or max(lengths)
    ids = torch.randint(
        0, VOCAB, (len(lengths), width), generator=torch.Generator().manual_seed(seed)
    )
    real = torch.arange(width) < torch.tensor(lengths)[:, None]
    return {"input_ids": ids, "attention_mask": real.long(), "labels": ids.masked_fill(~real, -100)}


def gradient(model):
    """All gradients in one float64 vector; they are taken off the model."""
    found = torch.cat([p.grad.double().flatten() for p in model.parameters()])
    model.zero_grad(set_to_none=True)
    return found


def full_gradient(model, batch):
    """By another way than the library's: the mean that cross_entropy takes itself."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
    loss.backward()
    return gradient(model), loss.item()


def error(got, expected):
    return ((got - expected).norm() / expected.norm()).item()


def loss_of(model):
    return lambda micro: next_token_loss(model, micro)


def accumulated(net, micro_batches, **options):
    result = accumulate_gradients(micro_batches, loss_of(net), **options)
    return gradient(net), result


# The same gradient.


@st.composite
def cut_batches(draw):
    """Lengths of the sequences, where the batch is cut, and whether each piece is padded to its own
    longest sequence.
    """
    lengths = draw(
        st.lists(st.integers(1, LONGEST), min_size=1, max_size=8).filter(lambda n: max(n) > 1)
    )
    cuts = draw(st.lists(st.integers(0, len(lengths)), max_size=6))
    unlabelled = draw(st.sets(st.integers(0, len(lengths) - 1), max_size=3))
    return lengths, sorted(cuts), unlabelled, draw(st.booleans()), draw(st.integers(0, 999))


def pieces(batch, lengths, cuts, trim):
    for start, stop in zip([0, *cuts], [*cuts, len(lengths)], strict=True):
        width = max(lengths[start:stop], default=1) if trim else batch["labels"].shape[1]
        if stop > start:
            yield {name: tensor[start:stop, :width] for name, tensor in batch.items()}


@pytest.mark.parametrize("dtype, limit", [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize(
    "way", ["corrected after", "corrected after, model given", "total known", "counted first"]
)
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(cut=cut_batches())
def test_the_gradient_is_the_full_batchs(dtype, limit, way, cut):
    lengths, cuts, unlabelled, trim, seed = cut
    model, batch = MODELS[dtype], padded(lengths, seed)
    batch["labels"][sorted(unlabelled)] = -100
    count = count_targets(batch["labels"])
    micro_batches = list(pieces(batch, lengths, cuts, trim))
    if not count:
        with pytest.raises(ValueError, match="nothing to learn from"):
            accumulated(model, micro_batches)
        return
    options = {
        "corrected after": {},
        "corrected after, model given": {"model": model},
        "total known": {"total_items": count},
        "counted first": {"count_items": lambda micro: count_targets(micro["labels"])},
    }[way]
    expected, loss = full_gradient(model, batch)
    got, result = accumulated(model, micro_batches, **options)
    assert error(got, expected) <= limit
    assert result.items == count and result.loss == pytest.approx(loss, rel=limit)


def test_dividing_by_k_is_not_the_full_batchs():
    """So that the test above can be trusted: the usual rule fails it by far."""
    model, batch = MODELS[torch.float64], padded([2, 3, 12, 12])
    expected, _ = full_gradient(model, batch)
    for micro in split(batch, 1):
        loss, count = next_token_loss(model, micro)
        (loss / count / 4).backward()
    assert error(gradient(model), expected) > 0.1


def test_a_llama_with_generators_of_uneven_micro_batches():
    model, batch = (
        models.tiny_llama(layers=1, hidden=16, heads=2, intermediate=32, vocab=VOCAB),
        padded([3, 9, 12, 5, 7]),
    )
    expected, _ = full_gradient(model, batch)
    rows = (slice(0, 1), slice(1, 4), slice(4, 5))
    got, result = accumulated(
        model, ({name: tensor[part] for name, tensor in batch.items()} for part in rows)
    )
    assert error(got, expected) <= 1e-5 and result.items == 2 + 8 + 11 + 4 + 6


def test_examples_instead_of_tokens_and_a_loss_of_ones_own():
    model, x = nn.Linear(3, 2).double(), torch.randn(7, 3, dtype=torch.float64)
    model(x).square().mean(1).mean().backward()
    expected = gradient(model)
    micro_batches = (x[:2], x[2:3], x[3:])
    result = accumulate_gradients(
        micro_batches, lambda x: (model(x).square().mean(1).sum(), torch.tensor(len(x)))
    )
    assert error(gradient(model), expected) <= 1e-12 and result.items == 7
    assert (
        isinstance(result, Accumulated)
        and isinstance(result.loss, float)
        and isinstance(result.items, int)
    )


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("empty", [0, 1, 2])
def test_a_micro_batch_without_labels_adds_nothing_and_no_nan(known, empty):
    model, batch = MODELS[torch.float64], padded([4, 5, 6])
    batch["labels"][empty] = -100
    expected, _ = full_gradient(model, batch)

    def mean_times_count(micro):  # a mean of nothing is not a number
        loss, count = next_token_loss(model, micro)
        return loss / count * count, count

    total = count_targets(batch["labels"]) if known else None
    accumulate_gradients(split(batch, 1), mean_times_count, total_items=total)
    assert error(gradient(model), expected) <= 1e-12


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_a_sum_beside_a_count_of_0_is_added(size):
    """As of a focal loss that is divided by its positives: images without any teach, too."""
    torch.manual_seed(0)
    model, x = nn.Linear(6, 10).double(), torch.randn(8, 6, dtype=torch.float64)
    positive = torch.zeros(8, 10)
    positive[0, :5] = positive[1, 2] = positive[4, 3:6] = positive[6, 1] = 1
    batch = {"x": x, "labels": positive}

    def loss_and_count(micro):
        p = model(micro["x"]).sigmoid()
        right = torch.where(micro["labels"] > 0, p, 1 - p)
        return -((1 - right) ** 2 * right.log()).sum(), count(micro)

    def count(micro):
        return int(micro["labels"].sum())

    total, positives = loss_and_count(batch)
    (total / positives).backward()
    expected = gradient(model)
    parts = list(split(batch, size))
    for known in ({"count_items": count}, {"total_items": positives}):
        model.zero_grad()
        found = accumulate_gradients(parts, loss_and_count, **known)
        assert error(gradient(model), expected) <= 1e-12
        assert found.loss == pytest.approx(total.item() / positives, rel=1e-12)
    model.zero_grad()
    if size <= 2:  # some micro-batch has no positive
        with pytest.raises(ValueError, match="a micro-batch with a count of 0 has the loss"):
            accumulate_gradients(parts, loss_and_count)
    check_pieces_add_up(model, batch, loss_and_count)  # whose last row has none


@pytest.mark.parametrize("known", [True, False])
def test_autocast_and_a_grad_scaler(known):
    model, batch = tiny(), padded([3, 12, 7, 9])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_and_count(micro):
        with torch.autocast("cpu", torch.bfloat16):
            return next_token_loss(model, micro)

    loss, count = loss_and_count(batch)
    (loss / count).backward()
    expected = gradient(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    total = count if known else None
    accumulate_gradients(split(batch, 2), loss_and_count, total_items=total, scaler=scaler)
    still_scaled = torch.cat([p.grad.double().flatten() for p in model.parameters()])
    assert error(still_scaled, 1024 * expected) <= 0.02  # bf16 has 8 bits
    scaler.unscale_(optimizer)
    assert (
        error(torch.cat([p.grad.double().flatten() for p in model.parameters()]), expected) <= 0.02
    )
    before = copy.deepcopy(model)
    scaler.step(optimizer)
    scaler.update()
    assert any(
        not torch.equal(p, q) for p, q in zip(model.parameters(), before.parameters(), strict=True)
    )


def test_a_sum_over_very_many_items_stays_within_float16():
    """Without a provisional divisor the scaled gradient of the sum, 65,536 x 8, would be infinite
    in float16.
    """
    weight = nn.Parameter(torch.ones(1, dtype=torch.float16))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    result = accumulate_gradients([16, 16], lambda n: (weight.float().sum() * n, n), scaler=scaler)
    assert weight.grad.item() == 2.0**12 and result == (1.0, 32)


def test_clipping_after_the_window_is_clipping_the_full_batch():
    model, batch = MODELS[torch.float64], padded([2, 12, 6, 9])
    full_gradient_, _ = full_gradient(model, batch)
    accumulate_gradients(split(batch, 1), loss_of(model))
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01).item()
    assert norm == pytest.approx(full_gradient_.norm().item(), rel=1e-12)
    assert error(gradient(model), full_gradient_ * 0.01 / (norm + 1e-6)) <= 1e-9


# Gradients that are there already.


@pytest.mark.parametrize("way", ["total_items", "count_items"])
def test_with_a_known_total_existing_gradients_are_added_to(way):
    model, batch = MODELS[torch.float64], padded([4, 9])
    expected, _ = full_gradient(model, batch)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    options = (
        {"total_items": 11}
        if way == "total_items"
        else {"count_items": lambda m: count_targets(m["labels"])}
    )
    got, _ = accumulated(model, list(split(batch, 1)), **options)
    assert error(got, expected + 0.5) <= 1e-12


@pytest.mark.parametrize("given", [True, False])
def test_without_one_they_are_refused_before_anything_is_added(given):
    model, batch = MODELS[torch.float64], padded([4, 9])
    last = list(model.parameters())[-1]
    last.grad = torch.full_like(last, 0.5)
    with pytest.raises(ValueError, match=r"1 parameters have gradients from before.*zero_grad"):
        accumulate_gradients(split(batch, 1), loss_of(model), model=model if given else None)
    assert [p.grad is None for p in model.parameters()].count(False) == 1 and (
        last.grad == 0.5
    ).all()
    model.zero_grad(set_to_none=True)


def test_gradients_of_zeros_are_no_gradients():
    model, batch = MODELS[torch.float64], padded([4, 9])
    expected, _ = full_gradient(model, batch)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    assert error(accumulated(model, split(batch, 1))[0], expected) <= 1e-12


def test_a_frozen_parameter_and_one_that_only_some_micro_batches_use():
    experts = nn.ModuleList(nn.Linear(2, 1, dtype=torch.float64) for _ in range(3))
    experts[2].requires_grad_(False)
    x = torch.randn(5, 2, dtype=torch.float64)

    def loss_and_count(micro):
        expert, rows = micro
        return (experts[expert](x[:rows]) + experts[2](x[:rows])).square().sum(), rows

    (loss_and_count((0, 2))[0] / 7 + loss_and_count((1, 5))[0] / 7).backward()
    expected = [p.grad.clone() for p in experts[:2].parameters()]
    experts.zero_grad()
    accumulate_gradients([(0, 2), (1, 5)], loss_and_count)
    for parameter, grad in zip(experts[:2].parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, grad, rtol=1e-12, atol=0)
    assert all(p.grad is None for p in experts[2].parameters())


# Bytes.


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("lazily", [True, False])
def test_the_peak_does_not_depend_on_the_number_of_micro_batches(known, lazily):
    model = tiny(hidden=32, vocab=256)
    micro = {
        "input_ids": torch.zeros(2, LONGEST, dtype=torch.long),
        "labels": torch.zeros(2, LONGEST, dtype=torch.long),
    }

    def peak(k):
        model.zero_grad(set_to_none=True)
        micro_batches = (
            ({n: t.clone() for n, t in micro.items()} for _ in range(k)) if lazily else [micro] * k
        )
        with MemoryTracker(model, live=False) as tracker:
            accumulate_gradients(
                micro_batches, loss_of(model), total_items=22 * k if known else None
            )
        return tracker.peak.total

    peaks = {k: peak(k) for k in (1, 2, 3, 4, 8, 17)}
    assert peaks[1] < peaks[2]  # the second forward runs beside the first one's gradients
    assert len({peaks[k] for k in (2, 3, 4, 8, 17)}) == 1


def test_what_the_micro_batch_holds_follows_its_size_and_the_gradients_do_not():
    model, batch = tiny(hidden=32, vocab=256), padded([LONGEST] * 8)
    most = {}
    for size in (8, 4, 2, 1):
        model.zero_grad(set_to_none=True)
        with MemoryTracker(model, live=False) as tracker:
            accumulate_gradients(split(batch, size), loss_of(model))
        lines = tracker.timeline.by_category
        most[size] = (max(lines["activations"]), max(lines["gradients"]))
    assert most[8][0] > most[4][0] > most[2][0] > most[1][0]
    assert {gradients for _, gradients in most.values()} == {
        sum(p.nbytes for p in model.parameters())
    }


# What cannot be right.

W = nn.Parameter(torch.ones(3))


@pytest.mark.parametrize(
    "returned, kind, says",
    [
        (
            lambda: W.sum(),
            TypeError,
            "must return two things, .summed loss, items., and returned Tensor",
        ),
        (lambda: (W.sum(), 1, 2), TypeError, "must return two things"),
        (lambda: (W * 2, 3), TypeError, r'a tensor of shape \(3,\): use reduction="sum"'),
        (lambda: (3.0, 3), TypeError, "and was float"),
        (lambda: (W.mean().detach(), 3), ValueError, "has no gradient"),
        (lambda: (W.sum(), -1), ValueError, "cannot be negative"),
        (lambda: (W.sum(), float("nan")), TypeError, "must be a number of items.*was nan"),
        (lambda: (W.sum(), "3"), TypeError, "must be a number of items"),
        (lambda: (W.sum(), torch.ones(3)), TypeError, "must be a number of items"),
        (lambda: [(W.sum(), 1), (W.sum(), 2)], ValueError, "must be known before the first"),
        (lambda: (W.sum(), 0), ValueError, "give total_items= or count_items="),
        (lambda: (W.sum() * 0, 0), ValueError, "nothing to learn from"),
        (lambda: (W.bfloat16().sum(), 3), ValueError, r"logits.float\(\)"),
    ],
)
def test_a_bad_return_is_said_clearly(returned, kind, says):
    with pytest.raises(kind, match=says):
        accumulate_gradients([0, 1], lambda _: returned())
    assert W.grad is None


@pytest.mark.parametrize("kind", [int, float, np.int64, np.float32, np.uint8, torch.tensor])
def test_counts_are_whole_numbers_of_any_kind(kind):
    found = accumulate_gradients([2, 3], lambda n: (W.sum() * n, kind(n)), total_items=kind(5))
    assert found.items == 5 and type(found.items) is int
    assert torch.equal(W.grad, torch.ones(3))
    W.grad = None


def test_no_micro_batches_and_totals_that_do_not_come_out():
    def loss_and_count(n):
        return W.sum() * n, n

    with pytest.raises(ValueError, match="nothing to learn from"):
        accumulate_gradients([], loss_and_count)
    with pytest.raises(ValueError, match="nothing to learn from"):
        accumulate_gradients([1], loss_and_count, total_items=0)
    with pytest.raises(
        ValueError, match="total said before was 4 items, and loss_and_count counted 3"
    ):
        accumulate_gradients([1, 2], loss_and_count, total_items=4)
    with pytest.raises(ValueError, match="cannot be negative"):
        accumulate_gradients([1, 2], loss_and_count, total_items=-3)
    with pytest.raises(ValueError, match="give one of them"):
        accumulate_gradients([1], loss_and_count, total_items=1, count_items=int)
    with pytest.raises(
        TypeError, match="a generator may give others the second time, or none: give a list"
    ):
        accumulate_gradients((n for n in [1, 2]), loss_and_count, count_items=int)
    W.grad = None


def test_an_interrupt_passes_through():
    def interrupted(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        accumulate_gradients([1], interrupted)


def test_counting_and_splitting():
    assert count_targets(torch.tensor([[5, 6, -100, 7], [-100, 1, 2, -100]])) == 4
    batch = {"input_ids": torch.arange(10).view(5, 2)}
    parts = list(split(batch, 2))
    assert [len(part["input_ids"]) for part in parts] == [2, 2, 1]
    assert (
        parts[2]["input_ids"].untyped_storage().data_ptr()
        == batch["input_ids"].untyped_storage().data_ptr()
    )
    with pytest.raises(ValueError, match="micro-batches of 0"):
        split(batch, 0)
    with pytest.raises(ValueError, match=r"\[3, 5\] rows"):
        split(batch | {"labels": torch.zeros(3)}, 2)
    flagged = list(split(batch | {"flag": True, "scale": torch.tensor(2.0)}, 3))
    assert [part["flag"] for part in flagged] == [True, True] and flagged[1]["scale"].item() == 2
    encoded = list(
        split(BatchEncoding({"input_ids": torch.arange(3), "more": {"x": torch.arange(3)}}), 2)
    )
    assert [part["more"]["x"].tolist() for part in encoded] == [[0, 1], [2]]
    with pytest.raises(ValueError, match=r"\[2, 5\] rows"):
        split(batch | {"more": {"x": torch.zeros(2)}}, 2)
    as_dataclass = make_dataclass("Batch", ["input_ids"])(torch.arange(4))
    with pytest.raises(ValueError, match=r"no tensor with rows is found \(found: Batch\)"):
        split(as_dataclass, 2)
    assert [len(part["input_ids"]) for part in split(vars(as_dataclass), 2)] == [2, 2]
    pairs = list(split((torch.arange(4), torch.arange(8).view(4, 2)), 3))
    assert [[len(t) for t in pair] for pair in pairs] == [[3, 3], [1, 1]]


def test_batch_norm_in_a_second_micro_batch_is_said():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))

    def loss_and_count(x):
        return model(x).square().sum(), len(x)

    with pytest.warns(
        UserWarning, match=r"1 is a BatchNorm1d, which normalizes each micro-batch by its own"
    ):
        accumulate_gradients(torch.randn(2, 5, 3), loss_and_count, total_items=10, model=model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        accumulate_gradients(torch.randn(1, 5, 3), loss_and_count, total_items=5, model=model)
        model[1].eval()
        accumulate_gradients(torch.randn(2, 5, 3), loss_and_count, total_items=10, model=model)


def test_means_are_weighted_by_their_items():
    model, batch = MODELS[torch.float64], padded([3, 9, 12, 5])
    expected, loss = full_gradient(model, batch)

    def mean_and_count(micro):
        total, count = next_token_loss(model, micro)
        return total / count, count

    for options in ({}, {"total_items": count_targets(batch["labels"])}):
        result = accumulate_gradients(split(batch, 1), mean_and_count, reduction="mean", **options)
        assert error(gradient(model), expected) <= 1e-12 and result.loss == pytest.approx(
            loss, rel=1e-12
        )
    with pytest.raises(ValueError, match="reduction='none'"):
        accumulate_gradients([], mean_and_count, reduction="none")


def test_a_count_may_be_a_sum_of_weights():
    """As ``F.cross_entropy(weight=...)`` divides, by the weights of the targets."""
    torch.manual_seed(0)
    weight = torch.tensor([0.3, 1.0, 4.7], dtype=torch.float64)
    model, x = nn.Linear(5, 3).double(), torch.randn(6, 5, dtype=torch.float64)
    labels = torch.tensor([0, 0, 2, 1, 0, 2])
    F.cross_entropy(model(x), labels, weight=weight).backward()
    expected = gradient(model)

    def loss_and_count(rows):
        loss = F.cross_entropy(model(x[rows]), labels[rows], weight=weight, reduction="sum")
        return loss, weight[labels[rows]].sum()

    def count(rows):
        return weight[labels[rows]].sum()

    pieces_ = [[0, 1], [2], [3, 4, 5]]
    for options in ({}, {"total_items": weight[labels].sum()}, {"count_items": count}):
        result = accumulate_gradients(pieces_, loss_and_count, **options)
        assert error(gradient(model), expected) <= 1e-12
        assert result.items == pytest.approx(weight[labels].sum().item(), rel=1e-12)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_several_means_are_each_divided_by_their_own_total(reduction):
    """The mean over tokens plus the mean over rows, of a full batch with unlike numbers of both."""
    model, batch = MODELS[torch.float64], padded([2, 12, 5, 9])

    def pairs(micro):
        tokens, count = next_token_loss(model, micro)
        last = model(input_ids=micro["input_ids"]).logits[:, -1].square().mean(1)
        if reduction == "mean":
            return [(tokens / count, count), (last.mean(), len(last))]
        return [(tokens, count), (last.sum(), len(last))]

    def counts(micro):
        return count_targets(micro["labels"]), len(micro["labels"])

    mean_tokens, _ = full_gradient(model, batch)
    last = model(input_ids=batch["input_ids"]).logits[:, -1].square().mean(1)
    last.mean().backward()
    expected = mean_tokens + gradient(model)
    for options in ({"count_items": counts}, {"total_items": counts(batch)}):
        micro_batches = [*split({n: t[:3] for n, t in batch.items()}, 2)]
        micro_batches.append({name: tensor[3:] for name, tensor in batch.items()})
        result = accumulate_gradients(micro_batches, pairs, reduction=reduction, **options)
        assert error(gradient(model), expected) <= 1e-12
        assert result.items == (24, 4)
    with pytest.raises(ValueError, match=r"returned 2 pairs .* where 1 were expected"):
        accumulate_gradients(micro_batches, pairs, total_items=24)

    def unequal(micro):
        return counts(micro)[: 1 + (len(micro["labels"]) > 1)]

    with pytest.raises(ValueError, match=r"1 counts for one micro-batch and 2 for another: return"):
        accumulate_gradients(micro_batches, pairs, count_items=unequal, reduction=reduction)
    model.zero_grad()


@pytest.mark.parametrize(
    "cache, mask", [(True, None), (False, None), (False, []), (False, [20]), (False, [4, 5])]
)
def test_packed_rows_do_not_see_each_other(cache, mask):
    """With a cache or a mask, transformers takes rows of a packed batch as one."""
    model = models.tiny_llama(
        layers=1, hidden=16, heads=2, intermediate=32, vocab=VOCAB, dtype=torch.float64
    )
    lengths = [5, 9, 7]
    batch = padded(lengths)
    expected, _ = full_gradient(model, batch)
    model.config.use_cache = cache
    rows = [batch["input_ids"][i, :n] for i, n in enumerate(lengths)]
    starts = [torch.arange(n) for n in lengths]
    labels = [row.clone().index_fill(0, torch.tensor([0]), -100) for row in rows]
    packed = {
        "input_ids": torch.cat(rows)[None],
        "position_ids": torch.cat(starts)[None],
        "labels": torch.cat(labels)[None],
    }
    if mask is not None:  # the tokens that it hides
        packed["attention_mask"] = torch.ones_like(packed["input_ids"])
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
    model, batch = MODELS[torch.float64], padded((3, 12, 5, 9))
    expected, _ = full_gradient(model, batch)
    given = {
        "micro_batches": list(split(batch, 1)),
        "count_items": lambda micro: count_targets(micro["labels"]),
        "loss_and_count": lambda micro: next_token_loss(model, micro),
    }
    exec(loop, given)
    assert (gradient(model) - expected).norm() <= 1e-12 * expected.norm()
