"""Short traces say what the full one says, and remembered fake tensors what PyTorch's own say."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from support.predicted import (
    SEQ,
    config,
)

from gradmem_lib import Recipe, predict
from gradmem_lib.prediction import fakes, short_traces
from gradmem_lib.prediction import predict as predict_module
from gradmem_lib.prediction.allocator import replayed
from gradmem_lib.prediction.question import Question
from gradmem_lib.techniques.schedules import segments_for


def test_a_full_trace_serves_the_allocator_too(spy):
    recipe = Recipe(precision="bf16", checkpointing="first-1", accumulation=5)
    ask = {"batch_size": 5, "seq_len": SEQ, "recipe": recipe, "target": "cuda"}
    every = replayed(predict_module.traced(predict(config("llama"), **ask)._question).requests)
    full, short = (spy(module, "traced") for module in (predict_module, short_traces))
    assert predict(config("llama"), **ask).replay_allocator() == every
    assert full.call_count + short.call_count == 1


def _operations(x, n):
    """Results of operations that are easy to take for one another."""
    yield x + 1
    yield x + x
    yield n * 2
    yield n * 2.0
    yield n * True
    yield x.half() + 1
    yield x.t()
    yield x.t() + 1
    yield x[1:]
    yield x[1:].sum(0)
    yield x[::2]
    yield x.view(-1)[3:9]
    # the same operation on parts that begin elsewhere
    for part in (x[:2], x[1:3], x[2:]):
        yield part + 1
        yield part.t()
        yield part.as_strided((2, 2), (1, 6), 5)
        yield torch.ops.aten._unsafe_view(part, (12,))
        yield torch.cat([part, x])
    yield x.expand(2, *x.shape)
    yield torch.zeros(3, 4)
    yield torch.zeros(3, 4, dtype=torch.bfloat16)
    yield x.clone().add_(1)
    yield x.clone().resize_(2, 2)
    yield x.clone().unsqueeze_(0)
    y = x.clone()
    yield y.set_(y)
    yield x.clone().set_(x)
    yield from x.split(2)
    yield torch.nn.functional.layer_norm(x, x.shape[1:])
    # a conjugate stays one
    pairs = x.cfloat()
    yield pairs.conj()
    yield pairs[1:]
    yield pairs.conj()[1:]


def test_remembered_results_have_the_form_of_real_ones():
    def forms():
        tensors = torch.ones(4, 6), torch.ones(4, 6, dtype=torch.int64)
        base = tensors[0].untyped_storage()._cdata
        return [
            (
                t.shape,
                t.stride(),
                t.dtype,
                t.storage_offset(),
                t.untyped_storage().nbytes(),
                t.untyped_storage()._cdata == base,
                t.is_conj(),
            )
            for t in _operations(*tensors)
        ]

    real = forms()
    fakes.answers_by_settings.clear()
    for _ in range(3):
        with fakes.QuickFakeMode():
            assert forms() == real


@pytest.fixture
def asked(monkeypatch):
    """The operations that PyTorch's own fakes are asked for, from an empty memory on."""
    found, own = [], fakes.QuickFakeMode._compute

    def _compute(self, func, *rest):
        found.append(func)
        return own(self, func, *rest)

    fakes.answers_by_settings.clear()
    monkeypatch.setattr(fakes.QuickFakeMode, "_compute", _compute)
    yield found
    fakes.answers_by_settings.clear()


@pytest.mark.parametrize(
    "change, back",
    [
        (torch.set_default_dtype, torch.float64),
        (torch.use_deterministic_algorithms, True),
        (torch.backends.cuda.enable_flash_sdp, False),
        (torch.backends.cuda.enable_mem_efficient_sdp, False),
        (torch.backends.cuda.enable_math_sdp, False),
    ],
)
def test_what_is_set_for_the_process_has_answers_of_its_own(change, back, asked):
    def times():
        with fakes.QuickFakeMode():
            asked.clear()
            torch.ones(3)
            return len(asked)

    assert times() == 1 and times() == 0
    change(back)
    try:
        assert times() == 1 and times() == 0
    finally:
        change(torch.float32 if back is torch.float64 else not back)
    assert times() == 0


UNUSUAL = {
    "number": ("-> (Tensor, float)", lambda x: (x.clone(), 0.5)),
    "halves": ("-> (Tensor, Tensor)", lambda x: tuple(x.new_empty(2, *x.shape).unbind())),
    "within": ("-> Tensor", lambda x: x.new_empty(9, *x.shape)[1]),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_results_of_an_unusual_form_keep_it(name):
    """A number beside a tensor, two tensors in one storage, and one that begins within its own."""
    returns, made = UNUSUAL[name]
    with torch.library._scoped_library("unusual", "FRAGMENT") as library:
        library.define(f"{name}(Tensor x) {returns}")
        library.impl(name, made, "CompositeExplicitAutograd")
        forms = []
        for around in (nullcontext(), *[fakes.QuickFakeMode()] * 3):
            with around:
                out = getattr(torch.ops.unusual, name)(torch.ones(4, 6))
                tensors = [
                    t for t in (out if type(out) is tuple else [out]) if isinstance(t, torch.Tensor)
                ]
                storages = {
                    t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors
                }
                numbers = [n for n in out if not isinstance(n, torch.Tensor)]
                forms.append(([*storages.values()], [t.storage_offset() for t in tensors], numbers))
        assert forms == [forms[0]] * 4


def units(recipe: Recipe, layers: int, **question) -> list[int]:
    source = predict_module.source_of(config("llama", layers))
    question = Question(source, recipe, 1, 8, "cpu", None, None, 1, 0, **question)
    return [one.unit for one in short_traces._repeated_units(question)]


def test_what_is_repeated_of_a_schedule():
    for n in range(4, 60, 5):
        (length,) = units(Recipe(checkpointing="sqrt"), n)
        assert segments_for(length, n) == segments_for("sqrt", n) and length == round(n**0.5)
    assert units(Recipe(every_n_layers=3), 9) == [3]
    assert units(Recipe(checkpointing="mlp"), 9) == units(Recipe(), 9) == [1]
    assert units(Recipe(checkpointing="best"), 64) == []
    assert units(Recipe(checkpointing=[4, 4, 1]), 9) == []
