"""Answers to exercise 9.9 as people write them, and such to 1.2, 2.3, 8.2 and 9.3 as heard too
little; see answers_numbers.py.
"""

from functools import partial

import torch
from torch.utils.flop_counter import FlopCounterMode

RIGHT, WRONG = {}, {}
FUSED = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def adam(g, state, beta1=0.9, beta2=0.999, eps=1e-8):
    """As the lesson's cell has it."""
    state["t"] = t = state.get("t", 0) + 1
    m = state.setdefault("m", torch.zeros_like(g)).lerp_(g, 1 - beta1)
    v = state.setdefault("v", torch.zeros_like(g)).lerp_(g * g, 1 - beta2)
    return m / (1 - beta1**t) / ((v / (1 - beta2**t)).sqrt() + eps)


@torch.no_grad()
def _plain(
    p,
    state,
    rank,
    every,
    lr,
    scale,
    *,
    cut=torch.clone,
    due=lambda n, every: n % every == 0,
    wide=lambda G: G.shape[0] <= G.shape[1],
    factor=lambda lr, scale: lr * scale,
    last=False,
    adam=adam,
):
    G, n = p.grad, state.get("n", 0)
    if due(n, every) or n == 0:
        U, _, Vh = torch.linalg.svd(G, full_matrices=False)
        U, V = (U[:, -rank:], Vh[-rank:].T) if last else (U[:, :rank], Vh[:rank].T)
        state["P"] = cut(U if wide(G) else V)
    state["n"] = n + 1
    P = state["P"]
    if wide(G):
        p.add_(P @ adam(P.T @ G, state), alpha=-factor(lr, scale))
    else:
        p.add_(adam(G @ P, state) @ P.T, alpha=-factor(lr, scale))


@torch.no_grad()
def _by_eigh(p, state, rank, every, lr, scale):
    """The directions as eigenvectors of the smaller product, and moments in a dict of their own."""
    G = p.grad
    wide = G.size(0) <= G.size(1)
    state.setdefault("calls", 0)
    if state["calls"] % every == 0:
        square = G @ G.T if wide else G.T @ G
        state["directions"] = torch.linalg.eigh(square).eigenvectors[:, -rank:].clone()
    state["calls"] += 1
    P, moments = state["directions"], state.setdefault("adam", {})
    small = torch.einsum("ir,ij->rj", P, G) if wide else torch.einsum("ij,jr->ir", G, P)
    update = adam(small, moments)
    p -= lr * scale * (P @ update if wide else update @ P.mT)


def _by_transposing(p, state, rank, every, lr, scale):
    with torch.no_grad():
        G = p.grad if p.shape[0] <= p.shape[1] else p.grad.T
        if state.get("t", 0) % every == 0:
            state["P"] = torch.linalg.svd(G)[0][:, :rank].contiguous()
        back = state["P"] @ adam(state["P"].T @ G, state)
        p.data -= lr * scale * (back if p.shape[0] <= p.shape[1] else back.T)


@torch.no_grad()
def _own_moments(p, state, rank, every, lr, scale):
    """Without the given adam, out of place, P kept as (rank, short side)."""
    G = p.grad
    if "t" not in state:
        state["t"], state["m"], state["v"] = 0, 0.0, 0.0
    if state["t"] % every == 0:
        U, _, V = torch.svd(G)
        state["Pt"] = (U if G.shape[0] <= G.shape[1] else V)[:, :rank].T.clone()
    state["t"] += 1
    Pt = state["Pt"]
    g = Pt @ G if G.shape[0] <= G.shape[1] else G @ Pt.T
    state["m"] = 0.9 * state["m"] + 0.1 * g
    state["v"] = 0.999 * state["v"] + 0.001 * g**2
    u = (state["m"] / (1 - 0.9 ** state["t"])) / (
        (state["v"] / (1 - 0.999 ** state["t"])) ** 0.5 + 1e-8
    )
    p.sub_(lr * scale * (Pt.T @ u if G.shape[0] <= G.shape[1] else u @ Pt))


RIGHT["9.9"] = {
    "plain": _plain,
    "eigenvectors": _by_eigh,
    "transposed, where it is tall": _by_transposing,
    "moments of its own": _own_moments,
}


@torch.no_grad()
def _not_back(p, state, rank, every, lr, scale):
    P = state.setdefault("P", torch.linalg.svd(p.grad)[0][:, :rank].clone())
    p.sub_(lr * scale * adam(P.T @ p.grad, state))


@torch.no_grad()
def _full(p, state, rank, every, lr, scale, *, first=False):
    G, n = p.grad, state.get("n", 0)
    wide = G.shape[0] <= G.shape[1]
    if n % every == 0:
        U, _, Vh = torch.linalg.svd(G, full_matrices=False)
        state["P"] = (U[:, :rank] if wide else Vh[:rank].T).clone()
    state["n"] = n + 1
    P = state["P"]

    def only(matrix):
        return P @ (P.T @ matrix) if wide else matrix @ P @ P.T

    p.sub_(lr * scale * (adam(only(G), state) if first else only(adam(G, state))))


def _vh_for_v(p, state, rank, every, lr, scale):
    with torch.no_grad():
        U, _, Vh = torch.linalg.svd(p.grad, full_matrices=False)
        wide = p.shape[0] <= p.shape[1]
        if state.setdefault("n", 0) % every == 0:
            state["P"] = (U if wide else Vh)[:, :rank].clone()
        state["n"] += 1
        P = state["P"]
        p.sub_(
            lr * scale * (P @ adam(P.T @ p.grad, state) if wide else adam(p.grad @ P, state) @ P.T)
        )


@torch.no_grad()
def _forgets(p, state, rank, every, lr, scale):
    if state.get("n", 0) % every == 0:
        for name in ("m", "v", "t"):
            state.pop(name, None)
    _plain(p, state, rank, every, lr, scale)


_ELSEWHERE: dict = {}


def _outside(p, state, rank, every, lr, scale):
    state["known"] = True
    _plain(p, _ELSEWHERE.setdefault(id(p), {}), rank, every, lr, scale)


@torch.no_grad()
def _keeps_the_gradient(p, state, *settings):
    _plain(p, state, *settings)
    state["small"] = state["P"].T @ p.grad if p.shape[0] <= p.shape[1] else p.grad @ state["P"]


@torch.no_grad()
def _scales_the_gradient(p, state, rank, every, lr, scale):
    """Adam's update does not depend on the gradient's size."""
    kept, p.grad = p.grad, scale * p.grad
    _plain(p, state, rank, every, lr, 1.0)
    p.grad = kept


def _new_tensor(p, state, *settings):
    q = torch.nn.Parameter(p.detach().clone())
    q.grad = p.grad
    _plain(q, state, *settings)
    p = q


@torch.no_grad()
def _without_adam(p, state, *settings):
    _plain(p, state, *settings, adam=lambda g, state: g)


def _frees(p, state, *settings):
    _plain(p, state, *settings)
    p.grad = None


WRONG["9.9"] = {
    "the other side": (
        partial(_plain, wide=lambda G: G.shape[0] > G.shape[1]),
        "wrong side|shorter side",
    ),
    "always left": (partial(_plain, wide=lambda G: True), "tall"),
    "always right": (partial(_plain, wide=lambda G: False), "wide"),
    "not mapped back": (_not_back, "map(ped)? .*back"),
    "no scale": (partial(_plain, factor=lambda lr, scale: lr), "scale"),
    "scales the gradient": (_scales_the_gradient, "scale"),
    "divided by scale": (partial(_plain, factor=lambda lr, scale: lr / scale), "scale"),
    "no lr": (partial(_plain, factor=lambda lr, scale: scale), "lr has no effect"),
    "uphill": (partial(_plain, factor=lambda lr, scale: -lr * scale), "uphill|sign"),
    "a new P each step": (partial(_plain, due=lambda n, every: True), "each step"),
    "one P": (partial(_plain, due=lambda n, every: False), "never renewed"),
    "a step too late": (partial(_plain, due=lambda n, every: n > 1 and n % every == 1), "too late"),
    "full moments of the gradient": (_full, "as large as the whole matrix"),
    "full moments of what is kept": (partial(_full, first=True), "as large as the whole matrix"),
    "Vh for V": (_vh_for_v, "Vh"),
    "a view": (partial(_plain, cut=lambda view: view), "view"),
    "smallest": (partial(_plain, last=True), "smallest"),
    "moments begin again": (_forgets, "begin again"),
    "a dict of its own": (_outside, "state"),
    "keeps the small gradient": (_keeps_the_gradient, "more is kept"),
    "a new tensor": (_new_tensor, "in place"),
    "no adam": (_without_adam, "adam"),
    "frees the gradient": (_frees, "p.grad"),
}


def _count(step, formula):
    with FlopCounterMode(
        display=False, custom_mapping={FUSED: formula} if formula else {}
    ) as counter:
        step()
    return counter.get_total_flops()


def _repeated(of, *, first=True, second=True):
    """``of(rows, heads, queries, size, keys)``: the formula, which the plain step's counter has,
    and the other step's.
    """

    def formula(query, key, value, *args, out_val=None, **kwargs):
        return of(*query, key[2])

    return lambda plain, again: _count(again, second and formula) - _count(plain, first and formula)


def _exact(rows, heads, queries, size, keys):
    return 4 * rows * heads * queries * size * keys


def _with(formula):
    return lambda plain, again: _count(again, formula) - _count(plain, formula)


def _not_called(plain, again):
    counters = []
    for step in (plain, again):
        with FlopCounterMode(display=False, custom_mapping={FUSED: lambda *_, **__: 0}) as counter:
            step()
        counters.append(counter)
    return counters[1].get_total_flops - counters[0].get_total_flops


WRONG["8.2"] = {
    "fewer arguments": (_with(lambda query, key, value, *args: 0), r"\*\*kwargs"),
    "shapes of shapes": (
        _with(lambda query, *rest, **kwargs: query.shape[0]),
        "are shapes, not tensors",
    ),
    "no return": (_with(lambda *shapes, **kwargs: None), "returns nothing"),
    "the number itself": (_with(4), "without calling it"),
    "total not called": (_not_called, "call it"),
    "keys squared": (_repeated(lambda b, h, q, d, k: 4 * b * h * k * k * d), "squares the keys"),
    "size for keys": (_repeated(lambda b, h, q, d, k: 4 * b * h * q * d * d), r"key\[2\]"),
    "a quarter": (_repeated(lambda b, h, q, d, k: b * h * q * d * k), "a quarter"),
    "softmax too": (
        _repeated(lambda b, h, q, d, k: _exact(b, h, q, d, k) + b * h * q * k),
        "must return 3,600, but returns 3,750",
    ),
    "one counter with it": (_repeated(_exact, first=False), "one of the two counters"),
    "the other counter with it": (
        _repeated(_exact, second=False),
        r"given only to plain\(\)'s counter",
    ),
}


def _lion(
    momentum=lambda self, p: self.state[p].setdefault("exp_avg", torch.zeros_like(p)),
    *,
    decay=lambda p, lr, share: p.mul_(1 - lr * share),
    blend=lambda m, g, beta: m.lerp(g, 1 - beta),
    move=lambda p, blend, lr: p.sub_(lr * blend.sign()),
    keep=lambda m, g, beta: m.lerp_(g, 1 - beta),
    groups=lambda self: self.param_groups,
    betas=None,
):
    """A ``Lion``, by its parts."""

    def init(self, params, lr, betas=(0.9, 0.99), weight_decay=0.0):
        super(made, self).__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in groups(self):
            for p in (p for p in group["params"] if p.grad is not None):
                m, (beta1, beta2) = momentum(self, p), betas or group["betas"]
                decay(p, group["lr"], group["weight_decay"])
                move(p, blend(m, p.grad, beta1), group["lr"])
                keep(m, p.grad, beta2)

    made = type("Lion", (torch.optim.Optimizer,), {"__init__": init, "step": step})
    return made


def _others(peak, layers, budget):
    low, high = 0, layers
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if peak(middle) <= budget else (middle + 1, high)
    return layers - low


WRONG["8.5"] = {"those that stay": (_others, "layers that do not run again")}

WRONG["9.3"] = {
    "no momentum made": (_lion(lambda self, p: self.state[p]["exp_avg"]), "empty at first"),
    "one momentum for all": (
        _lion(lambda self, p: self.state.setdefault("m", torch.zeros_like(p))),
        "its own momentum",
    ),
    "never updated": (_lion(keep=lambda m, g, beta: m.lerp(g, 1 - beta)), "never updated"),
    "beta2 of the gradient": (
        _lion(keep=lambda m, g, beta: m.lerp_(g, beta)),
        "takes beta2 of the gradient",
    ),
    "a sum": (_lion(keep=lambda m, g, beta: m.mul_(beta).add_(g)), "the whole gradient"),
    "kept by beta1": (
        _lion(blend=lambda m, g, beta: m.lerp_(g, 1 - beta), keep=lambda m, g, beta: m),
        "takes 1 - beta1",
    ),
    "default betas": (_lion(betas=(0.9, 0.99)), r"group\["),
    "sign in the momentum": (
        _lion(keep=lambda m, g, beta: m.lerp_(g.sign(), 1 - beta)),
        "takes the gradient's sign",
    ),
    "old momentum alone": (_lion(blend=lambda m, g, beta: m), "first step"),
    "no lr": (_lion(move=lambda p, blend, lr: p.sub_(blend.sign())), "moves by 1 where lr is 0.1"),
    "less, whatever p is": (
        _lion(decay=lambda p, lr, share: p.sub_(lr * share)),
        "itself is subtracted",
    ),
    "shrinks by lr": (_lion(decay=lambda p, lr, share: p.mul_(1 - lr)), "without decay"),
    "first group": (_lion(groups=lambda self: self.param_groups[:1]), "only one group moves"),
}


def _by_the_formula(step):
    def rule(p, grad, state, lr, beta1, beta2, eps):
        t = state["t"] = state.get("t", 0) + 1
        m = state["m"] = beta1 * state.get("m", 0.0) + (1 - beta1) * grad
        v = state["v"] = beta2 * state.get("v", 0.0) + (1 - beta2) * grad**2
        p -= lr * step(m, v, 1 - beta1**t, 1 - beta2**t, eps, grad)

    return rule


def _of_an_empty_state(p, grad, state, lr, beta1, beta2, eps):
    state["t"] += 1


WRONG["2.3"] = {
    "of an empty state": (
        _of_an_empty_state,
        "not yet: `state` is an empty dict before the first step.*KeyError at line",
    ),
    "corrections swapped": (
        _by_the_formula(lambda m, v, c1, c2, eps, g: m / c2 / ((v / c1).sqrt() + eps)),
        "not yet: the corrections are swapped",
    ),
    "the gradient for m": (
        _by_the_formula(lambda m, v, c1, c2, eps, g: g / c1 / ((v / c2).sqrt() + eps)),
        "not yet: the gradient is corrected here",
    ),
    "root of m's": (
        _by_the_formula(lambda m, v, c1, c2, eps, g: m / c1**0.5 / ((v / c2).sqrt() + eps)),
        "not yet: m is divided by the root of its correction",
    ),
    "precedence": (
        _by_the_formula(lambda m, v, c1, c2, eps, g: m / c1 / (v / c2).sqrt() + eps),
        "look at what eps is added to",
    ),
    "root first": (
        _by_the_formula(lambda m, v, c1, c2, eps, g: m / c1 / (v.sqrt() / c2 + eps)),
        "the root is taken before the correction",
    ),
}


def _packed(size, *, key=lambda t: t.untyped_storage().data_ptr(), own=False, again=False):
    """``saved_bytes`` by a hook that writes a saved tensor's ``size`` down under its ``key``, or
    each time ``again``.
    """

    def saved(model, x):
        counted, weights = {}, {p.untyped_storage().data_ptr() for p in model.parameters()}

        def pack(t):
            if own or t.untyped_storage().data_ptr() not in weights:
                counted[len(counted) if again else key(t)] = size(t)
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            model(x)
        return sum(counted.values())

    return saved


def _whole(t):
    return t.untyped_storage().nbytes()


WRONG["1.2"] = {
    "each time, weights too": (
        _packed(_whole, own=True, again=True),
        "not yet: this counts a storage as often.*And this counts the parameters",
    ),
    "each time, of the view": (
        _packed(lambda t: t.nbytes, again=True),
        "not yet: this counts a storage as often",
    ),
    "weights too, of the view": (
        _packed(lambda t: t.nbytes, own=True),
        "not yet: this counts the parameters too",
    ),
    "weights too, elements": (
        _packed(lambda t: _whole(t) // t.itemsize, own=True),
        "not yet: this counts the parameters.*And this counts elements",
    ),
    "elements of the view": (
        _packed(torch.numel),
        "not yet: this counts the view.*And this counts elements",
    ),
    "all of it": (
        _packed(torch.numel, own=True, again=True),
        "not yet: this counts a storage.*And this counts the parameters.*And this counts elements",
    ),
}
