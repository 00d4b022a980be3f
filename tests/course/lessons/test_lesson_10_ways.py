"""Lesson 10's table of what each way holds and sends, counted on real ranks; and its script for
several machines.
"""

from __future__ import annotations

import ast
import re
from collections import Counter

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from lesson_facts import lessons
from support.paths import ROOT
from torch.distributed import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from gradmem_lib import known_model
from gradmem_lib.course import run_ranks, torchrun
from gradmem_lib.course.material import accounting, models
from gradmem_lib.units import GiB

SOURCE = (ROOT / "solutions" / "10_beyond_one_card.py").read_text(encoding="utf-8")
TEXT = " ".join(SOURCE.replace("\n# ", "\n").split())
LAYERS, HIDDEN = 8, 64
ROWS, TOKENS = 4, 32


@pytest.fixture(scope="module")
def printed() -> str:
    return next(lesson for lesson in lessons() if lesson.number == "10").printed


class Sent(TorchDispatchMode):
    """The numbers that collectives and messages are called with, by the kind of call."""

    def __init__(self):
        super().__init__()
        self.numbers: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kind = func.name()
        if "c10d" in kind and "wait" not in kind and "wrap" not in kind:
            tensor = args[0]
            while isinstance(tensor, (list, tuple)):
                tensor = tensor[0]
            self.numbers[kind] += tensor.numel()
            self.calls[kind] += 1
        return func(*args, **(kwargs or {}))


def of_kind(found: Counter, name: str) -> int:
    return sum(count for kind, count in found.items() if name in kind)


def llama():
    return models.tiny_llama(layers=LAYERS, hidden=HIDDEN, heads=4, intermediate=172, vocab=257)


def sharded(shape: tuple[int, ...]) -> tuple[int, Counter, Counter]:
    """Numbers of weights that a rank holds, and what a forward and backward send."""
    net, names = llama(), ("copies", "shards")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for layer in net.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    ids = torch.zeros(ROWS, TOKENS, dtype=torch.long)
    with Sent() as sent:
        net(input_ids=ids, labels=ids).loss.backward()
    held = sum(p.to_local().numel() for p in net.parameters())
    return held, sent.numbers, sent.calls


@pytest.fixture(scope="module")
def by_value():
    """Ranks are sent what this file defines."""
    import sys

    module = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(module)
    yield
    cloudpickle.unregister_pickle_by_value(module)


@pytest.mark.usefixtures("by_value")
def test_fsdp_sends_three_times_the_weights_and_hybrid_sharding_a_share_between_machines():
    weights = sum(p.numel() for p in llama().parameters())
    rest = weights - sum(p.numel() for p in llama().model.layers.parameters())
    held, numbers, calls = run_ranks(sharded, (4,), ranks=4, live=False)[0]
    assert held == pytest.approx(weights / 4, rel=0.01)
    assert "| 1/N of all three; two whole units | 3 W a micro-batch |" in TEXT
    # two all-gathers of every layer. The rest is gathered once: backward begins where forward ends.
    gathered = of_kind(numbers, "allgather")
    assert gathered == pytest.approx(2 * weights - rest, rel=0.01)
    assert 4 * of_kind(numbers, "reduce_scatter") == pytest.approx(weights, rel=0.01)
    assert not of_kind(calls, "allreduce_")
    assert "FSDP sends up to three times the model's size in each micro-batch." in TEXT
    # in a ring of four, a rank sends three quarters of it
    assert 2 * weights < 3 / 4 * (gathered + weights) < 3 * weights

    held, numbers, calls = run_ranks(sharded, (2, 2), ranks=4, live=False)[0]
    assert "FSDP in each machine of n cards | 1/n of all three; two whole units" in TEXT
    assert held == pytest.approx(weights / 2, rel=0.01)
    assert "3 W a micro-batch inside, 2 W / n between machines" in TEXT
    assert of_kind(numbers, "allgather") == pytest.approx(gathered, rel=0.01)
    assert 2 * of_kind(numbers, "reduce_scatter") == pytest.approx(weights, rel=0.01)
    # between the machines: an all-reduce (twice its bytes in a ring) of a card's shards
    assert 2 * of_kind(numbers, "allreduce_") == pytest.approx(2 * weights / 2, rel=0.01)


def cell_with(text: str) -> str:
    """The code of the lesson's one cell that has ``text``."""
    (found,) = (cell for cell in re.split(r"^# %%.*$", SOURCE, flags=re.M) if text in cell)
    return found


def in_tensors():
    names: dict = {"init_device_mesh": init_device_mesh, "dist": dist}
    exec(cell_with("import Replicate"), names)
    exec(cell_with("def cut_layers("), names)
    net, alone = llama(), llama()
    names["cut_layers"](net)
    ids = torch.arange(ROWS * TOKENS).view(ROWS, TOKENS)
    with Sent() as sent:
        loss = net(input_ids=ids, labels=ids).loss
        loss.backward()
    alone(input_ids=ids, labels=ids).loss.backward()
    for p, q in zip(net.parameters(), alone.parameters(), strict=True):
        whole = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
        torch.testing.assert_close(whole, q.grad, atol=1e-6, rtol=1e-4)
    local = (p.to_local() if hasattr(p, "to_local") else p for p in net.parameters())
    return sum(p.nbytes for p in local), sent.numbers, sent.calls


@pytest.mark.usefixtures("by_value")
def test_tensor_parallel_sends_four_all_reduces_a_layer(printed):
    held, numbers, calls = run_ranks(in_tensors, live=False)[0]
    assert "two all-reduces a layer, after attention and after the MLP" in TEXT
    assert "and two in backward, each as large as the layer's input" in TEXT
    assert sum(calls.values()) == of_kind(calls, "all_reduce") == 4 * LAYERS
    assert sum(numbers.values()) == 4 * LAYERS * ROWS * TOKENS * HIDDEN
    net = llama()
    every = sum(p.nbytes for p in net.parameters())
    matrices = sum(p.nbytes for p in net.model.layers.parameters() if p.ndim == 2)
    assert held == every - matrices // 2
    assert f"Each rank holds {held:,} of {every:,} bytes" in TEXT
    assert f"{held:,} bytes of weights" in printed and f"'all_reduce': {4 * LAYERS}" in printed
    assert "the loss of one process: True" in printed


def in_a_pipeline():
    names: dict = {"torch": torch, "nn": torch.nn, "dist": dist}
    exec(cell_with("def stack():"), names)
    rank = dist.get_rank()
    own = slice(4 * rank, 4 * rank + 4)
    stage = names["PipelineStage"](names["stack"]()[own], rank, 2, torch.device("cpu"))
    x, goal = torch.zeros(2, 8, 64)
    with Sent() as sent:
        names["step_of"](stage, x, goal)
    return sent.numbers


@pytest.mark.usefixtures("by_value")
def test_a_pipeline_sends_a_boundary_forward_and_its_gradient_back(printed):
    assert "a boundary forward and a gradient back, each micro-batch" in TEXT
    for numbers in run_ranks(in_a_pipeline, live=False):
        boundaries = 8 * 64  # of all four micro-batches together
        # beside them, the ranks tell each other the shapes, once: a few hundred numbers
        assert boundaries <= of_kind(numbers, "send") < boundaries + 300
    for layers in ("0 to 3", "4 to 7"):
        assert f"layers {layers}, the gradients of one process: True" in printed


def test_a_cache_with_shared_heads():
    config = known_model("Llama-2-70B")[1]
    token = accounting.kv_cache_bytes(config, 1, 1, 2)
    layers, heads = config.num_hidden_layers, config.num_key_value_heads
    size = config.hidden_size // config.num_attention_heads
    assert (
        f"has {layers} layers. Its {config.num_attention_heads} query heads share {heads}" in TEXT
    )
    assert f"{layers} × 2 × {heads} × {size} × 2 = {token:,} bytes a token." in TEXT
    assert f"A text of 8,192 tokens takes {8192 * token / GiB:.1f} GiB." in TEXT
    own = config.num_attention_heads // heads
    assert f"keys of its own, it would be {8192 * token * own / GiB:.0f} GiB." in TEXT


# The script for several machines.

BLOCKS = re.findall(r"^# ```(\w*)\n(.*?)^# ```$", SOURCE, re.M | re.S)
(SCRIPT,) = (
    "\n".join(line.removeprefix("#").removeprefix(" ") for line in text.splitlines())
    for language, text in BLOCKS
    if language == "python"
)


def test_torchrun_knows_the_arguments_that_start_it():
    from torch.distributed.run import get_args_parser

    (command,) = (text for language, text in BLOCKS if not language)
    words = command.removeprefix("# ").split()
    assert words[0] == "torchrun"
    given = get_args_parser().parse_args(words[1:])
    machines, cards = re.search(r"MACHINES, CARDS = (\d+), (\d+)", SCRIPT).groups()
    assert (given.nnodes, given.nproc_per_node) == (machines, cards)
    assert given.rdzv_backend == "c10d" and given.training_script == "train.py"
    assert "torchrun --nproc-per-node=2 train.py" in TEXT
    ast.parse(SCRIPT)


def test_the_script_trains_on_two_machines_of_two_cards(tmp_path, monkeypatch):
    """Four processes of this computer in place of cards, and a tiny model."""
    (tmp_path / "my_rows.py").write_text(
        "import torch\n"
        "rows = list(torch.randint(0, 128, (8, 16), generator=torch.Generator().manual_seed(0)))\n"
    )
    tiny = "__import__('gradmem_lib.course', fromlist=['models']).models.tiny_llama(vocab=128)"
    script = re.sub(r"AutoModelForCausalLM\.from_pretrained\(.*?\)", tiny, SCRIPT)
    assert tiny in script
    for old, new in (
        ("MACHINES, CARDS = 2, 8", "MACHINES, CARDS = 2, 2"),
        ('"cuda"', '"cpu"'),
        ('"weights.pt"', repr(str(tmp_path / "weights.pt"))),
    ):
        assert old in script
        script = script.replace(old, new)
    path = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
    torchrun(path + script, processes=4)
    saved = torch.load(tmp_path / "weights.pt")
    fresh = models.tiny_llama(vocab=128).state_dict()
    assert {name: t.shape for name, t in saved.items()} == {n: t.shape for n, t in fresh.items()}
    assert not torch.equal(saved["lm_head.weight"], fresh["lm_head.weight"])
