"""A script that keeps what it needs no more is told the name that holds it, the line, and a remedy
that takes the bytes away.
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import NamedTuple

import pytest
from support.measured_scripts import START, measure
from support.oom import COPIED, DATA, UNUSED

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
        """\
for epoch in range(3):
    outputs = []
    for _ in range(10):
        outputs.append(step(torch.randn(512, 64)))
    print(len(outputs))
""",
        "append(step(torch.randn(512, 64)))",
        "append(step(torch.randn(512, 64)).mean().item())",
        GROWTH,
        "`outputs`",
        "out = net(x)",
    ),
    "trials that keep their model": Program(
        """\
trials = []
for i in range(6):
    model = nn.Linear(512, 512)
    own = torch.optim.Adam(model.parameters())
    for _ in range(3):
        model(torch.randn(8, 512)).square().mean().backward()
        own.step()
        own.zero_grad()
    trials.append({'score': 1.0, 'extra': (model, own)})
""",
        "'extra': (model, own)",
        "'extra': None",
        GROWTH,
        "`trials`",
        "own.step()",
    ),
    "slices of an evaluation's outputs": Program(
        """\
first = []
with torch.no_grad():
    for i in range(12):
        first.append(net(torch.randn(400 + 32 * i, 64))[:8])
""",
        "[:8]",
        "[:8].clone()",
        COLLECTED,
        "`first`",
        "first.append(",
    ),
    "gradients of inputs": Program(
        """\
batches = [torch.randn(512, 64, requires_grad=True) for _ in range(10)]
for x in batches:
    step(x)
    'let go'
""",
        "'let go'",
        "x.grad = None",
        GROWTH,
        "`batches[…].grad`",
        "backward()",
    ),
    "a queue that is filled faster than it is emptied": Program(
        """\
images = collections.deque()
for i in range(24):
    images.append(step(torch.randn(512, 64)).detach())
    if i % 4 == 3:
        images.popleft()
""",
        ".detach())",
        ".mean().item())",
        GROWTH,
        "`images`",
        "out = net(x)",
    ),
    "what each object of a list has computed once": Program(
        """\
class Graph:
    def __init__(self):
        self.x = torch.randn(8, 64)
    @functools.cached_property
    def features(self):
        return net(self.x.repeat(64, 1)).detach()
graphs = [Graph() for _ in range(12)]
for graph in graphs:
    step(graph.features)
""",
        "functools.cached_property",
        "property",
        GROWTH,
        "`graphs[…].features`",
        "return net(",
    ),
    "a critic's graph that goes back through the generator": Program(
        """\
critic = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 1))
own = torch.optim.SGD(critic.parameters(), 0.1)
for _ in range(4):
    fake = net(torch.randn(2048, 64))
    loss = critic(fake).square().mean()
    loss.backward(retain_graph=True)
    own.step()
    (critic(fake) - 1).square().mean().backward()
    opt.step()
""",
        "critic(fake).square().mean()\n    loss.backward(retain_graph=True)",
        "critic(fake.detach()).square().mean()\n    loss.backward()",
        "Forwards stay in memory after their own backward",
        "held by the graph of loss",
        "loss = critic(fake)",
    ),
    "a hook that stores in an evaluation": Program(
        """\
def keep(module, inputs, output):
    module.seen = [*getattr(module, 'seen', []), output]
net[1].register_forward_hook(keep)
step(torch.randn(64, 64))
with torch.no_grad():
    for _ in range(12):
        net(torch.randn(512, 64))
""",
        "[*getattr(module, 'seen', []), output]",
        "[output]",
        COLLECTED,
        "`net.1.seen`",
        "net(torch.randn(512, 64))",
    ),
    "a cache without a limit": Program(
        """\
@functools.lru_cache(maxsize=None)
def noise(n):
    return torch.randn(512, 64)
for i in range(10):
    step(noise(i))
""",
        "maxsize=None",
        "maxsize=1",
        GROWTH,
        "`noise`",
        "return torch.randn",
    ),
    "what a loop without a name goes over": Program(
        """\
from itertools import cycle
batches = (torch.randn(512, 64) for _ in range(99))
for i, x in enumerate(cycle(batches)):
    step(x)
    if i == 10:
        break
""",
        "cycle(batches)",
        "batches",
        GROWTH,
        "`a loop's cycle`",
        "batches = (torch.randn",
    ),
    "a variable of a generator": Program(
        """\
def batches():
    seen = []
    while True:
        seen.append(torch.randn(512, 64))
        yield seen[-1]
for i, x in enumerate(batches()):
    step(x)
    if i == 10:
        break
""",
        "yield seen[-1]",
        "yield seen.pop()",
        GROWTH,
        "`seen`",
        "seen.append(",
    ),
    "rows that a function sorts into batches": Program(
        """\
def batches():
    chunk = []
    for i in range(520):
        chunk.append(torch.randn(1 + i % 100, 64))
        if len(chunk) == 500:
            chunk.sort(key=len)
            for i in range(0, len(chunk), 20):
                yield torch.cat(chunk[i : i + 20])
            chunk = []
def main():
    for x in batches():
        step(x)
main()
""",
        "== 500",
        "== 20",
        DATA,
        "chunk[…] in batches()",
        "torch.randn(1 + i",
    ),
    "a metric with its graph": Program(
        """\
class Metric:
    total = torch.zeros(())
metric = Metric()
for _ in range(10):
    out = step(torch.randn(512, 64))
    metric.total = metric.total + (out - 1).square().sum()
""",
        "square().sum()",
        "square().sum().detach()",
        GROWTH,
        "`metric.total`",
        "(out - 1)",
    ),
    "an error that is kept": Program(
        """\
failures = []
step(torch.randn(64, 64))
def fail():
    x = torch.randn(2048, 64)
    raise ValueError('no fit')
try:
    fail()
except ValueError as error:
    failures.append(error)
for _ in range(3):
    step(torch.randn(64, 64))
""",
        "append(error)",
        "append(str(error))",
        "An exception keeps the variables of its functions",
        "failures[…].__traceback__ → x in fail()",
        "x = torch.randn(2048, 64)",
    ),
    "a search for a batch that fits": Program(
        """\
failures = []
def attempt(rows):
    h = torch.randn(rows, 64)
    for layer in net:
        h = layer(h)
    if rows > 600:
        raise ValueError('no fit')
rows = 4096
while rows > 600:
    try:
        attempt(rows)
    except ValueError as error:
        failures.append(error)
        rows //= 2
step(torch.randn(rows, 64))
""",
        "append(error)",
        "append(str(error))",
        "An exception keeps the variables of its functions",
        "failures[…].__traceback__ → h in attempt()",
        "h = layer(h)",
    ),
    "another attempt before the error is handled": Program(
        """\
def attempt(rows):
    h = net(torch.randn(rows, 64))
    if rows > 600:
        raise ValueError('no fit')
    h.square().mean().backward()
    opt.step()
for _ in range(3):
    try:
        attempt(2048)
    except ValueError:
        rows = 512; attempt(rows)
    rows
""",
        "        rows = 512; attempt(rows)\n    rows\n",
        "        rows = 512\n    attempt(rows)\n",
        "An exception keeps the variables of its functions",
        "the error that is handled.__traceback__ → h in attempt()",
        "h = net(torch.randn(rows, 64))",
    ),
    "what sys.exc_info() gives": Program(
        """\
import sys
skipped = []
def attempt(x, is_bad):
    out = net(x).square()
    if is_bad:
        raise ValueError('not finite')
    out.mean().backward()
    opt.step()
for i in range(8):
    try:
        attempt(torch.randn(1024, 64), i in (2, 4))
    except ValueError:
        skipped.append(sys.exc_info())
""",
        "sys.exc_info()",
        "str(sys.exc_info()[1])",
        "An exception keeps the variables of its functions",
        "`skipped[…][…]",
        "out = net(x)",
    ),
    "batches in cycles": Program(
        """\
gc.disable()
class Batch:
    def __init__(self):
        self.x, self.me = torch.randn(512, 64), self
for _ in range(10):
    step(Batch().x)
    'collect'
""",
        "'collect'",
        "gc.collect()",
        "Reference cycles keep tensors",
        "no name any more",
        "self.x, self.me",
    ),
    "models that their hooks keep": Program(
        """\
gc.disable()
class Seen(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(256, 256)
        self.body.register_forward_hook(lambda *_: setattr(self, 'called', True))
for _ in range(8):
    own = Seen()
    sgd = torch.optim.SGD(own.parameters(), 0.1)
    for _ in range(2):
        own.body(torch.randn(8, 256)).square().mean().backward()
        sgd.step()
    'collect'
""",
        "'collect'",
        "del own, sgd; gc.collect()",
        "Reference cycles keep tensors",
        "no name any more",
        "mean().backward()",
    ),
    "what each module of a list keeps": Program(
        """\
def keep(module, inputs, output):
    module.output = output.detach()
models = [nn.Sequential(nn.Linear(64, 256), nn.ReLU()) for _ in range(6)]
for model in models:
    model[1].register_forward_hook(keep)
    x = torch.randn(512, 64, requires_grad=True)
    torch.autograd.grad(model(x).sum(), x)
    'empty'
""",
        "'empty'",
        "del model[1].output",
        GROWTH,
        "`models[…].1.output`",
        "model(x)",
    ),
    "a target with its graph": Program(
        """\
class Style:
    def __init__(self, features):
        self.target = features.mT @ features
style = Style(net(torch.randn(512, 64)))
for _ in range(4):
    out = net(torch.randn(64, 64))
    (out.mT @ out - style.target).square().mean().backward(retain_graph=True)
""",
        "features.mT @ features",
        "(features.mT @ features).detach()",
        "Forwards stay in memory after their own backward",
        "`style.target`",
        "net(torch.randn(512, 64))",
    ),
    "buckets of a parallel model": Program(
        """\
import torch.distributed as dist
dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)
as_view = False
net = nn.parallel.DistributedDataParallel(net, gradient_as_bucket_view=as_view)
try:
    for _ in range(4):
        step(torch.randn(8, 64))
finally:
    dist.destroy_process_group()
""",
        "as_view = False",
        "as_view = True",
        "DistributedDataParallel keeps a copy of the gradients",
        "held by DistributedDataParallel",
        "out = net(x)",
    ),
    "a state with its graph": Program(
        """\
class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.state = nn.Linear(64, 64), torch.zeros(512, 64)
    def forward(self, x):
        new = torch.tanh(self.layer(x) + self.state)
        self.state = new
        return new.square().mean()
cell = Cell()
sgd = torch.optim.SGD(cell.parameters(), 0.1)
for _ in range(8):
    cell(torch.randn(512, 64)).backward(retain_graph=True)
sgd.step()
""",
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
    "an average that was begun before the first forward": Program(
        """\
net = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))
opt = torch.optim.Adam(net.parameters())
average = {name: p.data.clone() for name, p in net.named_parameters()}
for _ in range(4):
    step(torch.randn(8, 256))
    for name in average:
        average[name] = 0.9 * average[name] + 0.1 * net.get_parameter(name).data
""",
        "p.data.clone() for name, p in net.named_parameters()",
        "0 for name in ()",
        COPIED,
        "held by average",
        "average = {",
    ),
    "the best model so far": Program(
        """\
class Best:
    model = None
for _ in range(4):
    step(torch.randn(8, 64))
    Best.model = copy.deepcopy(net)
""",
        "copy.deepcopy(net)",
        "None",
        COPIED,
        "held by Best.model",
        "copy.deepcopy(net)",
    ),
    "objects in cycles that are gone before the end": Program(
        """\
class Trainer:
    def __init__(self):
        self.net = nn.Linear(256, 256)
        self.own = torch.optim.Adam(self.net.parameters())
        self.callbacks = [self.fit]
    def fit(self):
        for _ in range(3):
            self.net(torch.randn(8, 256)).square().mean().backward()
            self.own.step()
            self.own.zero_grad()
        'let go'
gc.collect()
for _ in range(6):
    Trainer().fit()
gc.collect()
for _ in range(4):
    step(torch.randn(8, 64))
""",
        "'let go'",
        "self.callbacks.clear()",
        "Reference cycles keep tensors",
        "refer to one another",
        "self.own.step()",
    ),
    "a deep queue that another thread fills": Program(
        """\
def make():
    return torch.randn(512, 64)
def made(make):
    x = make()
    return lambda: x
class Filling(threading.Thread):
    def run(self):
        for _ in range(40):
            batches.put(made(make))
batches = queue.Queue()
thread = Filling()
thread.start()
thread.join()
for _ in range(40):
    step(batches.get()())
""",
        "put(made(make))",
        "put(make)",
        DATA,
        "held by batches.queue",
        "torch.randn(512, 64)",
    ),
    "results of an evaluation": Program(
        """\
step(torch.randn(64, 64))
def evaluate():
    results = {'out': []}
    with torch.no_grad():
        for _ in range(12):
            results['out'].append(net(torch.randn(512, 64)))
    return len(results)
evaluate()
""",
        "append(net(torch.randn(512, 64)))",
        "append(net(torch.randn(512, 64)).argmax(-1).byte())",
        COLLECTED,
        "`results['out']`",
        "append(net(",
    ),
}
BLAMELESS = {
    "a bank of the last rows": """\
bank = torch.randn(64, 64)
for _ in range(40):
    bank = torch.cat([bank, step(torch.randn(256, 64)).detach()])[-1024:]
""",
    "the first examples, before a large evaluation": """\
examples = []
for i in range(12):
    out = step(torch.randn(512, 64)).detach()
    if i < 4:
        examples.append(out)
with torch.no_grad():
    net(torch.randn(20000, 64))
""",
    "the layers of one batch without gradients": """\
layers = [nn.Linear(64, 64) for _ in range(8)]
with torch.no_grad():
    features = [torch.randn(512, 64)]
    for layer in layers:
        features.append(layer(features[-1]))
""",
    "windows": """\
recent, mine = collections.deque(maxlen=4), []
for _ in range(12):
    recent.append(step(torch.randn(512, 64)).detach())
    mine = [*mine[-3:], recent[-1] * 2]
""",
    "data that is made after a forward that nothing uses": """\
net(torch.randn(8, 64))
for x in [torch.randn(512, 64) for _ in range(8)]:
    step(x)
""",
    "the first examples": """\
examples = []
for i in range(12):
    out = step(torch.randn(512, 64)).detach()
    if i < 4:
        examples.append(out)
""",
    "numbers": """\
losses = []
for _ in range(12):
    losses.append(step(torch.randn(512, 64)).square().mean().item())
""",
    "a model in a cycle, in a function that ends": """\
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(256, 256)
        self.body.register_forward_hook(self.note)
    def note(self, *_):
        pass
    def forward(self, x):
        return self.body(x)
def main():
    own = Net()
    sgd = torch.optim.SGD(own.parameters(), 0.1)
    for _ in range(4):
        own(torch.randn(8, 256)).square().mean().backward()
        sgd.step()
gc.disable()
main()
""",
    "a model that an error refers to as well": """\
class Trainer:
    def __init__(self):
        self._net, self.errors = nn.Linear(256, 256), []
        self._opt = torch.optim.SGD(self._net.parameters(), 0.1)
    def step(self, i):
        net = self._net
        net(torch.randn(8, 256)).square().mean().backward()
        self._opt.step()
        if i == 2:
            raise ValueError('once')
    def fit(self):
        for i in range(5):
            try:
                self.step(i)
            except ValueError as error:
                self.errors.append(error)
trainer = Trainer()
trainer.fit()
""",
    "an ensemble that calls its older models": """\
models = []
x, y = torch.randn(256, 64), torch.randn(256, 64)
for _ in range(8):
    with torch.no_grad():
        left = y - sum(model(x) for model in models)
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 64))
    own = torch.optim.Adam(model.parameters())
    for _ in range(3):
        own.zero_grad()
        (model(x) - left).square().mean().backward()
        own.step()
    models.append(model)
""",
    "layers that are added": """\
for i in range(8):
    net.append(nn.Linear(64, 64))
    opt.add_param_group({'params': list(net[-1].parameters())})
    step(torch.randn(64, 64))
""",
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
    accused = {GROWTH, COLLECTED, COPIED, UNUSED, *(program.cause for program in PROGRAMS.values())}
    assert not names & accused


RUNNING_MEAN = """\
scale = nn.Parameter(torch.zeros(()))
factor = scale.exp()
mean = torch.zeros(())
for _ in range(12):
    out = step(torch.randn(8, 64)) * factor
    mean = 0.9 * mean + 0.1 * out.mean()
"""


def test_a_number_with_a_graph_of_many_steps_is_named(measured):
    """Also where this graph has no tensors: a product with a Python number keeps none."""
    said = measured(RUNNING_MEAN).growing_graph
    assert "`mean`" in said and "12 steps" in said
    detached = RUNNING_MEAN.replace("out.mean()", "out.mean().item()")
    assert measured(detached).growing_graph == ""


def test_a_list_is_not_told_to_detach_itself(measured):
    said = measured(
        """\
losses = []
for _ in range(8):
    losses.append((step(torch.randn(512, 64)) - 1).square().sum())
"""
    )
    remedy = said.causes[0].remedy
    assert "`losses`" in remedy and "x.detach()" in remedy and "losses.detach()" not in remedy


def test_a_state_of_a_module_is_no_optimizers(measured):
    said = measured(
        """\
net.state = {'hidden': []}
for _ in range(8):
    net.state['hidden'].append(step(torch.randn(512, 64)).detach())
"""
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
    text = """\
for _ in range(6):
    loss = net(torch.randn(512, 64)).square().mean()
    opt.zero_grad()
    loss.backward(create_graph=True)
    opt.step()
    'let go'
"""
    before = measured(text)
    assert before.causes[0].name == "Gradients keep graphs of their own"
    assert "torch.autograd.grad(" in before.causes[0].remedy
    after = measured(text.replace("'let go'", "opt.zero_grad(); del loss"))
    assert after.peak < before.peak
    assert all("set p.grad to None" not in cause.remedy for cause in after.causes)
