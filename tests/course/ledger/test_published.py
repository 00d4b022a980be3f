"""What the benchmark of published peaks found, and its replay of an emptied cache."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
import torch

from gradmem_lib.course.ledger import published
from gradmem_lib.model.configs import skeleton
from gradmem_lib.model.known import known_model
from gradmem_lib.prediction.allocator import Allocator
from gradmem_lib.view.peaks import off_by

MiB, GiB = 2**20, 2**30


def test_an_emptied_cache_keeps_the_segments_in_use():
    allocator = Allocator()
    small, large, other = (allocator.allocate(n) for n in (512, 9 * MiB, 30 * MiB))
    half = allocator.allocate(9 * MiB)
    assert allocator.reserved == (2 + 20 + 30) * MiB
    for address in (small, large, other):
        allocator.free(address)
    allocator.empty_cache()
    assert allocator.reserved == 20 * MiB  # the other half of it is in use
    assert allocator.allocate(9 * MiB) == large and allocator.reserved == 20 * MiB
    allocator.free(half)
    allocator.free(large)
    allocator.empty_cache()
    assert allocator.reserved == 0 and not allocator._segments


def test_gradients_wait_for_the_next_step(load):
    """Two weights, an activation, two gradients, a temporary for each of them, and the loss."""
    module = load("published_peft")
    requests = (
        2 * MiB,
        3 * MiB,
        MiB,
        2 * MiB,
        3 * MiB,
        -3,
        4 * MiB,
        5 * MiB,
        -6,
        -7,
        -4,
        -5,
        512,
        -8,
    )
    assert module.Step(None, requests).gradients == {3, 4}


def test_a_long_step_after_an_emptied_cache(load):
    """Blocks of gradients are still held when the cache is emptied, and serve the long step's
    activations.
    """
    module, own = load("published_peft"), 2 * 20 * MiB  # two workspaces
    short = module.Step(None, (40 * MiB, 12 * MiB, 40 * MiB, -2, 1024, -4, -3))
    long = module.Step(None, (40 * MiB, 30 * MiB, 40 * MiB, -2, 1024, -4, -3))
    assert short.gradients == long.gradients == {2}
    assert module.reserved_by(short, long) == own // 2 + (40 + 40 + 40 + 2) * MiB


NEAR = {
    "FitCheck": 0.07,
    "LitGPT": 0.005,
    "PEFT": 0.01,
    "Transformers": 0.01,
    "Answer.AI": 0.05,
    "torchtune": 0.07,
}


@pytest.mark.parametrize("who, most", NEAR.items())
def test_what_was_predicted_is_near_what_was_published(who, most):
    found = [row for row in published.rows() if row.source.startswith(who)]
    assert found and all(abs(row.predicted / row.published - 1) <= most for row in found)


def test_what_fitcheck_allocated_is_right_within_a_thousandth():
    found = [row for row in published.rows() if row.source.startswith("FitCheck")]
    allocated = [row for row in found if row.what == "most allocated"]
    assert len(allocated) == len(found) / 2 == 11
    assert all(abs(row.predicted / row.published - 1) < 0.0015 for row in allocated)


def test_what_accelerate_estimates_depends_on_the_weights_alone():
    from accelerate.commands.estimate import estimate_training_usage

    weights = sum(p.nbytes for p in skeleton(known_model("TinyLlama-1.1B")[1]).parameters())
    assert f"{estimate_training_usage(weights, 'float32')['step'] / 1e9:.2f}" == "17.60"


def test_every_source_is_expected():
    assert {row.source.partition(",")[0].partition("'")[0] for row in published.rows()} == set(
        published.SOURCES
    )
    assert set(NEAR) == set(published.SOURCES)


def test_the_recorded_rows_are_those_of_the_benchmarks(load):
    wanted = {}
    for method, row in load("published_peft").PEFT.items():
        wanted[method, "allocated after a step, mean"] = row.allocated
        wanted[method, "reserved, 99th percentile"] = row.reserved
    for (name, base, n), peak in load("published_litgpt").PEAKS.items():
        wanted[f"{name}, {base}, {n} row{'s' * (n > 1)}", "most allocated"] = round(peak * 1e9)
    for (method, n, tokens, cards), peak in load("published_answer").PEAKS.items():
        run = f"{method}, {n} x {tokens:,} tokens, {'FSDP' if cards > 1 else 'not sharded'}"
        wanted[run, "most reserved"] = round(peak * GiB)
    for name, (peak, _) in load("published_torchtune").PEAKS.items():
        wanted[name, "peak"] = round(peak * GiB)
    for run in load("published_fitcheck").runs():
        wanted[str(run), "most allocated"] = round(run.allocated * MiB)
        wanted[str(run), "reserved"] = round(run.reserved * MiB)
    ours = {(row.run, row.what): row.published for row in published.rows()}
    assert {key: ours.get(key) for key in wanted} == wanted
    assert len(ours) == len(wanted) + 9  # and BERT-large's


def test_litgpt_s_models_train_as_many_numbers_as_it_said(load):
    module = load("published_litgpt")
    trained = [1_572_864, 2_097_152, 4_194_304, 6_553_600]
    for (name, shape), number in zip(module.SHAPES.items(), trained, strict=True):
        with module.on_meta(torch.bfloat16):
            model = module.Model(shape, module.LINEAR["nf4-dq"])
        assert sum(p.numel() for n, p in model.named_parameters() if "lora" in n) == number, name


def test_a_recorded_row_can_be_predicted_again(load):
    module = load("published_litgpt")
    (row,) = [row for row in published.rows() if row.run == "StableLM-Alpha-3B, nf4, 1 row"]
    assert module.predicted("StableLM-Alpha-3B", "nf4", 1) == row.predicted


def test_a_recorded_run_of_fitcheck_can_be_predicted_again(load):
    """Its peak is in attention: without the softmax's own product, it is 128 MiB lower."""
    module = load("published_fitcheck")
    (run,) = [run for run in module.runs() if str(run) == "TinyLlama-1.1B, nf4, eager, 1 x 1,024"]
    recorded = {row.what: row.predicted for row in published.rows() if row.run == str(run)}
    assert module.figures(run) == recorded


@pytest.mark.parametrize(
    "double, nbytes", [(False, 0.5 + 4 / 64), (True, 0.5 + 1 / 64 + 4 / 64 / 256)]
)
def test_bytes_of_a_weight_in_four_bits(load, double, nbytes):
    layer = load("published_layers").FourBits(256, 512, bias=False, double=double)
    assert sum(p.nbytes for p in layer.parameters()) == nbytes * 256 * 512


def test_adapters_of_answer_ai(load, monkeypatch):
    module = load("published_answer")
    monkeypatch.setitem(module.LLAMA_7B, "num_hidden_layers", 2)
    model = module.model_of("QLoRA")
    adapters = [p for p in model.parameters() if p.requires_grad]
    assert sum(p.numel() for p in adapters) == 2 * 64 * (3 * (4096 + 4096) + 3 * (4096 + 11_008))
    assert {p.dtype for p in adapters} == {torch.bfloat16}


def test_a_unit_of_fsdp_as_it_is_wrapped(load):
    """Halves go where the separate tensors were; what the whole ones took stays reserved."""
    module = load("published_answer")
    allocator, unit = Allocator(), [30 * MiB, 30 * MiB]
    module.wrap(allocator, unit, cards=2)
    # the broadcast's copy makes room for the flat tensor
    assert allocator.reserved == (30 + 30 + 60) * MiB
    used = [allocator._used[address][0] for address in allocator._used]
    assert used == [30 * MiB]
    module.wrap(allocator, unit, cards=1)
    assert allocator.reserved == (30 + 30 + 60 + 60) * MiB


def test_the_table_has_every_figure_beside_bars_of_its_length(monkeypatch):
    import IPython.display

    shown = []
    monkeypatch.setattr(IPython.display, "display", shown.append)
    published.show("LitGPT", "PEFT")
    published.show()
    with pytest.raises(ValueError, match="nothing is recorded of Unsloth: choose among FitCheck"):
        published.show("Unsloth")
    wanted = published.rows()
    most = max(max(row.published, row.predicted) for row in wanted)
    some, every = (rows_in(output.data) for output in shown)
    assert len(every) == len(wanted)
    assert len(some) == sum(row.source.startswith(("LitGPT", "PEFT")) for row in wanted)
    markdown = published.table()
    for row, (name, measured, predicted, off, bars) in zip(wanted, every, strict=True):
        figures = [name.text, measured.text, predicted.text]
        sizes = (row.published, row.predicted)
        assert figures == [f"{row.run}: {row.what}", *(f"{n / 1e9:.2f}" for n in sizes)]
        assert off.text == off_by(*sizes)
        assert f"| {row.run} | {row.what} | {measured.text} | {predicted.text} |" in markdown
        widths = [float(bar.get("style").split("%")[0].split(":")[1]) for bar in bars]
        assert widths == pytest.approx([100 * n / most for n in sizes])


def rows_in(html: str) -> list[list]:
    """The cells of each row with figures."""
    root = ElementTree.fromstring(html)
    return [list(row) for row in root.findall("tbody/tr") if len(row) == 5]


@pytest.mark.parametrize(
    "predicted, words", [(1023, "+2.3%"), (970, "-3.0%"), (1000, "0.0%"), (9996, "+899.6%")]
)
def test_a_difference_in_per_cent(predicted, words):
    assert off_by(1000, predicted) == words
    assert off_by(100_000, 99_999) == "0.0%"
