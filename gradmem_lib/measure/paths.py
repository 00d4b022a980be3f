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
import types
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Any, NamedTuple, cast

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
BOXES = ("list", "dict", "cache", "window")
ATTRIBUTE = "attribute of a module"
# These say more of why a tensor is there than the list or dict that it is in.
TELLING = ("exception", "cache", "optimizer", "gradient")
A_NUMBER = re.compile(r"\[\d+\]|\['[^']*\d'\]")


class Held(NamedTuple):
    """How a storage is held.

    ``path``: from a name, as in ``"study.trials[…].model"``, with "…" for numbers; empty if there
    is none. ``where``: the function that has this name, or nothing for a global one. ``kind``: of
    the owner: "list", "dict", "cache", "exception", "cycle", "C++" and so on. ``box``: the path of
    the list, dict or cache on the way that has numbered entries. ``graph``: only the graph of the
    tensor at ``path`` keeps it. ``in_script``: the name is one of the user's own. ``hook``: of an
    attribute of a module, the script's hook on that module, as a code object.
    """

    path: str
    where: str = ""
    kind: str = ""
    box: str = ""
    graph: bool = False
    in_script: bool = True
    hook: types.CodeType | None = None

    def __str__(self) -> str:
        if self.kind == "cycle":
            return "nothing but a reference cycle"
        if not self.path:
            return "no name that was found"
        place = f"{self.path} in {self.where}()" if self.where else self.path
        return f"the graph of {place}" if self.graph else place


class Root(NamedTuple):
    name: str
    where: str
    value: Any


class Edge(NamedTuple):
    """``words`` lead from an object to ``value``; ``kind`` is that of the owner, or nothing."""

    words: str
    value: Any
    kind: str = ""


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
        return _Walk(wanted).run(frame, error, everywhere)


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
        own, _, _ = _names(_frames(frame, error))
        walk.look_around(own)
        left = MOST_OBJECTS
        for tensor in walk.with_graph:
            if tensor.numel() == 1 and left > 0:
                steps, nodes = _steps_of_graph(tensor.grad_fn, begins, left)
                left -= nodes
                if steps > longest[1]:
                    longest = str(walk.way_to(tensor)), steps
    return longest


def _steps_of_graph(node: Any, begins: Sequence[int], at_most: int) -> tuple[int, int]:
    """In how many steps the nodes of a graph were made, and how many nodes were looked at."""
    steps, seen = set[int](), set[Any]()
    waiting = [node]
    while waiting and len(seen) < at_most:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        number = sequence_nr(node)
        if number < NO_NUMBER:
            steps.add(bisect_right(begins, number))
        waiting += [following for following, _ in node.next_functions]
    steps.discard(0)  # made before the first step
    return len(steps), len(seen)


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
        for cached in (edges_of, _slots_of):
            cached.cache_clear()  # it would keep the user's classes alive


class _Walk:
    def __init__(self, wanted: Mapping[int, int]):
        self.wanted = wanted
        self.found: dict[int, Held] = {}
        self.missing = sum(wanted.values())
        self.enough = (1 - ALMOST_ALL) * self.missing
        # By an object's address: that of the object that led to it, the words, the owner's kind.
        # The objects themselves are kept until the walk ends, so that no address is used twice.
        self.came_from: dict[int, tuple[int | None, str, str]] = {}
        self.roots: dict[int, Root] = {}
        self.things: dict[int, Any] = {}
        self.with_graph: list[torch.Tensor] = []
        self.in_script = True
        self.is_complete = True
        self.running = set[int]()

    def run(self, frame, error, everywhere: bool) -> dict[int, Held]:
        frames = _frames(frame, error)
        self.running = {id(each) for each in frames}
        own, running, others = _names(frames)
        self._search(own)
        self.in_script = False
        self._search(running)
        if everywhere and self.missing > self.enough:
            self._search_in_circles()
        if everywhere and self.missing > self.enough:
            self._search(others())
            if self.is_complete:
                for key in self.wanted:
                    self._claim(key, Held("", kind="C++", in_script=False))
        return self.found

    def _search(self, roots: Collection[Root]) -> None:
        if self.missing > self.enough:
            self.look_around(roots)
            self._follow_graphs()

    def look_around(self, roots: Collection[Root]) -> None:
        """Breadth first, so that each object is found by its shortest path."""
        waiting, private = deque[Any](), deque[tuple]()
        parts = _parts_of_modules(roots)
        for root in roots:
            # A loop over a model's layers leaves one of them in a variable.
            if id(root.value) not in parts and self._is_new(root.value):
                self.roots.setdefault(id(root.value), root)
                self._reach_in_turn(root.value, None, root.name, "", waiting, private)
        seen = 0
        while (waiting or private) and self.missing > self.enough:
            if not waiting:
                value, parent, words, kind = private.popleft()
                self._reach(value, parent, words, kind, waiting)
                continue
            self._look_at(waiting.popleft(), waiting, private)
            seen += 1
            if seen > MOST_OBJECTS:
                self.is_complete = False
                break

    def _look_at(self, thing: Any, waiting: deque, private: deque) -> None:
        kind: Any = type(thing)
        if id(thing) in self.running:
            return  # its variables are names themselves
        try:
            if issubclass(kind, torch.Tensor):
                self._found(thing)
            for words, value, owner in edges_of(kind)(thing):
                if self._is_new(value):
                    self._reach_in_turn(value, id(thing), words, owner, waiting, private)
        except Exception:  # an object that cannot be asked leads nowhere
            self.is_complete = False

    def _is_new(self, value: Any) -> bool:
        return type(value) not in ATOMS and id(value) not in self.came_from

    def _reach_in_turn(self, value, parent, words: str, kind: str, waiting, private) -> None:
        """What private names and errors lead to comes after all that public names lead to: an
        error's functions had variables for what has better names.
        """
        if kind == "exception" or words.startswith(("_", "._")):
            private.append((value, parent, words, kind))
        else:
            self._reach(value, parent, words, kind, waiting)

    def _reach(self, value, parent, words: str, kind: str, waiting: deque) -> None:
        if self._is_new(value):
            self.came_from[id(value)] = parent, words, kind
            self.things[id(value)] = value
            waiting.append(value)

    def _found(self, tensor: torch.Tensor) -> None:
        held = None
        for storage in storages_of(tensor):
            held = held or self.way_to(tensor)
            self._claim(storage_key(storage), held)
        # A view whose base has changed under no_grad has no graph that can be asked for.
        if tensor.requires_grad and tensor.grad_fn is not None:
            self.with_graph.append(tensor)

    def _claim(self, key: int, held: Held) -> None:
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
            if self.missing <= self.enough or len(seen) > MOST_OBJECTS:
                break
            held = None
            waiting = [tensor.grad_fn]
            while waiting:
                node = waiting.pop()
                if node is None or node in seen:
                    continue
                seen.add(node)
                for kept in _with_gradients(tensors_in(kept_by_node(node))):
                    for storage in storages_of(kept):
                        held = held or self.way_to(tensor)._replace(graph=True)
                        self._claim(storage_key(storage), held)
                waiting += [following for following, _ in node.next_functions]
        self.with_graph = []

    def _search_in_circles(self) -> None:
        for tensor in _in_circles():
            self.came_from[id(tensor)] = None, "", "cycle"
            self.roots[id(tensor)] = Root("", "", tensor)
            self.things[id(tensor)] = tensor
            self._found(tensor)
        self._follow_graphs()

    def way_to(self, thing: Any) -> Held:
        words, kinds, hook = list[str](), list[str](), None
        child, parent = id(thing), self.came_from[id(thing)][0]
        while True:
            _, word, kind = self.came_from[child]
            words.append(word)
            kinds.append(kind)
            if parent is None:
                break
            if kind == ATTRIBUTE and hook is None:
                hook = _hook_on(self.things[parent])
            child, parent = parent, self.came_from[parent][0]
        words.reverse()
        kinds.reverse()
        box = _box_of(words, kinds)
        path, root = _plain("".join(words)), self.roots[child]
        kind = _kind_of(kinds, box)
        in_box = _plain("".join(words[:box]))
        return Held(path, root.where, kind, in_box, False, self.in_script, hook)


def _box_of(words: list[str], kinds: list[str]) -> int:
    """How many words lead to the cache on the way, or to the innermost list or dict with numbered
    entries, or else to the outermost one of any kind; 0 if there is none.
    """
    if "cache" in kinds:
        return kinds.index("cache")
    boxes = [i for i, kind in enumerate(kinds) if kind in BOXES]
    numbered = [i for i in boxes if _plain(words[i]) == "[…]"]
    return max(numbered, default=min(boxes, default=0))


def _kind_of(kinds: list[str], box: int) -> str:
    for kind in TELLING:
        if kind in kinds:
            return kind
    owner = kinds[box - 1] if box else kinds[-1]
    if owner == ATTRIBUTE or not box:
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


def _names(
    frames: Iterable[types.FrameType],
) -> tuple[list[Root], list[Root], Callable[[], list[Root]]]:
    """The names of the user's files and functions, those of the libraries' functions that run, and
    a function for all other names.
    """
    own, running = list[Root](), list[Root]()
    other_modules = []
    for name, module in list(sys.modules.items()):
        space = _attributes(module)
        if _is_of_a_script(space) or name == "__main__":
            own += [Root(key, "", value) for key, value in list(space.items()) if key[:2] != "__"]
        elif not name.startswith(NOT_INTO):
            other_modules.append((name, space))
    for frame in frames:
        code = frame.f_code
        if code.co_name == "<module>" or _home_of(frame).startswith(NOT_INTO):
            continue
        found = own if is_of_a_script(code.co_filename) else running
        found += [Root(key, code.co_name, value) for key, value in _variables(frame)]

    def others() -> list[Root]:
        found = []
        for name, space in other_modules:
            found += [Root(f"{name}.{key}", "", value) for key, value in list(space.items())]
        return found

    return own, running, others


def _is_of_a_script(space: dict) -> bool:
    file = space.get("__file__")
    return type(file) is str and is_of_a_script(file)


def _home_of(frame: types.FrameType) -> str:
    """The name of the module that the frame's function is of."""
    return str(frame.f_globals.get("__name__"))


def _frames(frame: types.FrameType | None, error: BaseException | None) -> list[types.FrameType]:
    """The frames in which an error was raised, and those that run, the innermost ones first."""
    raised = []
    trace = error.__traceback__ if error is not None else None
    while trace is not None:
        raised.append(trace.tb_frame)
        trace = trace.tb_next
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


def _parts_of_modules(roots: Collection[Root]) -> set[int]:
    """The addresses of all modules that are inside of another one among ``roots``."""
    modules = [root.value for root in roots if issubclass(type(root.value), nn.Module)]
    parts = set[int]()
    waiting = list(modules)
    while waiting:
        for part in _attributes(waiting.pop()).get(PARTS, {}).values():
            if part is not None and id(part) not in parts:
                parts.add(id(part))
                waiting.append(part)
    return parts


# What an object refers to


@functools.cache
def edges_of(kind: Any) -> Callable[[Any], Iterable[Edge]]:
    """A function that gives what an object of this type refers to, in words too."""
    if str(kind.__module__).startswith(NOT_INTO) and not issubclass(kind, BaseException):
        return lambda thing: ()
    for base, of_base in EDGES:
        if issubclass(kind, base):
            return of_base
    return _of_an_object


ROWS: tuple[Any, ...] = (list, tuple, deque, set, frozenset)


def _of_a_dict(thing: dict) -> Iterator[Edge]:
    if _is_of_numbers(dict.values(thing)):
        return
    for key, value in list(dict.items(thing)):
        words = f"[{key!r}]" if type(key) in (str, int) else "[…]"
        yield Edge(words, value, "dict")
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


def _of_a_method(thing: types.MethodType) -> Iterator[Edge]:
    yield Edge("", thing.__func__)
    yield Edge(".__self__", thing.__self__)


def _of_a_partial(thing: functools.partial) -> Iterator[Edge]:
    yield Edge(" → its function", thing.func)
    for value in (*thing.args, *thing.keywords.values()):
        yield Edge(" → an argument of the partial", value, "closure")


def _of_a_cache(thing: Any) -> Iterator[Edge]:
    for value in gc.get_referents(thing):
        if value is not thing.__wrapped__ and value is not _attributes(thing):
            yield Edge(" → its cache", value, "cache")


def _of_an_error(thing: BaseException) -> Iterator[Edge]:
    yield Edge(".__traceback__", thing.__traceback__, "exception")
    yield Edge(".__context__", thing.__context__, "exception")
    yield Edge(".__cause__", thing.__cause__, "exception")
    yield Edge(".args", thing.args, "exception")
    yield from _own_attributes(thing)


def _of_a_traceback(thing: types.TracebackType) -> Iterator[Edge]:
    yield Edge("", thing.tb_frame)
    yield Edge("", thing.tb_next)


def _of_a_frame(thing: types.FrameType) -> Iterator[Edge]:
    if not _home_of(thing).startswith(NOT_INTO):
        for name, value in _variables(thing):
            yield Edge(f" → {name} in {thing.f_code.co_name}()", value)


def _of_a_generator(thing: Any) -> Iterator[Edge]:
    for name in ("gi_frame", "cr_frame"):
        frame = getattr(thing, name, None)
        for key, value in _variables(frame) if frame is not None else ():
            yield Edge(f" → {key} in {frame.f_code.co_name}()", value, "generator")


def _of_a_module(thing: nn.Module) -> Iterator[Edge]:
    for name, value in list(_attributes(thing).items()):
        if name in TABLES:
            for key, part in (value or {}).items():
                yield Edge(f".{key}", part)
        elif value is not None:
            yield Edge(f".{name}", value, ATTRIBUTE)


def _of_a_tensor(thing: torch.Tensor) -> Iterator[Edge]:
    if thing.is_leaf and thing.grad is not None:
        yield Edge(".grad", thing.grad, "gradient")
    yield from _own_attributes(thing)


def _of_an_optimizer(thing: Optimizer) -> Iterator[Edge]:
    for name, value in list(_attributes(thing).items()):
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


def _of_an_object(thing: Any) -> Iterator[Edge]:
    own, kind = _attributes(thing), cast(Any, type(thing))
    yield from _own_attributes(thing)
    for name, slot in _slots_of(kind):
        with suppress(AttributeError):  # an empty one
            yield Edge(f".{name}", slot.__get__(thing), "attribute")
    if not own:  # an iterator, or an object of an extension
        for value in gc.get_referents(thing):
            if not issubclass(type(value), type):
                yield Edge("", value)


@functools.cache
def _slots_of(kind: Any) -> list[tuple[str, Any]]:
    members = [member for cls in kind.__mro__ for member in vars(cls).items()]
    return [(name, slot) for name, slot in members if type(slot) is types.MemberDescriptorType]


def _own_attributes(thing: Any) -> Iterator[Edge]:
    for name, value in list(_attributes(thing).items()):
        yield Edge(f".{name}", value, "attribute")


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
    (types.MethodType, _of_a_method),
    (functools.partial, _of_a_partial),
    (type(functools.lru_cache(len)), _of_a_cache),
    (BaseException, _of_an_error),
    (types.TracebackType, _of_a_traceback),
    (types.FrameType, _of_a_frame),
    ((types.GeneratorType, types.CoroutineType), _of_a_generator),
    (np.ndarray, _of_an_array),
    (type, _of_a_class),
)
