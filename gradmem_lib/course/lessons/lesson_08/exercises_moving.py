"""Lesson 08's exercises under a byte budget: saved tensors that move to files, and an MLP
in tiles.
"""

from __future__ import annotations

import math
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from ...judge.compare import difference
from ...judge.exercise import Exercise, HiddenCase, Mistake, Seen, measure
from ..shared.settings import flat, gradients_of

DISK_CARD, DISK_LAYERS, DISK_WIDTH, DISK_ROWS = "1.6 MB", 6, 64, 256


class Disk:
    """Saved-tensor hooks: ``pack`` writes a tensor to a file of ``folder``, ``unpack`` reads it;
    ``weights`` stay where they are.
    """

    def __init__(self, folder, weights):
        self.folder, self.number = folder, 0
        self.stay = {w.untyped_storage().data_ptr() for w in weights}

    def pack(self, tensor):
        if tensor.untyped_storage().data_ptr() in self.stay:
            return tensor
        self.number += 1
        path = f"{self.folder}/{self.number}.pt"
        torch.save(tensor.detach().clone(), path)
        return path

    def unpack(self, packed):
        return packed if isinstance(packed, torch.Tensor) else torch.load(packed)


class _Keeps(Disk):
    def __init__(self, folder, weights):
        super().__init__(folder, weights)
        self.kept = []

    def pack(self, tensor):
        self.kept.append(tensor)
        return super().pack(tensor)


class _WholeStorage(Disk):
    def pack(self, tensor):
        if tensor.untyped_storage().data_ptr() in self.stay:
            return tensor
        self.number += 1
        path = f"{self.folder}/{self.number}.pt"
        torch.save(tensor.detach(), path)
        return path


class _WeightsToo(Disk):
    def __init__(self, folder, weights):
        super().__init__(folder, [])


class _OneName(Disk):
    def pack(self, tensor):
        self.number = 0
        return super().pack(tensor)


class _Caches(Disk):
    def unpack(self, packed):
        self.read = getattr(self, "read", {})
        if not isinstance(packed, torch.Tensor) and packed not in self.read:
            self.read[packed] = torch.load(packed)
        return self.read.get(packed, packed) if isinstance(packed, str) else packed


class _Rounds(Disk):
    def pack(self, tensor):
        return super().pack(
            tensor.half().to(tensor.dtype) if tensor.dtype == torch.float32 else tensor
        )


class Gated(nn.Module):
    """(rows, 64) to the same; two of the tensors that it saves are views of a wider one."""

    def __init__(self):
        super().__init__()
        self.three, self.out = (
            nn.Linear(DISK_WIDTH, 3 * DISK_WIDTH),
            nn.Linear(DISK_WIDTH, DISK_WIDTH),
        )

    def forward(self, x):
        a, b, c = self.three(x).chunk(3, -1)
        return x + self.out(torch.where(a > 0, a * b, b) * c.tanh())


def disk_setting() -> tuple[nn.Sequential, torch.Tensor]:
    """An embedding and six gated layers, and ids of 256 rows."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        layers = [nn.Embedding(9, DISK_WIDTH), *(Gated() for _ in range(DISK_LAYERS))]
        return nn.Sequential(*layers), torch.randint(0, 9, (DISK_ROWS,))


def _tensors():
    """Tensors of several kinds, each of which is gone when the next one is made."""
    for i in range(12):
        yield torch.full((3, 5), i + 1 / 3)
        yield torch.arange(24.0).view(4, 6)[:, i % 6 :: 3] + i
    yield from (
        torch.arange(4),
        torch.tensor([True, False]),
        torch.full((), 0.1),
    )


def _round_trip(candidate, folder: str) -> Seen:
    """How many tensors come back as they were, of those that are packed one after another; and how
    many nearly so.
    """
    disk, packed, before = candidate(folder, []), [], []
    for tensor in _tensors():
        before.append((tensor.dtype, tensor.shape, tensor.tolist()))
        packed.append(disk.pack(tensor))
        del tensor
    files = sum(path.is_file() for path in Path(folder).rglob("*"))
    after = [disk.unpack(each) for each in packed]
    tensors = all(isinstance(each, torch.Tensor) for each in after)
    same = near = last = 0
    back = []
    for t, (dtype, shape, numbers) in zip(after, before, strict=True) if tensors else ():
        back.append((t.dtype, t.shape, t.tolist()))
        last += back[-1] == before[-1]
        if back[-1] == (dtype, shape, numbers):
            same += 1
        elif t.shape == shape:
            near += torch.allclose(
                t.double(), torch.tensor(numbers, dtype=torch.float64), rtol=1e-2
            )
    found = {
        "of 27, come back as they were": same,
        "nearly so": int(near),
        "as the last one that was packed": last,
    }
    # All of them are there, but not where they belong.
    moved = sorted(map(str, back)) == sorted(map(str, before))
    return Seen(found, files=files, packed=len(packed), tensors=tensors, moved=moved)


def _stays(candidate, folder: str, *shape: int) -> bool:
    """Whether a tensor of ``shape`` stays in memory, beside a weight (6, 4) which it is not."""
    # The weight lives on: else the tensor might get its address, and be taken for it.
    weight, tensor = nn.Parameter(torch.ones(6, 4)), torch.zeros(shape)
    disk = candidate(folder, [weight])
    back = disk.unpack(disk.pack(tensor))
    return back.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()


def _kept_inside(candidate, folder: str) -> dict[str, int]:
    """1 if a weight stays in memory that does not begin where its storage begins."""
    weight = nn.Parameter(torch.ones(48)[24:].view(6, 4))
    disk = candidate(folder, [weight])
    back = disk.unpack(disk.pack(weight))
    return {"stays (1 is yes)": int(back.data_ptr() == weight.data_ptr())}


def _writes_too_much(candidate, folder: str) -> dict[str, int]:
    """1 if each of two files of a few rows, which are contiguous, has all rows of their storage.

    Who writes a storage once, and lets both views read this file, is right.
    """
    disk, whole = candidate(folder, []), torch.zeros(4000, 16)
    disk.pack(whole[:4])
    disk.pack(whole[4:8])
    written = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
    return {"writes its whole storage (1 is yes)": int(written > 1.5 * whole.nbytes)}


_FIRST_ROWS = HiddenCase("the first rows of a larger tensor")


def _observe_disk(candidate):
    new = tempfile.TemporaryDirectory
    with new() as small, new() as other, new() as another, new() as rows, new() as folder:
        trip = _round_trip(candidate, small)
        notes = trip.notes
        found = {"tensors packed, then unpacked": dict(trip)}
        if trip["of 27, come back as they were"] < notes["packed"]:
            return Seen(found, **notes)
        # Who writes files may keep the tensors all the same.
        notes = notes | {"keeps_all": _stays(candidate, other, 7, 3)}
        found["an activation of a weight's shape"] = {
            "stays (1 is yes)": int(_stays(candidate, another, 6, 4))
        }
        found["a weight that begins inside a larger storage"] = _kept_inside(candidate, another)
        found[_FIRST_ROWS] = _writes_too_much(candidate, rows)
        model, ids = disk_setting()
        disk = candidate(folder, list(model.parameters()))
        sizes: list[int] = []

        def run():
            with saved_tensors_hooks(disk.pack, disk.unpack):
                loss = model(ids).square().mean()
            sizes.extend(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
            loss.backward()
            return loss.detach()

        step = measure(run, budget=DISK_CARD, model=model)
    written = sum(sizes)
    found["a step"] = {"loss": step.value, "gradients": gradients_of(model)}
    found["the folder after forward"] = {
        "holds files (1 is yes)": int(bool(sizes)),
        "holds more than was saved, in hundreds of kB": max(0, (written - WRITTEN) // 100_000),
    }
    return Seen(found | {"the card": type(step)(None, step.peak, step.budget)}, **notes)


# bytes: all that is saved, with room for what torch.save adds to each file, and without the weights
WRITTEN = 3_200_000


def _why_written(got, expected) -> str | None:
    """What is said of files that are larger than what was saved, or too many."""
    if any(got[_FIRST_ROWS].values()):
        return (
            "torch.save writes the whole storage of a view. contiguous() makes no copy of a view "
            "that is contiguous already, such as the first rows of a tensor: clone() does."
        )
    folder = "the folder after forward"
    if difference(got[folder], expected[folder]):
        return (
            "more is written than was saved beside the weights: autograd saves views of weights "
            "too (weight.t()), which are other objects and no nn.Parameter; recognise them by "
            "tensor.untyped_storage().data_ptr()."
        )
    return None


def _why_other_tensors(notes) -> str:
    """What is said of tensors that do not come back as they were."""
    if 0 < notes["files"] < notes["packed"]:
        return (
            "files are overwritten: two tensors got the same name (id(tensor) and "
            "data_ptr() are used again after a tensor is freed); number the files."
        )
    if notes["moved"]:
        return (
            "the tensors come back in another order: unpack must read the file that pack has "
            "named, in whatever order it is asked."
        )
    return "unpack does not return what pack was given: numbers, dtype and shape must be the same."


def _explain_disk(got, expected):
    notes = got.notes
    if not notes["tensors"]:
        return "unpack does not return a tensor: it must read the file that pack has named."
    if "a step" not in got:
        return _why_other_tensors(notes)
    if not notes["files"]:
        return "nothing is moved: no file appears in the folder."
    if notes["keeps_all"]:
        return (
            "unpack returns the very tensor that pack was given, so it is kept in memory beside "
            "its file: let pack return only what names the file, and let unpack read the file."
        )
    if any(got["an activation of a weight's shape"].values()):
        return (
            "an activation that has a weight's shape stays in memory: recognise weights by "
            "their storage, tensor.untyped_storage().data_ptr()."
        )
    if not any(got["a weight that begins inside a larger storage"].values()):
        return (
            "a weight is written too, but weights stay in memory anyway: recognise each by its "
            "storage, tensor.untyped_storage().data_ptr(), and let pack return it as it is."
        )
    return _why_written(got, expected)


TILED_CARD, TILED_WIDTH, TILED_TOKENS, TILES = "0.8 MB", 32, 250, 5


def tiled_mlp(mlp, x, tiles):
    """``mlp(x)`` for x (rows, tokens, width), computed in ``tiles`` slices of the tokens, each in a
    checkpoint of its own.
    """
    parts = [checkpoint(mlp, part, use_reentrant=False) for part in x.tensor_split(tiles, dim=1)]
    return torch.cat(parts, dim=1)


def _tiled(*, dim=1, run=lambda mlp, part: checkpoint(mlp, part, use_reentrant=False), cut=None):
    def wrong(mlp, x, tiles):
        parts = cut(x, tiles) if cut else x.tensor_split(tiles, dim=dim)
        return torch.cat([run(mlp, part) for part in parts], dim=dim)

    return wrong


def _whole(mlp, x, tiles):
    return checkpoint(mlp, x, use_reentrant=False)


def _in_one_checkpoint(mlp, x, tiles):
    return checkpoint(
        lambda x: _tiled(run=lambda mlp, part: mlp(part))(mlp, x, tiles), x, use_reentrant=False
    )


def tiled_setting(rows=2, tokens=TILED_TOKENS, *, needs=True) -> tuple[nn.Module, torch.Tensor]:
    """An MLP that is eight times as wide inside, and x (rows, tokens, 32)."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(6)
        mlp = nn.Sequential(
            nn.Linear(TILED_WIDTH, 8 * TILED_WIDTH),
            nn.GELU(),
            nn.Linear(8 * TILED_WIDTH, TILED_WIDTH),
        )
        return mlp, torch.randn(rows, tokens, TILED_WIDTH).requires_grad_(needs)


def _lengths(mlp, rows: int, tokens: int) -> list[int]:
    """A list that grows by the number of tokens each time ``mlp`` runs on a part of (rows, tokens,
    width).
    """
    lengths: list[int] = []

    def forward(x, original=mlp.forward):
        if not x.numel():
            lengths.append(0)
        elif x.ndim == 3 and (len(x) == rows or x.shape[1] == tokens):
            lengths.append(x.shape[1])
        else:  # the rows and tokens are one dimension: as many tokens as a tile of all rows has
            lengths.append(math.ceil(x.numel() / x.shape[-1] / rows))
        return original(x)

    mlp.forward = forward
    return lengths


def _tile_case(candidate, tiles: int, *setting, needs: bool = True):
    mlp, x = tiled_setting(*setting, needs=needs)
    lengths = _lengths(mlp, len(x), x.shape[1])
    out = candidate(mlp, x, tiles)
    first, needed = len(lengths), math.ceil(x.shape[1] / tiles)
    if out.requires_grad:
        out.square().sum().backward()
    return {
        "output": out.detach(),
        "gradients of the weights": gradients_of(mlp),
        "gradient of x": flat([torch.zeros_like(x) if x.grad is None else x.grad]),
        "tokens of the longest tile beyond the needed": max(0, *lengths, needed) - needed,
        "tiles beyond those asked for": max(0, first - tiles),
        "runs again beyond one a tile": max(0, len(lengths) - 2 * first),
    }, len(lengths) - first


def _masks_differ(candidate) -> int:
    """How many numbers have another mask of a dropout in backward than in forward."""
    x = torch.ones(2, 48, 4, requires_grad=True)
    out = candidate(nn.Dropout(), x, 4)
    if out.requires_grad:
        out.sum().backward()
    return 0 if x.grad is None else int(((out != 0) != (x.grad != 0)).sum())


_OTHER_TILES = HiddenCase("50 tokens in 7 tiles")


def _observe_tiled(candidate):
    found, again = _tile_case(candidate, 4, 2, 22)
    cases = {
        "22 tokens in 4 tiles": found,
        "an x that needs no gradient": _tile_case(candidate, 3, 1, 9, needs=False)[0],
        _OTHER_TILES: _tile_case(candidate, 7, 3, 50)[0],
        "dropout": {"numbers with another mask in backward": _masks_differ(candidate)},
    }
    mlp, x = tiled_setting()
    step = measure(
        lambda: candidate(mlp, x, TILES).square().sum().backward(), budget=TILED_CARD, model=mlp
    )
    return Seen(
        cases
        | {
            f"the card, {TILED_TOKENS} tokens in {TILES} tiles": type(step)(
                None, step.peak, step.budget
            )
        },
        again=again,
    )


def _explain_tiled(got, expected):
    mine, right = got["22 tokens in 4 tiles"], expected["22 tokens in 4 tiles"]
    says = _why_output(mine["output"], right["output"])
    if says:
        return says
    if not mine["gradients of the weights"].any():
        return "the weights get no gradient: the output is detached, or made under no_grad."
    if not mine["gradient of x"].any():
        return "x gets no gradient: it is detached before or in the tiles."
    other = "an x that needs no gradient"
    if not got[other]["gradients of the weights"].any():
        return (
            "this is a reentrant checkpoint, which needs an input that requires a gradient: "
            "use_reentrant=False."
        )
    return _why_runs(got) or _why_long(mine, got) or _why_long_elsewhere(got)


def _why_long_elsewhere(got) -> str | None:
    """What is said of tiles that are right for 22 tokens in 4, and too long for others."""
    name = "tokens of the longest tile beyond the needed"
    beyond = got["an x that needs no gradient"][name]  # 9 tokens in 3 tiles
    if beyond:
        return (
            f"of 9 tokens in 3 tiles, the longest tile has {3 + beyond}, and 3 are enough: "
            "x.tensor_split(tiles, dim=1) makes them even."
        )
    if got[_OTHER_TILES][name]:
        return (
            "for other numbers of tokens and tiles, the longest tile is longer than it has to be: "
            "x.tensor_split(tiles, dim=1) makes them even."
        )
    return None


def _why_long(mine, got) -> str | None:
    """What is said of a longest tile that could be shorter, of 22 tokens in 4 tiles."""
    beyond = mine["tokens of the longest tile beyond the needed"]
    if not beyond:
        return None
    needed = math.ceil(22 / 4)
    whole = needed + beyond == 22
    if whole and not got.notes["again"]:
        return (
            "the MLP gets the whole sequence, and nothing runs again: this is mlp(x) itself. Cut "
            "the tokens into `tiles` tiles, and run each in a checkpoint of its own."
        )
    if whole:
        return "the MLP gets the whole sequence at once: cut it into tiles first."
    return (
        f"the longest tile has {needed + beyond} tokens, and {needed} are enough: there are fewer "
        "than `tiles` tiles, or their lengths differ by more than 1. x.tensor_split(tiles, dim=1) "
        "makes them even."
    )


def _why_output(mine, right) -> str | None:
    if mine.ndim != right.ndim:
        return (
            f"the output has {mine.ndim} dimensions, and mlp(x) has "
            f"{right.ndim}: join the tiles along the tokens, as torch.cat does."
        )
    if mine.shape[1] < 22:
        return (
            "tokens are left out: where `tiles` does not divide the number of tokens, some "
            "tiles have one more."
        )
    if difference(mine, right):
        return "the output is not mlp(x): join the tiles in their order, along the tokens."
    return None


def _why_runs(got) -> str | None:
    """How often the MLP runs, and with which random numbers."""
    mine, dropout = got["22 tokens in 4 tiles"], got["dropout"]
    cases = (mine, got["an x that needs no gradient"], got[_OTHER_TILES])
    if any(case["tiles beyond those asked for"] for case in cases):
        return (
            "the MLP runs more often than asked for: x.split(n) takes the length of a tile, and "
            "x.tensor_split(n) their number."
        )
    if mine["runs again beyond one a tile"]:
        return "each tile runs again more than once: there is a checkpoint around the checkpoints."
    if any(dropout.values()):
        return (
            "dropout draws other random numbers in the second run: leave preserve_rng_state at "
            "its default, True."
        )
    return None


EXERCISES = (
    Exercise(
        id="8.3",
        title="saved tensors that move",
        difficulty=2,
        minutes=5,
        trains="hooks that see each tensor that autograd saves",
        reference=Disk,
        observe=_observe_disk,
        explain=_explain_disk,
        tolerance=0.0,
        raises=(
            (
                r"'NoneType' object has no attribute 'seek'|PathLike object, not NoneType",
                (
                    "unpack reads a file whose name is None: let pack return the name of the file "
                    "that it has written (is a `return` missing?)."
                ),
            ),
            (
                r"no attribute 'seek'|PathLike object, not (Parameter|Tensor)",
                (
                    "unpack gets what pack returned, and for a weight this is the tensor itself: "
                    "return a tensor as it is, and read a file for the others."
                ),
            ),
        ),
        mistakes=(
            Mistake(
                "keeps",
                _Keeps,
                (
                    "a list or a dict keeps each tensor alive beside its file, so nothing is "
                    "freed: keep only the file's name."
                ),
            ),
            Mistake(
                "whole storage",
                _WholeStorage,
                (
                    "torch.save writes the whole storage of a view, and unpack reads all of it: "
                    "clone the tensor first."
                ),
            ),
            Mistake(
                "weights too",
                _WeightsToo,
                (
                    "the weights are written too: they stay in memory anyway, and unpack makes "
                    "copies of them; let pack return a weight as it is."
                ),
            ),
            Mistake(
                "one name",
                _OneName,
                (
                    "every tensor comes back as the one that was written last: each needs a file "
                    "of its own, and unpack reads the file that pack has named; number the files."
                ),
            ),
            Mistake(
                "caches",
                _Caches,
                (
                    "every tensor that unpack has read is kept, so backward needs more and more "
                    "memory: return it, and keep nothing."
                ),
            ),
            Mistake(
                "rounds",
                _Rounds,
                "the numbers are rounded to half precision: write the tensor as it is.",
            ),
        ),
    ),
    Exercise(
        id="8.6",
        title="an MLP in tiles",
        difficulty=2,
        minutes=3,
        trains="cutting a long sequence where tokens do not meet",
        reference=tiled_mlp,
        observe=_observe_tiled,
        explain=_explain_tiled,
        raises=(
            (
                r"'(list|tuple)' object has no attribute",
                "this returns the tiles as a list: join them, along the tokens.",
            ),
            (
                r"Sizes of tensors must match|stack expects",
                (
                    "the tiles are not joined along the dimension in which they were cut: "
                    "torch.cat(parts, dim=1)."
                ),
            ),
            (
                r"shapes cannot be multiplied",
                "the width is cut, so the MLP gets only a part of it: tokens are dimension 1.",
            ),
        ),
        mistakes=(
            Mistake(
                "no checkpoint",
                _tiled(run=lambda mlp, part: mlp(part)),
                (
                    "the tiles are cut, but autograd keeps what each of them computes: run each "
                    "in a checkpoint."
                ),
            ),
            Mistake(
                "whole",
                _whole,
                (
                    "the whole sequence runs at once, also when it runs again in backward: cut it "
                    "into tiles first."
                ),
            ),
            Mistake(
                "one checkpoint",
                _in_one_checkpoint,
                (
                    "one checkpoint holds all tiles, and in backward all of them run again at "
                    "once: each tile needs its own."
                ),
            ),
            Mistake(
                "rows",
                _tiled(dim=0),
                "the rows are cut, but the sequence keeps its length: tokens are dimension 1.",
            ),
            Mistake(
                "drops the rest",
                _tiled(cut=lambda x, tiles: x[:, : x.shape[1] // tiles * tiles].chunk(tiles, 1)),
                (
                    "tokens are left out: where `tiles` does not divide the number of tokens, some "
                    "tiles have one more."
                ),
            ),
            Mistake(
                "detached",
                _tiled(run=lambda mlp, part: checkpoint(mlp, part, use_reentrant=False).detach()),
                "the output is detached, or made under no_grad: no weight learns.",
            ),
        ),
    ),
)
