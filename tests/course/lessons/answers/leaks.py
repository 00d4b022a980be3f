"""Answers to the leaks of lessons 01, 03, 05 and 06 as people give them: a line and a script."""

import copy
import gc

import torch
import torch.nn.functional as F

from gradmem_lib import accumulate_gradients, split
from gradmem_lib.course.lessons.lesson_05.exercises_leak import train_on

RIGHT, WRONG = {}, {}


def answer(line, script):
    return lambda: (line, script)


# 1.9: a history


def history_of(keep, finish=list, before=None, after=None):
    """The lesson's loop; ``keep`` makes an entry, and ``before`` and ``after`` stand around it."""

    def script(model, optimizer, batches):
        history = []
        for x, y in batches:
            if before:
                before(history)
            out = model(x)
            loss = F.mse_loss(out, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            history.append(keep(loss, out))
            if after:
                del out, loss
                after()
        return finish(history)

    return script


def in_two_lists(model, optimizer, batches):
    losses, means = [], []
    for x, y in batches:
        out = model(x)
        loss = F.mse_loss(out, y)
        losses.append(float(loss))
        means.append(float(out.detach().mean()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return list(zip(losses, means, strict=True))


def without_graph(model, optimizer, batches):
    history = torch.zeros(len(batches), 2)
    for i, (x, y) in enumerate(batches):
        optimizer.zero_grad()
        out = model(x)
        loss = F.mse_loss(out, y)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            history[i, 0], history[i, 1] = loss, out.mean()
    return history.tolist()


def numbers(loss, out):
    return loss.item(), out.mean().item()


def to_numbers(history):
    return [(float(loss), float(out.mean())) for loss, out in history]


def half_a_batch(model, optimizer, batches):
    return history_of(lambda loss, out: (loss, out), to_numbers)(
        model, optimizer, [(x[:128], y[:128]) for x, y in batches]
    )


def under_no_grad(model, optimizer, batches):
    with torch.no_grad():
        return history_of(numbers)(model, optimizer, batches)


def never_zeroed(model, optimizer, batches):
    history = []
    for x, y in batches:
        out = model(x)
        loss = F.mse_loss(out, y)
        loss.backward()
        optimizer.step()
        history.append(numbers(loss, out))
    return history


def collected_history(model, optimizer, batches):
    history = []
    for x, y in batches:
        out = model(x)
        loss = F.mse_loss(out, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        history.append((loss, out))
        gc.collect()
    return to_numbers(history)


def emptied_history(model, optimizer, batches):
    history = []
    for x, y in batches:
        out = model(x)
        loss = F.mse_loss(out, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        history.append((loss, out))
        torch.cuda.empty_cache()
    return to_numbers(history)


RIGHT["1.9"] = {
    "numbers": answer(9, history_of(numbers)),
    "two lists": answer(9, in_two_lists),
    "a table of numbers": answer(torch.tensor(9), without_graph),
    "numbers, and a collection": lambda: [9, history_of(numbers, after=gc.collect)],
}
DETACHED = history_of(lambda loss, out: (loss.detach(), out.detach()), to_numbers)
WRONG["1.9"] = {
    "detached": (answer(9, DETACHED), r"detach\(\) and del .* \.item\(\)"),
    "on the host": (
        answer(9, history_of(lambda loss, out: (loss.cpu(), out.detach().cpu()), to_numbers)),
        r"the list still holds the tensor",
    ),
    "collected": (answer(9, collected_history), r"gc\.collect\(\) frees what nothing refers to"),
    "emptied": (answer(9, emptied_history), r"empty_cache\(\) gives back"),
    "the line that makes it": (answer(4, history_of(numbers)), "line 4 makes the outputs"),
    "the last line": (answer(10, history_of(numbers)), "after the last batch"),
    "a line that does nothing": (answer(3, history_of(numbers)), "line 3 keeps no tensor"),
    "in numpy": (
        answer(
            9, history_of(lambda loss, out: (loss.item(), out.detach().numpy().copy()), to_numbers)
        ),
        "arrays",
    ),
    "half the rows": (answer(9, half_a_batch), "the updates are others|trains"),
    "no gradients": (answer(9, under_no_grad), "no_grad around a training step"),
    "the loss alone": (
        answer(9, history_of(lambda loss, out: (loss.item(), out), to_numbers)),
        "one of the pair is a number",
    ),
    "forgotten": (
        answer(9, history_of(numbers, before=lambda history: history.clear())),
        "only the last|something else than the script|length",
    ),
    "never zeroed": (answer(9, never_zeroed), "weights at the end are not those"),
    "called": (lambda: (9, history_of(numbers)(*_arguments())), "must be a function"),
    "the function alone": (lambda: history_of(numbers), "two things"),
    "turned round": (lambda: (history_of(numbers), 9), "the line comes first"),
}


def _arguments():
    from gradmem_lib.course import history_setting

    return history_setting(2)


# 3.10: a window


def window_of(figure, size=8, *, last=False, end=float, each=False):
    def script(model, optimizer, batch):
        entropy, rows = 0.0, len(batch[1])
        for x, y in split(batch, size):
            logits = model(x)
            loss = F.cross_entropy(logits, y, reduction="sum") / rows
            loss.backward()
            new = figure(logits) / rows
            entropy = new if last else entropy + new
            if each:
                optimizer.step()
                optimizer.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
        return end(entropy)

    return script


def entropy_of(logits):
    p = logits.softmax(-1)
    return -(p * p.log()).sum()


def entropy_without_graph(logits):
    with torch.no_grad():
        return torch.distributions.Categorical(logits=logits).entropy().sum()


def by_the_library(model, optimizer, batch):
    entropies = []

    def loss_and_count(micro):
        logits = model(micro[0])
        entropies.append(entropy_of(logits.detach()).item())
        return F.cross_entropy(logits, micro[1], reduction="sum"), len(micro[1])

    accumulate_gradients(list(split(batch, 8)), loss_and_count, total_items=len(batch[1]))
    optimizer.step()
    optimizer.zero_grad()
    return sum(entropies) / len(batch[1])


def second_pass(model, optimizer, batch):
    """The entropy first, without gradients; then the training."""
    rows = len(batch[1])
    with torch.no_grad():
        entropy = sum(entropy_of(model(x)).item() for x, _ in split(batch, 8)) / rows
    for x, y in split(batch, 8):
        (F.cross_entropy(model(x), y, reduction="sum") / rows).backward()
    optimizer.step()
    optimizer.zero_grad()
    return entropy


def deleted(model, optimizer, batch):
    entropy, rows = 0.0, len(batch[1])
    for x, y in split(batch, 8):
        logits = model(x)
        loss = F.cross_entropy(logits, y, reduction="sum") / rows
        loss.backward()
        p = logits.softmax(-1)
        entropy = entropy - (p * p.log()).sum() / rows
        del p, logits, loss
        gc.collect()
    optimizer.step()
    optimizer.zero_grad()
    return entropy.detach().item()


def one_backward(model, optimizer, batch):
    total, entropy, rows = 0.0, 0.0, len(batch[1])
    for x, y in split(batch, 8):
        logits = model(x)
        total = total + F.cross_entropy(logits, y, reduction="sum") / rows
        entropy += entropy_of(logits.detach()).item() / rows
    total.backward()
    optimizer.step()
    optimizer.zero_grad()
    return entropy


def no_gradients(model, optimizer, batch):
    with torch.no_grad():
        return window_of(entropy_of)(model, optimizer, batch)


RIGHT["3.10"] = {
    "item": answer(8, window_of(lambda logits: entropy_of(logits).item())),
    "detach at the sum": answer(8, window_of(lambda logits: entropy_of(logits).detach())),
    "no_grad for the log": answer(8, window_of(entropy_without_graph)),
    "the library's loop": answer(8, by_the_library),
    "two passes": answer(8, second_pass),
}
WRONG["3.10"] = {
    "detach at the end": (
        answer(8, window_of(entropy_of, end=lambda sum: sum.detach().item())),
        "the sum still has a graph",
    ),
    "deleted and collected": (answer(8, deleted), r"gc\.collect\(\)|still has a graph"),
    "smaller pieces": (answer(8, window_of(entropy_of, 2)), "smaller|still has a graph"),
    "the last alone": (
        answer(8, window_of(lambda logits: entropy_of(logits).item(), last=True)),
        "only the last micro-batch",
    ),
    "a step each": (
        answer(8, window_of(lambda logits: entropy_of(logits).item(), each=True)),
        "after each micro-batch|weights at the end",
    ),
    "one backward": (answer(8, one_backward), "graph|too many"),
    "the loss's line": (answer(5, window_of(entropy_without_graph)), "freed in the next line"),
    "backward": (answer(6, window_of(entropy_without_graph)), "as it should"),
    "the probabilities": (answer(7, window_of(entropy_without_graph)), "take their place"),
    "the end": (answer(11, window_of(entropy_without_graph)), "the window has ended"),
    "no gradients": (answer(8, no_gradients), "no_grad around the forward"),
    "not normalized": (
        answer(8, window_of(lambda logits: entropy_of(logits).item() * 8)),
        "something else|8",
    ),
}


# 5.11: a checkpoint


def resumes(load=torch.load, *, drop="before", read="step"):
    def script(model, optimizer, file, batches):
        saved = load(file)
        model.load_state_dict(saved["model"])
        if drop == "weights":
            del saved["model"]
        optimizer.load_state_dict(saved["optimizer"])
        if drop == "states":
            del saved["optimizer"]
        start = saved[read] if read else 0
        if drop == "before":
            del saved
        losses = train_on(model, optimizer, batches[start:])
        if drop == "after":
            del saved
        return losses

    return script


def in_a_function(model, optimizer, file, batches):
    def load():
        saved = torch.load(file)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        return saved["step"]

    return train_on(model, optimizer, batches[load() :])


def popped(model, optimizer, file, batches):
    saved = torch.load(file)
    model.load_state_dict(saved.pop("model"))
    optimizer.load_state_dict(saved.pop("optimizer"))
    return train_on(model, optimizer, batches[saved["step"] :])


def collected(model, optimizer, file, batches):
    saved = torch.load(file)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    gc.collect()
    return train_on(model, optimizer, batches[saved["step"] :])


def copied(model, optimizer, file, batches):
    saved = torch.load(file)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))
    return train_on(model, optimizer, batches[saved["step"] :])


def assigned(model, optimizer, file, batches):
    saved = torch.load(file)
    model.load_state_dict(saved["model"], assign=True)
    optimizer.load_state_dict(saved["optimizer"])
    start = saved["step"]
    del saved
    return train_on(model, optimizer, batches[start:])


def weights_alone(model, optimizer, file, batches):
    saved = torch.load(file)
    model.load_state_dict(saved["model"])
    start = saved["step"]
    del saved
    return train_on(model, optimizer, batches[start:])


RIGHT["5.11"] = {
    "del before the training": answer(2, resumes()),
    "the weights alone": answer(2, resumes(drop="weights")),
    "a function of its own": answer(2, in_a_function),
    "popped": answer(2, popped),
}
ON_THE_HOST = resumes(lambda file: torch.load(file, map_location="cpu"), drop="")
WRONG["5.11"] = {
    "on the host, and kept": (answer(2, ON_THE_HOST), "still there while the model trains"),
    "del after the training": (answer(2, resumes(drop="after")), "before the training"),
    "del of the states": (answer(2, resumes(drop="states")), "very tensors"),
    "collected": (answer(2, collected), r"gc\.collect\(\)"),
    "copied once more": (answer(2, copied), "still there|too many"),
    "assigned": (answer(2, assigned), "assign=True"),
    "no states": (answer(2, weights_alone), "AdamW begins with moments of zero"),
    "from the start": (answer(2, resumes(read="")), "first batch again"),
    "line 3": (answer(3, resumes()), "copies the loaded weights"),
    "line 4": (answer(4, resumes()), "very tensors"),
    "line 5": (answer(5, resumes()), "needs a number"),
    "as text": (answer("saved = torch.load(file)", resumes()), "whole number"),
}


# 6.7: an evaluation


def evaluates(keep, *, size=16, mean=None, graph=False, after=None, back=True):
    def script(model, batches):
        model.eval()
        kept, labels = [], []
        with torch.set_grad_enabled(graph):
            for x, y in batches:
                for part in x.split(size):
                    logits = model(part)
                    kept.append(keep(logits))
                    if after:
                        del logits
                        after()
                labels.append(y)
        if back:
            model.train()
        if mean:
            return mean(kept, labels)
        found = torch.cat(kept)
        found = found.argmax(-1) if found.ndim == 2 else found
        return (found == torch.cat(labels)).float().mean().item()

    return script


def counted(model, batches):
    model.eval()
    hits = rows = 0
    with torch.inference_mode():
        for x, y in batches:
            hits += (model(x).max(dim=-1).indices == y).sum().item()
            rows += len(y)
    model.train()
    return hits / rows


def to_lists(model, batches):
    was = model.training
    model.eval()
    hits = []
    with torch.no_grad():
        for x, y in batches:
            hits += (model(x).argmax(-1) == y).tolist()
    model.train(was)
    return sum(hits) / len(hits)


def means_of_batches(kept, labels):
    means = [(a == b).float().mean() for a, b in zip(kept, labels, strict=True)]
    return torch.stack(means).mean().item()


def of_arrays(kept, labels):
    found = torch.cat([torch.from_numpy(logits.argmax(-1)) for logits in kept])
    return (found == torch.cat(labels)).float().mean().item()


def argmax(logits):
    return logits.argmax(-1)


def half_the_data(model, batches):
    return evaluates(argmax)(model, batches[: len(batches) // 2])


RIGHT["6.7"] = {
    "argmax": answer(7, evaluates(argmax)),
    "counted": answer(7, counted),
    "lists": answer(7, to_lists),
    "a whole float": answer(7.0, counted),
    "smaller batches too": answer(7, evaluates(argmax, size=4)),
}
WRONG["6.7"] = {
    "detached": (
        answer(7, evaluates(lambda logits: logits.detach())),
        "1,000 numbers of every row",
    ),
    "on the host": (answer(7, evaluates(lambda logits: logits.cpu())), "1,000 numbers of every"),
    "in bf16": (answer(7, evaluates(lambda logits: logits.bfloat16())), "still kept"),
    "smaller batches": (answer(7, evaluates(lambda logits: logits, size=2)), "smaller|1,000"),
    "emptied": (
        answer(7, evaluates(lambda logits: logits, after=gc.collect)),
        r"1,000 numbers|gc\.collect\(\)",
    ),
    "probabilities": (answer(7, evaluates(lambda logits: logits.softmax(-1))), "1,000 numbers"),
    "with a graph": (answer(7, evaluates(lambda logits: logits, graph=True)), "no_grad|1,000"),
    "mean of means": (answer(7, evaluates(argmax, mean=means_of_batches)), "means"),
    "in numpy": (
        answer(7, evaluates(lambda logits: logits.numpy().copy(), mean=of_arrays)),
        "arrays",
    ),
    "half the data": (answer(7, half_the_data), "first batches|something else"),
    "left in eval": (answer(7, evaluates(argmax, back=False)), "eval mode"),
    "line 6": (answer(6, counted), "take their place"),
    "line 8": (answer(8, counted), "kept before"),
    "line 4": (answer(4, counted), "no graph is recorded"),
    "line 99": (answer(99, counted), "line 99 keeps no tensor"),
}
