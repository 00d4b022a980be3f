"""Every way to train one model in several processes, against one process on the same rows."""

import warnings
from dataclasses import replace
from importlib.util import find_spec
from itertools import product

import pytest
import torch
import torch.distributed as dist
from support.nightly import ALL, each
from support.refusals import refusal
from support.sharded import distances, far, model_of, resumed, saved, whole
from support.trainers import small, trainer_for
from torch import nn
from torch.distributed.tensor import DTensor

from gradmem_lib import GradScaler, Recipe, prepare, step
from gradmem_lib.compat.fake_ranks import fake_process_group
from gradmem_lib.course import run_ranks
from gradmem_lib.names import SHARDING
from gradmem_lib.techniques import sharding
from gradmem_lib.techniques.sharding import shard

CLOSE = 1e-12
FAMILIES = ("llama", "gpt2", "qwen2", "mixtral", "t5", "bert", "whisper", "vit")
QLORA = {"lora_rank": 2, "quantized_base": True}


def cases(ways: list[dict], families=("llama",), hows=tuple(SHARDING)) -> dict[str, tuple]:
    """By a name: the family, and the recipe's fields with what ``distances`` takes out of them."""
    found = {}
    for family, how, way in product(families, hows, ways):
        fields = {"sharding": how} | way
        found[f"{family}, {fields}"] = family, fields
    return found


PIECES = {"accumulation": 2}
EVERYWHERE = [
    {"lora_rank": 2},
    {"checkpointing": "per-layer"},
    QLORA | {"checkpointing": "per-layer"},
]
OF_FSDP = [
    {"checkpointing": (1, 1)},
    {"checkpointing": "attention", "accumulation": 2},
    {"every_n_layers": 2},
    {"in_backward": True},
    {"offload": "boundaries", "checkpointing": "sqrt"},
    {"offload": "parameters", "clip": 1e-3},
    {"optimizer": "sgd", "momentum": 0.9},
    {"optimizer": "adamw-fused"},
]
WHOLE = [{"optimizer": "adafactor"}, {"optimizer": "adafactor-torch"}, {"optimizer": "adamw-8bit"}]
TWO = cases([PIECES | {"clip": 1e-3}]) | cases([PIECES], ("t5", "mixtral"), ("ddp", "fsdp"))
TWO |= dict(each(2, cases(EVERYWHERE).items(), 1))
TWO |= cases(OF_FSDP, hows=("fsdp",)) | cases(WHOLE, hows=("zero1",))
TWO |= cases([PIECES], ("albert",), ("fsdp",))
if find_spec("peft"):
    TWO |= cases([PIECES | {"peft": True}], hows=("fsdp",))
FOUR = cases([PIECES], ("qwen2",), ("ddp", "zero2"))
FOUR |= cases([{"clip": 1e-3, **PIECES, **QLORA}], hows=("fsdp",))
if ALL:
    TWO |= cases([{}, PIECES], FAMILIES)
    FOUR |= TWO
SAVED = [{"sharding": "fsdp"}, {"sharding": "fsdp"} | QLORA]


def in_two(folder: str) -> dict:
    """What two ranks find: a start of processes takes seconds."""
    return {
        "distances": distances(TWO),
        "overflowed": overflowed(),
        "rounded": rounded_by_chance(),
        "unused": [unused(yourself) for yourself in (True, False)],
        "said": said_by_shard(),
        "saved": [saved(f"{folder}/{len(fields)}", fields) for fields in SAVED],
    }


def in_four(folder: str) -> tuple[dict, list]:
    gone_on = [resumed(f"{folder}/{len(fields)}", fields, 1, True, False) for fields in SAVED]
    return distances(FOUR), gone_on


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def on_two(folder):
    return run_ranks(in_two, folder, seconds=600)


@pytest.fixture(scope="module")
def on_four(on_two, folder):  # which goes on with what two ranks have saved
    return run_ranks(in_four, folder, ranks=4)[0]


@pytest.mark.parametrize("name", TWO)
def test_on_two_ranks_gradients_and_weights_are_one_processs(on_two, name):
    found = on_two[0]["distances"][name]
    assert isinstance(found, float) and found <= CLOSE, found


@pytest.mark.parametrize("name", FOUR)
def test_on_four_ranks_gradients_and_weights_are_one_processs(on_four, name):
    found = on_four[0][name]
    assert isinstance(found, float) and found <= CLOSE, found


def test_without_a_process_group_the_sentence_says_torchrun():
    with pytest.raises(ValueError, match="torchrun --nproc-per-node=2"):
        shard(nn.Sequential(nn.Linear(2, 2)), "fsdp")


def test_make_trainer_refuses_fsdp_which_it_would_not_get(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ValueError, match="accelerate was told to use FSDP"):
        trainer_for(small(), Recipe(), tmp_path)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("place", [0, 1], ids=["sharded", "4-bit base"])
def test_what_two_ranks_save_four_ranks_or_one_process_go_on_with(on_two, on_four, folder, place):
    """torch.distributed.checkpoint: weights and states."""
    fields, never_stopped = SAVED[place], on_two[0]["saved"][place]
    assert far(on_four[1][place], never_stopped) <= CLOSE
    alone = {name: value for name, value in fields.items() if name != "sharding"}
    here = resumed(f"{folder}/{len(fields)}", alone, 1, True, False)
    assert far(here, never_stopped) <= CLOSE


def overflowed():
    """Four steps in float16, in the third of which one rank's loss is not finite: the factor after
    each, and the weights.
    """
    recipe = Recipe(precision="autocast-fp16")
    model, optimizer, _ = prepare(
        model_of("llama", torch.float32), replace(recipe, sharding="fsdp")
    )
    ids, scaler, factors = torch.arange(3, 19).view(2, 8), GradScaler(init_scale=2.0**10), []
    batch = {"input_ids": ids, "labels": ids}
    for number in range(4):
        bad = float("inf") if number == 2 and dist.get_rank() == 1 else 1.0
        given = {"loss": lambda m, b, bad=bad: m(**b).loss * bad, "scaler": scaler}
        step(model, optimizer, batch, recipe, **given)
        factors.append(scaler.get_scale())
    return factors, torch.cat([whole(p.detach()).flatten() for p in model.parameters()])


def rounded_by_chance():
    recipe = Recipe(precision="bf16", optimizer="adamw-stochastic", sharding="zero1")
    model, optimizer, _ = prepare(model_of("llama", torch.float32), recipe, lr=1e-2)
    ids = torch.arange(3, 19).view(2, 8) + dist.get_rank()
    torch.manual_seed(dist.get_rank())
    step(model, optimizer, {"input_ids": ids, "labels": ids}, recipe)
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def unused(yourself: bool):
    """Two steps of a model with a layer that no forward reaches."""
    model = nn.ModuleDict({"used": nn.Linear(3, 3), "spare": nn.Linear(3, 3)})
    model.forward = lambda x: model["used"](x).sum()
    if yourself:
        parallel = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    else:
        parallel, optimizer, _ = prepare(model, Recipe(sharding="ddp"))
    rows = torch.full((2, 3), 1.0 + dist.get_rank())
    for _ in range(2):
        if said := refusal(step, parallel, optimizer, rows, Recipe()):
            return said
    return model["used"].weight.detach()


def test_all_ranks_skip_a_step_that_overflowed_on_one_and_stay_the_same(on_two):
    """Also where weights are rounded by chance, and where a layer is reached by no forward: this is
    refused before the step, or found by DDP.
    """
    one, other = on_two
    (factors, weights), (factors_there, weights_there) = one["overflowed"], other["overflowed"]
    assert factors == factors_there == [2.0**10, 2.0**10, 2.0**9, 2.0**9]
    assert torch.equal(weights, weights_there) and weights.isfinite().all()
    assert torch.equal(one["rounded"], other["rounded"])
    weight, said = one["unused"]
    assert torch.equal(weight, other["unused"][0])
    assert "spare.weight, spare.bias" in said and "find_unused_parameters=True" in said


def said_by_shard() -> list[str]:
    """What models are told that cannot be sharded, or have another gradient then."""
    plain = nn.ModuleDict({"a": nn.Linear(2, 2)})
    twice = nn.Linear(2, 2)
    parts = nn.Sequential(nn.ModuleDict({"a": nn.Linear(2, 2)}))  # nobody calls a dict
    models = (plain, nn.Sequential(twice, twice), parts)
    said = [refusal(shard, model, "fsdp") for model in models]
    pairs = {"input_ids": torch.zeros(2, 4, dtype=torch.long), "return_loss": True}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        normed, optimizer, _ = prepare(
            nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), Recipe(sharding="fsdp")
        )
        recipe = Recipe(sharding="fsdp")
        step(normed, optimizer, torch.randn(3, 2), recipe, loss=lambda m, b: m(b).square().mean())
    said += [str(w.message) for w in caught if "normalizes" in str(w.message)]
    return [*said, refusal(step, normed, optimizer, pairs, recipe)]


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_a_model_is_prepared_once(how):
    with fake_process_group(2, 0) as mesh:
        prepared = prepare(nn.Sequential(nn.Linear(2, 2)), Recipe(sharding=how), mesh=mesh)
        with pytest.raises(ValueError, match="is trained by several processes together already"):
            prepare(prepared.model, Recipe(sharding="ddp"), mesh=mesh)


def test_what_cannot_be_sharded_is_told_so(on_two):
    none, twice, parts, normed, pairs = on_two[0]["said"]
    assert "there are no layers in this ModuleDict" in none
    assert "the same layer is in the list more than once" in twice
    assert "the layers of this list have no forward of their own" in parts
    assert "1 is a FSDPBatchNorm1d, which normalizes each micro-batch of each rank" in normed
    assert "return_loss=True" in pairs


class Block(nn.Linear):
    """A layer with a frozen weight in another dtype, and what it computed with."""

    def __init__(self):
        super().__init__(2, 2, bias=False)
        other = torch.ones(2, 2, dtype=torch.bfloat16)
        self.other = nn.Parameter(other, requires_grad=False)

    def forward(self, x):
        self.seen = self.weight.dtype, type(self.weight)
        return super().forward(x.to(self.weight.dtype))


@pytest.mark.parametrize(("how", "dtype"), [("zero2", torch.bfloat16), ("fsdp", None)])
def test_what_is_gathered_when_and_in_which_dtype(how, dtype):
    with fake_process_group(2, 1) as mesh:
        layers, head = nn.Sequential(Block(), Block()), nn.Linear(2, 2)
        model, given = nn.Sequential(layers, head), {"compute_dtype": dtype, "layers": ("0",)}
        assert shard(model, how, mesh=mesh if dtype else None, **given) is model
        assert all(isinstance(p, DTensor) and p.device_mesh.size() == 2 for p in model.parameters())
        out = model(torch.ones(1, 2))
        for layer in layers:
            assert layer.seen[0] == (dtype or torch.float32)
            assert not issubclass(layer.seen[1], DTensor)
        kept = {isinstance(p, DTensor) for p in layers[0].parameters()}
        assert kept == {how == "fsdp"}
        # the rest stays gathered until its backward
        assert not any(isinstance(p, DTensor) for p in head.parameters())
        out.float().sum().backward()
        grads = [p.grad for p in model.parameters() if p.requires_grad]
        assert all(isinstance(g, DTensor) and g.dtype == torch.float32 for g in grads)


@pytest.mark.parametrize("how", ["ddp", "zero1"])
def test_a_replica_is_moved_to_where_the_mesh_is(how, monkeypatch):
    moved = []
    with fake_process_group(2, 0) as mesh:
        for here in ("cpu", "cuda"):
            model = nn.Linear(2, 2)
            monkeypatch.setattr(sharding, "device_of", lambda model, here=here: torch.device(here))
            model.to = moved.append
            parallel = shard(model, how, mesh=mesh)
            assert (
                type(parallel) is nn.parallel.DistributedDataParallel and parallel.module is model
            )
            assert parallel.process_group is mesh.get_group()
    assert moved == ["cpu"]
