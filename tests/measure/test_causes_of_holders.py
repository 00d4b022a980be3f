"""A script that keeps what it needs no more is told the name that holds it, the line, and a remedy
that takes the bytes away.
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import NamedTuple

import pytest
from support.measured_scripts import START, measure
from support.oom import COPIED, DATA

from gradmem_lib.measure.causes_of_growth import COLLECTED, GROWTH


class Program(NamedTuple):
    text: str
    was: str  # is replaced by `now` as the remedy says
    now: str
    cause: str
    holder: str  # in the evidence
    line: str  # a part of the line that made the bytes


PROGRAMS = {
    "outputs of an epoch": Program(
        "for epoch in range(3):\n"
        "    outputs = []\n"
        "    for _ in range(10):\n"
        "        outputs.append(step(torch.randn(512, 64)))\n"
        "    print(len(outputs))\n",
        "append(step(torch.randn(512, 64)))",
        "append(step(torch.randn(512, 64)).mean().item())",
        GROWTH,
        "`outputs`",
        "out = net(x)",
    ),
    "trials that keep their model": Program(
        "trials = []\n"
        "for i in range(6):\n"
        "    model = nn.Linear(512, 512)\n"
        "    own = torch.optim.Adam(model.parameters())\n"
        "    for _ in range(3):\n"
        "        model(torch.randn(8, 512)).square().mean().backward()\n"
        "        own.step()\n"
        "        own.zero_grad()\n"
        "    trials.append({'score': 1.0, 'extra': (model, own)})\n",
        "'extra': (model, own)",
        "'extra': None",
        GROWTH,
        "`trials`",
        "own.step()",
    ),
    "slices of an evaluation's outputs": Program(
        "first = []\n"
        "with torch.no_grad():\n"
        "    for i in range(12):\n"
        "        first.append(net(torch.randn(400 + 32 * i, 64))[:8])\n",
        "[:8]",
        "[:8].clone()",
        COLLECTED,
        "`first`",
        "first.append(",
    ),
    "gradients of inputs": Program(
        "batches = [torch.randn(512, 64, requires_grad=True) for _ in range(10)]\n"
        "for x in batches:\n"
        "    step(x)\n"
        "    'let go'\n",
        "'let go'",
        "x.grad = None",
        GROWTH,
        "`batches[…].grad`",
        "backward()",
    ),
    "a queue that is filled faster than it is emptied": Program(
        "images = collections.deque()\n"
        "for i in range(24):\n"
        "    images.append(step(torch.randn(512, 64)).detach())\n"
        "    if i % 4 == 3:\n"
        "        images.popleft()\n",
        ".detach())",
        ".mean().item())",
        GROWTH,
        "`images`",
        "out = net(x)",
    ),
    "what each object of a list has computed once": Program(
        "class Graph:\n"
        "    def __init__(self):\n"
        "        self.x = torch.randn(8, 64)\n"
        "    @functools.cached_property\n"
        "    def features(self):\n"
        "        return net(self.x.repeat(64, 1)).detach()\n"
        "graphs = [Graph() for _ in range(12)]\n"
        "for graph in graphs:\n"
        "    step(graph.features)\n",
        "functools.cached_property",
        "property",
        GROWTH,
        "`graphs[…].features`",
        "return net(",
    ),
    "a critic's graph that goes back through the generator": Program(
        "critic = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 1))\n"
        "own = torch.optim.SGD(critic.parameters(), 0.1)\n"
        "for _ in range(4):\n"
        "    fake = net(torch.randn(2048, 64))\n"
        "    loss = critic(fake).square().mean()\n"
        "    loss.backward(retain_graph=True)\n"
        "    own.step()\n"
        "    (critic(fake) - 1).square().mean().backward()\n"
        "    opt.step()\n",
        "critic(fake).square().mean()\n    loss.backward(retain_graph=True)",
        "critic(fake.detach()).square().mean()\n    loss.backward()",
        "Forwards stay in memory after their own backward",
        "held by the graph of loss",
        "loss = critic(fake)",
    ),
    "a hook that stores in an evaluation": Program(
        "def keep(module, inputs, output):\n"
        "    module.seen = [*getattr(module, 'seen', []), output]\n"
        "net[1].register_forward_hook(keep)\n"
        "step(torch.randn(64, 64))\n"
        "with torch.no_grad():\n"
        "    for _ in range(12):\n"
        "        net(torch.randn(512, 64))\n",
        "[*getattr(module, 'seen', []), output]",
        "[output]",
        COLLECTED,
        "`net.1.seen`",
        "net(torch.randn(512, 64))",
    ),
    "a cache without a limit": Program(
        "@functools.lru_cache(maxsize=None)\n"
        "def noise(n):\n"
        "    return torch.randn(512, 64)\n"
        "for i in range(10):\n"
        "    step(noise(i))\n",
        "maxsize=None",
        "maxsize=1",
        GROWTH,
        "`noise`",
        "return torch.randn",
    ),
    "what a loop without a name goes over": Program(
        "from itertools import cycle\n"
        "batches = (torch.randn(512, 64) for _ in range(99))\n"
        "for i, x in enumerate(cycle(batches)):\n"
        "    step(x)\n"
        "    if i == 10:\n"
        "        break\n",
        "cycle(batches)",
        "batches",
        GROWTH,
        "`a loop's cycle`",
        "batches = (torch.randn",
    ),
    "a variable of a generator": Program(
        "def batches():\n"
        "    seen = []\n"
        "    while True:\n"
        "        seen.append(torch.randn(512, 64))\n"
        "        yield seen[-1]\n"
        "for i, x in enumerate(batches()):\n"
        "    step(x)\n"
        "    if i == 10:\n"
        "        break\n",
        "yield seen[-1]",
        "yield seen.pop()",
        GROWTH,
        "`seen`",
        "seen.append(",
    ),
    "rows that a function sorts into batches": Program(
        "def batches():\n"
        "    chunk = []\n"
        "    for i in range(520):\n"
        "        chunk.append(torch.randn(1 + i % 100, 64))\n"
        "        if len(chunk) == 500:\n"
        "            chunk.sort(key=len)\n"
        "            for i in range(0, len(chunk), 20):\n"
        "                yield torch.cat(chunk[i : i + 20])\n"
        "            chunk = []\n"
        "def main():\n"
        "    for x in batches():\n"
        "        step(x)\n"
        "main()\n",
        "== 500",
        "== 20",
        DATA,
        "chunk[…] in batches()",
        "torch.randn(1 + i",
    ),
    "a metric with its graph": Program(
        "class Metric:\n"
        "    total = torch.zeros(())\n"
        "metric = Metric()\n"
        "for _ in range(10):\n"
        "    out = step(torch.randn(512, 64))\n"
        "    metric.total = metric.total + (out - 1).square().sum()\n",
        "square().sum()",
        "square().sum().detach()",
        GROWTH,
        "`metric.total`",
        "(out - 1)",
    ),
    "an error that is kept": Program(
        "failures = []\n"
        "step(torch.randn(64, 64))\n"
        "def fail():\n"
        "    x = torch.randn(2048, 64)\n"
        "    raise ValueError('no fit')\n"
        "try:\n"
        "    fail()\n"
        "except ValueError as error:\n"
        "    failures.append(error)\n"
        "for _ in range(3):\n"
        "    step(torch.randn(64, 64))\n",
        "append(error)",
        "append(str(error))",
        "An exception keeps the variables of its functions",
        "failures[…].__traceback__ → x in fail()",
        "x = torch.randn(2048, 64)",
    ),
    "a search for a batch that fits": Program(
        "failures = []\n"
        "def attempt(rows):\n"
        "    h = torch.randn(rows, 64)\n"
        "    for layer in net:\n"
        "        h = layer(h)\n"
        "    if rows > 600:\n"
        "        raise ValueError('no fit')\n"
        "rows = 4096\n"
        "while rows > 600:\n"
        "    try:\n"
        "        attempt(rows)\n"
        "    except ValueError as error:\n"
        "        failures.append(error)\n"
        "        rows //= 2\n"
        "step(torch.randn(rows, 64))\n",
        "append(error)",
        "append(str(error))",
        "An exception keeps the variables of its functions",
        "failures[…].__traceback__ → h in attempt()",
        "h = layer(h)",
    ),
    "another attempt before the error is handled": Program(
        "def attempt(rows):\n"
        "    h = net(torch.randn(rows, 64))\n"
        "    if rows > 600:\n"
        "        raise ValueError('no fit')\n"
        "    h.square().mean().backward()\n"
        "    opt.step()\n"
        "for _ in range(3):\n"
        "    try:\n"
        "        attempt(2048)\n"
        "    except ValueError:\n"
        "        rows = 512; attempt(rows)\n"
        "    rows\n",
        "        rows = 512; attempt(rows)\n    rows\n",
        "        rows = 512\n    attempt(rows)\n",
        "An exception keeps the variables of its functions",
        "the error that is handled.__traceback__ → h in attempt()",
        "h = net(torch.randn(rows, 64))",
    ),
    "what sys.exc_info() gives": Program(
        "import sys\n"
        "skipped = []\n"
        "def attempt(x, is_bad):\n"
        "    out = net(x).square()\n"
        "    if is_bad:\n"
        "        raise ValueError('not finite')\n"
        "    out.mean().backward()\n"
        "    opt.step()\n"
        "for i in range(8):\n"
        "    try:\n"
        "        attempt(torch.randn(1024, 64), i in (2, 4))\n"
        "    except ValueError:\n"
        "        skipped.append(sys.exc_info())\n",
        "sys.exc_info()",
        "str(sys.exc_info()[1])",
        "An exception keeps the variables of its functions",
        "`skipped[…][…]",
        "out = net(x)",
    ),
    "batches in cycles": Program(
        "gc.disable()\n"
        "class Batch:\n"
        "    def __init__(self):\n"
        "        self.x, self.me = torch.randn(512, 64), self\n"
        "for _ in range(10):\n"
        "    step(Batch().x)\n"
        "    'collect'\n",
        "'collect'",
        "gc.collect()",
        "Reference cycles keep tensors",
        "no name any more",
        "self.x, self.me",
    ),
    "models that their hooks keep": Program(
        "gc.disable()\n"
        "class Seen(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.body = nn.Linear(256, 256)\n"
        "        self.body.register_forward_hook(lambda *_: setattr(self, 'called', True))\n"
        "for _ in range(8):\n"
        "    own = Seen()\n"
        "    sgd = torch.optim.SGD(own.parameters(), 0.1)\n"
        "    for _ in range(2):\n"
        "        own.body(torch.randn(8, 256)).square().mean().backward()\n"
        "        sgd.step()\n"
        "    'collect'\n",
        "'collect'",
        "del own, sgd; gc.collect()",
        "Reference cycles keep tensors",
        "no name any more",
        "mean().backward()",
    ),
    "what each module of a list keeps": Program(
        "def keep(module, inputs, output):\n"
        "    module.output = output.detach()\n"
        "models = [nn.Sequential(nn.Linear(64, 256), nn.ReLU()) for _ in range(6)]\n"
        "for model in models:\n"
        "    model[1].register_forward_hook(keep)\n"
        "    x = torch.randn(512, 64, requires_grad=True)\n"
        "    torch.autograd.grad(model(x).sum(), x)\n"
        "    'empty'\n",
        "'empty'",
        "del model[1].output",
        GROWTH,
        "`models[…].1.output`",
        "model(x)",
    ),
    "a target with its graph": Program(
        "class Style:\n"
        "    def __init__(self, features):\n"
        "        self.target = features.mT @ features\n"
        "style = Style(net(torch.randn(512, 64)))\n"
        "for _ in range(4):\n"
        "    out = net(torch.randn(64, 64))\n"
        "    (out.mT @ out - style.target).square().mean().backward(retain_graph=True)\n",
        "features.mT @ features",
        "(features.mT @ features).detach()",
        "Forwards stay in memory after their own backward",
        "`style.target`",
        "net(torch.randn(512, 64))",
    ),
    "buckets of a parallel model": Program(
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "as_view = False\n"
        "net = nn.parallel.DistributedDataParallel(net, gradient_as_bucket_view=as_view)\n"
        "try:\n"
        "    for _ in range(4):\n"
        "        step(torch.randn(8, 64))\n"
        "finally:\n"
        "    dist.destroy_process_group()\n",
        "as_view = False",
        "as_view = True",
        "DistributedDataParallel keeps a copy of the gradients",
        "held by DistributedDataParallel",
        "out = net(x)",
    ),
    "a state with its graph": Program(
        "class Cell(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layer, self.state = nn.Linear(64, 64), torch.zeros(512, 64)\n"
        "    def forward(self, x):\n"
        "        new = torch.tanh(self.layer(x) + self.state)\n"
        "        self.state = new\n"
        "        return new.square().mean()\n"
        "cell = Cell()\n"
        "sgd = torch.optim.SGD(cell.parameters(), 0.1)\n"
        "for _ in range(8):\n"
        "    cell(torch.randn(512, 64)).backward(retain_graph=True)\n"
        "sgd.step()\n",
        "self.state = new\n",
        "self.state = new.detach()\n",
        "Forwards stay in memory after their own backward",
        "`cell.state`",
        "new = torch.tanh",
    ),
    "results of an evaluation long before the run's end": Program(
        "step(torch.randn(64, 64))\n"
        "results = []\n"
        "with torch.no_grad():\n"
        "    for _ in range(12):\n"
        "        results.append(net(torch.randn(512, 64)))\n"
        "results.clear()\n"
        "for _ in range(270):\n"
        "    step(torch.randn(1, 64))\n",
        "append(net(torch.randn(512, 64)))",
        "append(net(torch.randn(512, 64)).argmax(-1).byte())",
        COLLECTED,
        "kept by `results`: 10 tensors of 10 forwards",
        "append(net(torch.randn(512, 64)))",
    ),
    "outputs that have a list inside": Program(
        "class Model(nn.Module):\n"
        "    def forward(self, x):\n"
        "        h = net[:2](x)\n"
        "        return {'scores': net[2](h), 'layers': [h]}\n"
        "model, history = Model(), []\n"
        "with torch.no_grad():\n"
        "    for _ in range(10):\n"
        "        history.append(model(torch.randn(512, 64)))\n",
        "append(model(torch.randn(512, 64)))",
        "append(model(torch.randn(512, 64))['scores'].argmax(-1).byte())",
        COLLECTED,
        "kept by `history`: 18 tensors of 9 forwards",
        "append(model(torch.randn(512, 64)))",
    ),
    "weights of a round, which are averaged": Program(
        "import copy\n"
        "def share():\n"
        "    return copy.deepcopy(net.state_dict())\n"
        "for _ in range(3):\n"
        "    states = {}\n"
        "    for client in range(5):\n"
        "        step(torch.randn(8, 64))\n"
        "        states[client] = share()\n"
        "    mean = {}\n"
        "    for name in net.state_dict():\n"
        "        mean[name] = torch.as_tensor(sum(state[name] for state in states.values()) / 5)\n"
        "    net.load_state_dict(mean)\n"
        "    del states, mean\n",
        "copy.deepcopy(net.state_dict())",
        "{name: t.numpy().copy() for name, t in net.state_dict().items()}",
        COPIED,
        "held by states",
        "copy.deepcopy",
    ),
    "heads that an optimizer still has": Program(
        "for _ in range(5):\n"
        "    head = nn.Linear(256, 512)\n"
        "    opt.add_param_group({'params': head.parameters()})\n"
        "    for _ in range(2):\n"
        "        opt.zero_grad()\n"
        "        head(net[:2](torch.randn(8, 64))).square().mean().backward()\n"
        "        opt.step()\n"
        "    'drop'\n",
        "'drop'",
        "opt.param_groups.pop(); del head",
        GROWTH,
        "`opt.param_groups[…]['params']`",
        "head = nn.Linear",
    ),
    "outputs and what was computed from them": Program(
        "logs = []\n"
        "for _ in range(6):\n"
        "    out = net(torch.randn(512, 64))\n"
        "    p = out.log_softmax(-1)\n"
        "    entropy = -(p.exp() * p).sum()\n"
        "    out.square().mean().backward()\n"
        "    logs.append({'p': p, 'entropy': entropy})\n"
        "opt.step()\n",
        "{'p': p, 'entropy': entropy}",
        "(p.mean().item(), entropy.item())",
        "Forwards stay in memory after their own backward",
        "logs",
        "p.exp()",
    ),
    "results of an evaluation": Program(
        "step(torch.randn(64, 64))\n"
        "def evaluate():\n"
        "    results = {'out': []}\n"
        "    with torch.no_grad():\n"
        "        for _ in range(12):\n"
        "            results['out'].append(net(torch.randn(512, 64)))\n"
        "    return len(results)\n"
        "evaluate()\n",
        "append(net(torch.randn(512, 64)))",
        "append(net(torch.randn(512, 64)).argmax(-1).byte())",
        COLLECTED,
        "`results['out']`",
        "append(net(",
    ),
}
BLAMELESS = {
    "a bank of the last rows": "bank = torch.randn(64, 64)\n"
    "for _ in range(40):\n"
    "    bank = torch.cat([bank, step(torch.randn(256, 64)).detach()])[-1024:]\n",
    "the first examples, before a large evaluation": "examples = []\n"
    "for i in range(12):\n"
    "    out = step(torch.randn(512, 64)).detach()\n"
    "    if i < 4:\n"
    "        examples.append(out)\n"
    "with torch.no_grad():\n"
    "    net(torch.randn(20000, 64))\n",
    "the layers of one batch without gradients": "layers = [nn.Linear(64, 64) for _ in range(8)]\n"
    "with torch.no_grad():\n"
    "    features = [torch.randn(512, 64)]\n"
    "    for layer in layers:\n"
    "        features.append(layer(features[-1]))\n",
    "windows": "recent, mine = collections.deque(maxlen=4), []\n"
    "for _ in range(12):\n"
    "    recent.append(step(torch.randn(512, 64)).detach())\n"
    "    mine = [*mine[-3:], recent[-1] * 2]\n",
    "the first examples": "examples = []\n"
    "for i in range(12):\n"
    "    out = step(torch.randn(512, 64)).detach()\n"
    "    if i < 4:\n"
    "        examples.append(out)\n",
    "numbers": "losses = []\n"
    "for _ in range(12):\n"
    "    losses.append(step(torch.randn(512, 64)).square().mean().item())\n",
    "a model in a cycle, in a function that ends": "class Net(nn.Module):\n"
    "    def __init__(self):\n"
    "        super().__init__()\n"
    "        self.body = nn.Linear(256, 256)\n"
    "        self.body.register_forward_hook(self.note)\n"
    "    def note(self, *_):\n"
    "        pass\n"
    "    def forward(self, x):\n"
    "        return self.body(x)\n"
    "def main():\n"
    "    own = Net()\n"
    "    sgd = torch.optim.SGD(own.parameters(), 0.1)\n"
    "    for _ in range(4):\n"
    "        own(torch.randn(8, 256)).square().mean().backward()\n"
    "        sgd.step()\n"
    "gc.disable()\n"
    "main()\n",
    "a model that an error refers to as well": "class Trainer:\n"
    "    def __init__(self):\n"
    "        self._net, self.errors = nn.Linear(256, 256), []\n"
    "        self._opt = torch.optim.SGD(self._net.parameters(), 0.1)\n"
    "    def step(self, i):\n"
    "        net = self._net\n"
    "        net(torch.randn(8, 256)).square().mean().backward()\n"
    "        self._opt.step()\n"
    "        if i == 2:\n"
    "            raise ValueError('once')\n"
    "    def fit(self):\n"
    "        for i in range(5):\n"
    "            try:\n"
    "                self.step(i)\n"
    "            except ValueError as error:\n"
    "                self.errors.append(error)\n"
    "trainer = Trainer()\n"
    "trainer.fit()\n",
    "an ensemble that calls its older models": "models = []\n"
    "x, y = torch.randn(256, 64), torch.randn(256, 64)\n"
    "for _ in range(8):\n"
    "    with torch.no_grad():\n"
    "        left = y - sum(model(x) for model in models)\n"
    "    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 64))\n"
    "    own = torch.optim.Adam(model.parameters())\n"
    "    for _ in range(3):\n"
    "        own.zero_grad()\n"
    "        (model(x) - left).square().mean().backward()\n"
    "        own.step()\n"
    "    models.append(model)\n",
    "layers that are added": "for i in range(8):\n"
    "    net.append(nn.Linear(64, 64))\n"
    "    opt.add_param_group({'params': list(net[-1].parameters())})\n"
    "    step(torch.randn(64, 64))\n",
}


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """``measure`` in a process that has, as a script's, no names but its own: a test run has so
    many that a walk ends before it has seen them all.
    """
    folder = tmp_path_factory.mktemp("scripts")
    alone = get_context("spawn")
    with ProcessPoolExecutor(1, alone) as process:
        yield lambda text: process.submit(measure, text, folder).result()


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_holder_is_named_and_the_remedy_takes_the_bytes_away(name, measured):
    program = PROGRAMS[name]
    before = measured(program.text)
    cause = before.causes[0]
    assert cause.name == program.cause, before
    assert program.holder in cause.evidence
    lines = (START + program.text).splitlines()
    assert program.line in lines[cause.line - 1]
    assert program.text.count(program.was) == 1
    assert not before.growing_graph or cause.name == GROWTH
    after = measured(program.text.replace(program.was, program.now))
    assert not after.growing_graph
    assert program.cause not in [other.name for other in after.causes]
    assert after.peak < before.peak
    if cause.promised is not None:
        assert after.peak <= cause.promised < before.peak


@pytest.mark.parametrize("name", BLAMELESS)
def test_what_does_not_grow_is_not_accused(name, measured):
    names = {cause.name for cause in measured(BLAMELESS[name]).causes}
    accused = {GROWTH, COLLECTED, COPIED, *(program.cause for program in PROGRAMS.values())}
    assert not names & accused


RUNNING_MEAN = (
    "scale = nn.Parameter(torch.zeros(()))\n"
    "factor = scale.exp()\n"
    "mean = torch.zeros(())\n"
    "for _ in range(12):\n"
    "    out = step(torch.randn(8, 64)) * factor\n"
    "    mean = 0.9 * mean + 0.1 * out.mean()\n"
)


def test_a_number_with_a_graph_of_many_steps_is_named(measured):
    """Also where this graph has no tensors: a product with a Python number keeps none."""
    said = measured(RUNNING_MEAN).growing_graph
    assert "`mean`" in said and "12 steps" in said
    detached = RUNNING_MEAN.replace("out.mean()", "out.mean().item()")
    assert measured(detached).growing_graph == ""


def test_a_list_is_not_told_to_detach_itself(measured):
    said = measured(
        "losses = []\n"
        "for _ in range(8):\n"
        "    losses.append((step(torch.randn(512, 64)) - 1).square().sum())\n"
    )
    remedy = said.causes[0].remedy
    assert "`losses`" in remedy and "x.detach()" in remedy and "losses.detach()" not in remedy


def test_a_state_of_a_module_is_no_optimizers(measured):
    said = measured(
        "net.state = {'hidden': []}\n"
        "for _ in range(8):\n"
        "    net.state['hidden'].append(step(torch.randn(512, 64)).detach())\n"
    )
    assert "`net.state['hidden']`" in said.causes[0].evidence
    assert "LBFGS" not in said.causes[0].remedy


@pytest.mark.parametrize("end", ["1 / 0", "return"])
def test_a_number_in_a_function_that_ends_is_named(end, measured):
    longer = RUNNING_MEAN.replace("range(12)", "range(20)")
    body = "".join(f"    {line}\n" for line in longer.splitlines())
    said = measured(f"def main():\n{body}    {end}\nmain()\n")
    assert "`mean in main()`" in said.growing_graph


def test_gradients_with_a_graph_are_let_go_with_their_loss(measured):
    text = (
        "for _ in range(6):\n"
        "    loss = net(torch.randn(512, 64)).square().mean()\n"
        "    opt.zero_grad()\n"
        "    loss.backward(create_graph=True)\n"
        "    opt.step()\n"
        "    'let go'\n"
    )
    before = measured(text)
    assert before.causes[0].name == "Gradients keep graphs of their own"
    assert "torch.autograd.grad(" in before.causes[0].remedy
    after = measured(text.replace("'let go'", "opt.zero_grad(); del loss"))
    assert after.peak < before.peak
    assert all("set p.grad to None" not in cause.remedy for cause in after.causes)
