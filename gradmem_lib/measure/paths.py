"""Who holds a storage: the shortest way to it from a name of the user's own script.

One walk over Python's objects, from the names of the user's files, then from the variables of the
libraries' functions that are running, and then, if much is still missing, from everything else. A
tensor that only a graph keeps has the path of the tensor whose graph it is. Nothing is inferred
from sizes or ages. The walk runs no property and no ``__getattr__`` of the user's objects, unpacks
nothing, and keeps nothing alive.
"""

from __future__ import annotations

import functools
import gc
import inspect
import re
import sys
import threading
import traceback
import types
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from ..compat.autograd import NO_NUMBER, kept_by_node, sequence_nr
from ..compat.modules import HOOKS, PARTS, TABLES
from ..compat.tensors import plain_tensors, storage_key, without_dispatch
from .source_lines import is_of_a_script
from .storages import storages_of, tensors_in

MOST_OBJECTS = 300_000  # of one search
# Of graphs of numbers. A node that Python has met is freed by a call inside the call that frees the
# node after it: a graph of 100,000 of them overflows the stack.
MOST_NODES = 20_000
ALMOST_ALL = 0.95  # of the bytes: the search ends when these are found
# Longer collections of these are not looked through.
MANY = 5_000
ATOMS = frozenset(
    (
        *(type(None), str, bytes, bytearray, int, float, bool, complex, range, slice),
        *(torch.dtype, torch.device, torch.Size, torch.Generator, types.ModuleType),
        *(types.BuiltinFunctionType, types.CodeType, types.MethodDescriptorType),
        *(types.WrapperDescriptorType, types.GetSetDescriptorType, types.MemberDescriptorType),
    )
)
# What a walk would find behind these is the measurement's own, or every operation of torch.
LIBRARY = __name__.partition(".")[0]
NOT_INTO = (
    *(f"{LIBRARY}.{floor}." for floor in ("measure", "run", "view", "compat")),
    *("importlib", "torch._ops", "torch._library"),
)
ATTRIBUTE, MODULE_ATTRIBUTE = "attribute", "attribute of a module"
EXCEPTION = "exception"
ITERATOR = "iterator"
BOXES = ("list", "dict", "cache", "window", ITERATOR)
# These say more of why a tensor is there than the list or dict that it is in.
TELLING = (EXCEPTION, "cache", ITERATOR, "optimizer", "gradient")
A_NUMBER = re.compile(r"\[\d+\]|\['[^']*\d'\]")


class Held(NamedTuple):
    """How a storage is held.

    ``path``: from a name, as in ``"study.trials[…].model"``, with "…" for numbers; empty if there
    is none. ``where``: the function that has this name, or nothing for a global one. ``kind``: of
    the owner: "list", "dict", "cache", "exception", "cycle", "C++" and so on. ``box``: the path of
    the list, dict or cache on the way that has numbered entries. ``graph``: only the graph of the
    tensor at ``path`` keeps it. ``in_script``: the name is one of the user's own. ``hook``: of an
    attribute of a module, the script's hook on that module, as a code object. ``part``: the tensor
    there is no more than a slice of the storage, one of this many equal ones (a power of 2).
    """

    path: str
    where: str = ""
    kind: str = ""
    box: str = ""
    graph: bool = False
    in_script: bool = True
    hook: types.CodeType | None = None
    part: int = 1

    @property
    def is_attribute(self) -> bool:
        return self.kind in (ATTRIBUTE, MODULE_ATTRIBUTE)

    def __str__(self) -> str:
        if self.kind == "cycle":
            return "nothing but a reference cycle"
        if not self.path:
            return "no name that was found"
        place = f"{self.path} in {self.where}()" if self.where else self.path
        return f"the graph of {place}" if self.graph else place


NOBODY = Held("")  # no name was found, though all that may have been were looked at
IN_A_CYCLE = Held("", kind="cycle")


class Edge(NamedTuple):
    """``words`` lead from an object to ``value``; ``kind`` is that of the owner, or nothing.

    A name is an edge from nothing; ``where``: the function that has it.
    """

    words: str
    value: Any
    kind: str = ""
    where: str = ""


def who_holds(
    wanted: Mapping[int, int],
    frame: types.FrameType | None = None,
    error: BaseException | None = None,
    everywhere: bool = False,
) -> dict[int, Held]:
    """How each storage is held, by its key, as far as it was found.

    ``wanted``: the bytes of the storages to look for, by key. ``frame``: the innermost frame that
    runs; ``error``: one that has ended the run, whose frames count as running. ``everywhere``: look
    also behind the names of all libraries, which takes seconds, and say what has no name at all.
    """
    with _at_rest():
        walk = _Walk(wanted)
        frames = _frames(frame, error)
        walk.running = {id(each) for each in frames}
        own, of_libraries = _names_of_frames(frames)
        handled = Edge("the error that is handled", sys.exc_info()[1], EXCEPTION)
        walk.search([*_names_of_modules(own=True), *own, handled])
        iterators: list[Edge] = []
        if not walk.has_enough():
            generators, iterators = _names_of_loops()
            walk.search(generators)
        walk.in_script = False
        callbacks = Edge("weakref.finalize", dict(vars(weakref.finalize)))
        walk.search([*of_libraries, callbacks])
        walk.search(iterators)
        held_by_the_rest = NOBODY
        if everywhere and not walk.has_enough():
            walk.search_in_circles()
            walk.search(_names_of_modules(own=False))
            held_by_the_rest = Held("", kind="C++", in_script=False)
        if walk.is_complete and not walk.has_enough():
            for key in wanted:
                walk.claim(key, held_by_the_rest)
        return walk.found


def longest_graph(
    frame: types.FrameType | None, error: BaseException | None, begins: Sequence[int]
) -> tuple[str, int]:
    """The name of the number whose graph has nodes of the most steps, and of how many.

    ``begins``: the number that the next node had when each step began. Such a graph may keep no
    tensors, and still grows.
    """
    longest = "", 0
    with _at_rest():
        walk = _Walk({0: 1})  # no storage has this key, so the walk does not end early
        own, _ = _names_of_frames(_frames(frame, error))
        walk.look_around([*_names_of_modules(own=True), *own])
        left = MOST_NODES
        for tensor in walk.with_graph:
            if tensor.numel() != 1:
                continue
            steps = set[int]()
            for node in islice(_nodes_of(tensor.grad_fn, set()), left):
                left -= 1
                number = sequence_nr(node)
                if number < NO_NUMBER:
                    steps.add(bisect_right(begins, number))
            steps.discard(0)  # made before the first step
            if len(steps) > longest[1]:
                longest = str(walk.way_to(tensor)), len(steps)
    return longest


def _nodes_of(node: Any, seen: set[Any]) -> Iterator[Any]:
    """The nodes of a graph from this one on that are not among ``seen``, and are then."""
    waiting = [node]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        waiting += [following for following, _ in node.next_functions]


@contextmanager
def _at_rest() -> Iterator[None]:
    """While a walk runs, the garbage collector is off and no mode sees its operations. Afterwards
    nothing of the user's is kept.
    """
    collects = gc.isenabled()
    gc.disable()  # the walk's own objects would start a collection, which frees a script's cycles
    try:
        # To ask a sparse tensor for its parts is an operation, which no tracker may count.
        with plain_tensors(), without_dispatch():
            yield
    finally:
        if collects:
            gc.enable()
        edges_of.cache_clear()  # it would keep the user's classes alive


class _Walk:
    def __init__(self, wanted: Mapping[int, int]):
        self.wanted = wanted
        self.found: dict[int, Held] = {}
        self.missing = sum(wanted.values())
        self.enough = (1 - ALMOST_ALL) * self.missing
        # By an object's address: the edge that has led to it, and the address that this came from.
        # An edge keeps its object until the walk ends, so that no address is used twice.
        self.came_from: dict[int, tuple[Edge, int | None]] = {}
        self.waiting = deque[Any]()
        self.private = deque[tuple[Edge, int | None]]()
        self.of_errors = deque[tuple[Edge, int | None]]()
        self.with_graph: list[torch.Tensor] = []
        self.in_script = True
        self.is_complete = True
        self.running = set[int]()

    def has_enough(self) -> bool:
        return self.missing <= self.enough

    def search(self, names: Collection[Edge]) -> None:
        if not self.has_enough():
            self.look_around(names)
            self._follow_graphs()

    def look_around(self, names: Collection[Edge]) -> None:
        """Breadth first, so that each object is found by its shortest path."""
        for queue in (self.waiting, self.private, self.of_errors):
            queue.clear()
        parts = set[int]()
        for name in names:
            if issubclass(type(name.value), nn.Module):
                _add_parts(name.value, parts)
        for name in names:
            # A loop over a model's layers leaves one of them in a variable.
            if id(name.value) not in parts:
                self._reach_in_turn(name, None)
        seen = 0
        while (self.waiting or self.private or self.of_errors) and not self.has_enough():
            if not self.waiting:
                self._reach(*(self.private or self.of_errors).popleft())
                continue
            self._look_at(self.waiting.popleft())
            seen += 1
            if seen > MOST_OBJECTS:
                self.is_complete = False
                break

    def _look_at(self, thing: Any) -> None:
        kind: Any = type(thing)
        if id(thing) in self.running:
            return  # its variables are names themselves
        try:
            if issubclass(kind, torch.Tensor):
                self._found(thing)
            for edge in edges_of(kind)(thing):
                self._reach_in_turn(edge, id(thing))
        except Exception:  # an object that cannot be asked leads nowhere
            self.is_complete = False

    def _reach_in_turn(self, edge: Edge, parent: int | None) -> None:
        """What private names lead to comes after all that public names lead to, and what errors
        lead to comes last: an error's functions had variables for what has better names.
        """
        if type(edge.value) in ATOMS or id(edge.value) in self.came_from:
            return
        if edge.kind == EXCEPTION:
            self.of_errors.append((edge, parent))
        elif edge.words.startswith(("_", "._")):
            self.private.append((edge, parent))
        else:
            self._reach(edge, parent)

    def _reach(self, edge: Edge, parent: int | None) -> None:
        if id(edge.value) not in self.came_from:
            self.came_from[id(edge.value)] = edge, parent
            self.waiting.append(edge.value)

    def _found(self, tensor: torch.Tensor) -> None:
        held = None
        for storage in storages_of(tensor):
            held = held or self.way_to(tensor)
            self.claim(storage_key(storage), held._replace(part=_part_of(storage, tensor)))
        # A view whose base has changed under no_grad has no graph that can be asked for.
        if tensor.requires_grad and tensor.grad_fn is not None:
            self.with_graph.append(tensor)

    def claim(self, key: int, held: Held) -> None:
        if key in self.wanted and key not in self.found:
            self.found[key] = held
            self.missing -= self.wanted[key]

    def _follow_graphs(self) -> None:
        """What only graphs keep. A tensor that was made earlier has the smaller graph, so it is
        asked first.
        """
        seen = set[Any]()
        self.with_graph.sort(key=lambda tensor: sequence_nr(tensor.grad_fn))
        for tensor in self.with_graph:
            if self.has_enough() or len(seen) > MOST_OBJECTS:
                break
            held = None
            for node in _nodes_of(tensor.grad_fn, seen):
                for kept in _with_gradients(tensors_in(kept_by_node(node))):
                    for storage in storages_of(kept):
                        held = held or self.way_to(tensor)._replace(graph=True)
                        self.claim(storage_key(storage), held)
        self.with_graph = []

    def search_in_circles(self) -> None:
        for tensor in _with_gradients(_in_circles()):
            self.came_from[id(tensor)] = Edge("", tensor, "cycle"), None
            self._found(tensor)
        self._follow_graphs()

    def way_to(self, thing: Any) -> Held:
        words, kinds, hook = list[str](), list[str](), None
        edge, parent = self.came_from[id(thing)]
        while parent is not None:
            words.append(edge.words)
            kinds.append(edge.kind)
            of_a_module = edge.kind == MODULE_ATTRIBUTE
            edge, before = self.came_from[parent]
            if of_a_module and hook is None:
                hook = _hook_on(edge.value)
            parent = before
        words = [edge.words, *reversed(words)]
        kinds = [edge.kind, *reversed(kinds)]
        box = _box_of(words, kinds)
        path, in_box = _plain("".join(words)), _plain("".join(words[:box]))
        kind = _kind_of(kinds, box)
        return Held(path, edge.where, kind, in_box, False, self.in_script, hook)


def _box_of(words: list[str], kinds: list[str]) -> int:
    """How many words lead to the cache on the way, or to the innermost list or dict with numbered
    entries, or else to the outermost one of any kind; 0 if there is none. Of a list of modules, it
    is the attribute that each of them has.
    """
    if "cache" in kinds:
        return kinds.index("cache")
    boxes = [i for i, kind in enumerate(kinds) if kind in BOXES]
    numbered = [i for i in boxes if _plain(words[i]) == "[…]"]
    box = max(numbered, default=min(boxes, default=0))
    if box and MODULE_ATTRIBUTE in kinds[box:]:
        return kinds.index(MODULE_ATTRIBUTE, box) + 1
    return box


def _kind_of(kinds: list[str], box: int) -> str:
    for kind in TELLING:
        if kind in kinds:
            return kind
    owner = kinds[box - 1] if box else kinds[-1]
    if owner == MODULE_ATTRIBUTE or not box:
        return owner or "name"
    return kinds[box]


def _hook_on(module: nn.Module) -> types.CodeType | None:
    """The first of a module's hooks that the user's script has."""
    for table in HOOKS:
        for hook in (_attributes(module).get(table) or {}).values():
            is_function = issubclass(type(hook), types.FunctionType)
            if is_function and is_of_a_script(hook.__code__.co_filename):
                return hook.__code__
    return None


def _part_of(storage: torch.UntypedStorage, tensor: torch.Tensor) -> int:
    """How many tensors like this one its storage has room for, rounded down to a power of 2."""
    nbytes = tensor.numel() * tensor.itemsize
    fitting = storage.nbytes() // max(nbytes, 1)
    return 1 << max(fitting.bit_length() - 1, 0)


def _in_circles() -> list[torch.Tensor]:
    """The tensors that the garbage collector would free now, found as it finds them: objects that
    nothing refers to but one another. Nothing is freed.
    """
    [of_the_search] = [sys.getrefcount(thing) for thing in [object()]]
    things = gc.get_objects()
    references = {id(thing): sys.getrefcount(thing) - of_the_search for thing in things}
    for thing in things:
        for other in gc.get_referents(thing):
            if id(other) in references:
                references[id(other)] -= 1
    in_use = [thing for thing in things if references[id(thing)] > 0]
    while in_use:
        for other in gc.get_referents(in_use.pop()):
            if references.get(id(other), 1) <= 0:
                references[id(other)] = 1
                in_use.append(other)
    circles = [thing for thing in things if references[id(thing)] <= 0]
    return [thing for thing in circles if issubclass(type(thing), torch.Tensor)]


def _with_gradients(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    for tensor in tensors:
        yield tensor
        if tensor.is_leaf and tensor.grad is not None:
            yield tensor.grad


def _plain(path: str) -> str:
    """The path with the same words for all entries of a list, or of numbered keys."""
    return A_NUMBER.sub("[…]", path)


# Names


def _names_of_modules(own: bool) -> list[Edge]:
    """The names of the user's ``own`` files, or of all libraries."""
    found = list[Edge]()
    for module, content in list(sys.modules.items()):
        space = _attributes(content)
        is_own = _is_of_a_script(space) or module == "__main__"
        if is_own != own or (not own and module.startswith(NOT_INTO)):
            continue
        for name, value in list(space.items()):
            if not own:
                found.append(Edge(f"{module}.{name}", value))
            elif name[:2] != "__":
                found.append(Edge(name, value))
    return found


def _names_of_frames(frames: Iterable[types.FrameType]) -> tuple[list[Edge], list[Edge]]:
    """The variables of the user's functions that run, and of the libraries'."""
    own, of_libraries = list[Edge](), list[Edge]()
    for frame in frames:
        code = frame.f_code
        if code.co_name == "<module>" or _home_of(frame).startswith(NOT_INTO):
            continue
        found = own if is_of_a_script(code.co_filename) else of_libraries
        for name, value in _variables(frame):
            found.append(Edge(name, value, where=code.co_name))
    return own, of_libraries


def _names_of_loops() -> tuple[list[Edge], list[Edge]]:
    """What a ``for`` goes over may have no name: the variables of the user's generators, and
    iterators that are no generators.
    """
    things, found = gc.get_objects(), list[Any]()
    known = dict[int, bool]()  # by a class's address, since a class may have no hash
    for thing in things:
        kind = type(thing)
        if id(kind) not in known:
            known[id(kind)] = _is_iterator(kind)
        if known[id(kind)]:
            found.append(thing)
    del things, thing  # among them are the dicts of frames, which ``_variables`` empties
    frames, iterators = list[types.FrameType](), list[Edge]()
    for thing in found:
        kind = type(thing)
        if kind is not types.GeneratorType:
            iterators.append(Edge(f"a loop's {kind.__name__}", thing))
        elif thing.gi_frame is not None:
            frames.append(thing.gi_frame)
    generators, _ = _names_of_frames(frames)
    return generators, iterators[:MANY]


def _is_iterator(kind: type) -> bool:
    return any("__next__" in vars(base) for base in kind.__mro__)


def _is_of_a_script(space: dict) -> bool:
    file = space.get("__file__")
    return type(file) is str and is_of_a_script(file)


def _home_of(frame: types.FrameType) -> str:
    """The name of the module that the frame's function is of."""
    return str(frame.f_globals.get("__name__"))


def _frames(frame: types.FrameType | None, error: BaseException | None) -> list[types.FrameType]:
    """The frames in which an error was raised, and those that run, the innermost ones first."""
    raised = list[types.FrameType]()
    if error is not None:
        raised += [each for each, _ in traceback.walk_tb(error.__traceback__)]
    of_threads = sys._current_frames()
    # This function's own frame, in its own variable, would stay with all that called it.
    of_threads.pop(threading.get_ident())
    found = dict[int, types.FrameType]()
    for innermost in (*reversed(raised), frame, *of_threads.values()):
        each = innermost
        while each is not None and id(each) not in found:
            found[id(each)] = each
            each = each.f_back
    return list(found.values())


def _variables(frame: types.FrameType) -> list[tuple[str, Any]]:
    """A frame's names and values.

    Before Python 3.13, ``f_locals`` of a function is a dict that stays in the frame, and keeps all
    values alive until the function ends. So it is emptied, if nobody else has it.
    """
    names = frame.f_locals
    items = list(names.items())
    code = frame.f_code
    is_function = code.co_flags & inspect.CO_OPTIMIZED
    if sys.version_info < (3, 13) and is_function and sys.getrefcount(names) <= OF_A_FRAME:
        for name in (*code.co_varnames, *code.co_cellvars, *code.co_freevars):
            names.pop(name, None)  # what exec() has put there stays
    return items


OF_A_FRAME = 3  # references to such a dict: of the frame, of our name, and of the argument


def _add_parts(module: nn.Module, parts: set[int]) -> None:
    """Add the addresses of all modules that are inside of ``module`` to ``parts``."""
    for part in _attributes(module).get(PARTS, {}).values():
        if part is not None and id(part) not in parts:
            parts.add(id(part))
            _add_parts(part, parts)


# What an object refers to


@functools.cache
def edges_of(kind: Any) -> Callable[[Any], Iterable[Edge]]:
    """A function that gives what an object of this type refers to, in words too."""
    if str(kind.__module__).startswith(NOT_INTO) and not issubclass(kind, BaseException):
        return lambda thing: ()
    for base, of_base in EDGES:
        if issubclass(kind, base):
            return of_base
    return _of_objects(kind)


ROWS: tuple[Any, ...] = (list, tuple, deque, set, frozenset)


def _of_a_dict(thing: dict) -> Iterator[Edge]:
    if _is_of_numbers(dict.values(thing)) and _is_of_numbers(dict.keys(thing)):
        return
    for key, value in list(dict.items(thing)):
        words = f"[{key!r}]" if type(key) in (str, int) else "[…]"
        yield Edge(words, value, "dict")
        if type(key) not in ATOMS:
            yield Edge(words, key, "dict")
    yield from _own_attributes(thing)


def _of_a_row(thing: Any) -> Iterator[Edge]:
    base = next(base for base in ROWS if issubclass(type(thing), base))
    values = list(base.__iter__(thing))  # not by a method of the user's own
    if _is_of_numbers(values):
        return
    kind = "list"
    if base is tuple:
        kind = ""  # a tuple does not grow
    elif base is deque and thing.maxlen is not None:
        kind = "window"  # once it is full, each new entry takes the place of an old one
    for i, value in enumerate(values):
        yield Edge(f"[{i}]", value, kind)
    yield from _own_attributes(thing)


def _is_of_numbers(values: Collection) -> bool:
    return len(values) > MANY and all(type(value) in ATOMS for value in islice(values, 50))


def _of_a_function(thing: types.FunctionType) -> Iterator[Edge]:
    names = thing.__code__.co_freevars
    for name, cell in zip(names, thing.__closure__ or (), strict=False):
        for value in gc.get_referents(cell):  # none, if it is empty
            yield Edge(f" → {name} of the closure {thing.__name__}", value, "closure")
    for value in (*(thing.__defaults__ or ()), *(thing.__kwdefaults__ or {}).values()):
        yield Edge(f" → a default of {thing.__name__}", value, "closure")
    yield from _own_attributes(thing)


OF_A_PARTIAL = " → arguments of the partial"


def _fields(kind: str = "", **words: str) -> Callable[[Any], Iterator[Edge]]:
    """A function that gives these attributes, each in its words, and those of the object's own."""

    def edges(thing: Any) -> Iterator[Edge]:
        for name, in_words in words.items():
            yield Edge(in_words, getattr(thing, name), kind)
        yield from _own_attributes(thing)

    return edges


def _of_a_cache(thing: Any) -> Iterator[Edge]:
    for value in gc.get_referents(thing):
        if value is not thing.__wrapped__ and value is not _attributes(thing):
            yield Edge(" → its cache", value, "cache")


def _of_a_frame(thing: types.FrameType) -> Iterator[Edge]:
    if not _home_of(thing).startswith(NOT_INTO):
        for name, value in _variables(thing):
            yield Edge(f" → {name} in {thing.f_code.co_name}()", value)


def _of_a_module(thing: nn.Module) -> Iterator[Edge]:
    for name, value in list(_attributes(thing).items()):
        if name in TABLES:
            for key, part in (value or {}).items():
                yield Edge(f".{key}", part)
        elif value is not None:
            yield Edge(f".{name}", value, MODULE_ATTRIBUTE)


def _of_a_tensor(thing: torch.Tensor) -> Iterator[Edge]:
    if (thing.is_leaf or thing.retains_grad) and thing.grad is not None:
        yield Edge(".grad", thing.grad, "gradient")
    yield from _own_attributes(thing)


def _of_an_optimizer(thing: Optimizer) -> Iterator[Edge]:
    for name, value in list(_attributes(thing).items()):
        if name == "param_groups":
            yield Edge(f".{name}", value, "optimizer")
            continue
        if name != "state":
            yield Edge(f".{name}", value)
            continue
        for state in list(value.values()):
            if not isinstance(state, dict):
                continue
            for key, number in state.items():
                yield Edge(f".state[…][{key!r}]", number, "optimizer")


def _of_an_array(thing: np.ndarray) -> Iterator[Edge]:
    yield Edge("", thing.base)
    if thing.dtype == object and thing.size <= MANY:
        for value in thing.ravel().tolist():
            yield Edge("[…]", value, "list")


def _of_a_class(thing: type) -> Iterator[Edge]:
    home = sys.modules.get(thing.__module__)
    if _is_of_a_script(_attributes(home)) or thing.__module__ == "__main__":
        for name, value in list(vars(thing).items()):
            yield Edge(f".{name}", value)


def _of_objects(kind: Any) -> Callable[[Any], Iterator[Edge]]:
    """A function that gives what an object of this class refers to, in its slots too."""
    members = [member for base in kind.__mro__ for member in vars(base).items()]
    slots = [(name, slot) for name, slot in members if type(slot) is types.MemberDescriptorType]
    of_an_iterator = ITERATOR if _is_iterator(kind) else ""

    def edges(thing: Any) -> Iterator[Edge]:
        yield from _own_attributes(thing)
        for name, slot in slots:
            with suppress(AttributeError):  # an empty one
                yield Edge(f".{name}", slot.__get__(thing), ATTRIBUTE)
        if not _attributes(thing):  # an iterator, or an object of an extension
            for value in gc.get_referents(thing):
                if not issubclass(type(value), type):
                    yield Edge("", value, of_an_iterator)

    return edges


def _own_attributes(thing: Any) -> Iterator[Edge]:
    for name, value in list(_attributes(thing).items()):
        yield Edge(f".{name}", value, ATTRIBUTE)


def _attributes(thing: Any) -> dict[str, Any]:
    """``thing.__dict__``, without a ``__getattr__`` or a property of its class."""
    try:
        own = object.__getattribute__(thing, "__dict__")
    except (AttributeError, TypeError):
        return {}
    return own if type(own) is dict else {}


EDGES: tuple[tuple[Any, Callable[[Any], Iterator[Edge]]], ...] = (
    (dict, _of_a_dict),
    (ROWS, _of_a_row),
    (torch.Tensor, _of_a_tensor),
    (nn.Module, _of_a_module),
    (Optimizer, _of_an_optimizer),
    (types.FunctionType, _of_a_function),
    (types.MethodType, _fields(__func__="", __self__=".__self__")),
    (functools.partial, _fields(func=" → its function", args=OF_A_PARTIAL, keywords=OF_A_PARTIAL)),
    (type(functools.lru_cache(len)), _of_a_cache),
    (
        BaseException,
        _fields(
            EXCEPTION,
            __traceback__=".__traceback__",
            __context__=".__context__",
            __cause__=".__cause__",
            args=".args",
        ),
    ),
    (types.TracebackType, _fields(EXCEPTION, tb_frame="", tb_next="")),
    (types.FrameType, _of_a_frame),
    (types.GeneratorType, _fields(gi_frame="")),
    (types.CoroutineType, _fields(cr_frame="")),
    (np.ndarray, _of_an_array),
    (type, _of_a_class),
)
