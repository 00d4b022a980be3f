"""The widgets in a real browser: a plot that moves while its cell runs, then stays as a picture
that can be explored; an explorer that answers.
"""

from __future__ import annotations

import json

import nbformat
import pytest
import torch
from notebooks.browser import Lab, Notebook, assert_explorer_reacts, notebook_of, shot
from support.nightly import each

from gradmem_lib import MemoryTracker
from gradmem_lib.view import timeline as stills
from gradmem_lib.view.blocks import encode_blocks
from gradmem_lib.view.live import APPEARANCE, drawing, encode_frame

CANVAS = "document.querySelector('canvas.gm-canvas')"

MODEL = """
import torch
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
from gradmem_lib import MemoryTracker

torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(hidden_size=128, intermediate_size=344, num_hidden_layers=4,
                                     num_attention_heads=4, vocab_size=2048, use_cache=False))
optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
tokens = torch.randint(0, 2048, (4, 128))

def train(enough=lambda: False):
    while True:
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if enough():
            return
"""
TRAIN = """
with MemoryTracker(model, optimizer, budget="64 MiB", title="a tiny Llama") as tracker:
    train({enough})
"""
PRINT = """
from gradmem_lib.units import format_bytes
parts = reversed(tracker.peak.by_category.values())
print(format_bytes(tracker.peak.total), *(format_bytes(n) for n in parts), sep=", ")
"""
LARGEST = """
weights = [holder for holder in tracker.holders() if holder.category == "parameters"]
shape = " × ".join(map(str, weights[0].shape))
print(f"{weights[0].nbytes:,}", weights[0].module, shape, sep="; ")
"""
RANKS = """
from gradmem_lib.course import run_ranks

def both(enough):
    import torch.distributed as dist
    def agreed():
        stop = torch.tensor(enough())
        dist.broadcast(stop, 0)
        return stop
    with MemoryTracker(model, optimizer, title="two ranks"):
        train(agreed)

run_ranks(both, Path("seen_enough").exists)
"""
GROWS = """
import torch
from gradmem_lib import BudgetExceeded, MemoryTracker

net = torch.nn.Linear(64, 64)
def train():
    history = []
    while True:
        history.append(net(torch.randn(64, 64)))
        history[-1].mean().backward()

try:
    with MemoryTracker(net, budget="256 KiB") as tracker:
        train()
except BudgetExceeded:
    pass
"""
GROWING = """
from gradmem_lib import format_bytes
from gradmem_lib.measure.timeline import TOTAL
at_the_peak = tracker.timeline.growing[tracker.timeline.rows[:, TOTAL].argmax()]
print(format_bytes(at_the_peak.sum()))
"""
SEEN = "seen_enough"  # a file that ends the training of live.ipynb
NOTEBOOKS = {
    "live.ipynb": [MODEL, TRAIN.format(enough=f"Path({SEEN!r}).exists")],
    "ranks.ipynb": [MODEL, RANKS],
    "endless.ipynb": [MODEL, TRAIN.format(enough="")],
    "after.ipynb": [
        MODEL,
        TRAIN.format(enough="iter([False, False, True]).__next__"),
        "tracker.show()",
        PRINT,
    ],
    "instrument.ipynb": [
        MODEL,
        TRAIN.format(enough="iter([False, False, True]).__next__"),
        "tracker.show()",
        LARGEST,
    ],
    "grows.ipynb": [GROWS, GROWING],
    "explorer.ipynb": ["from gradmem_lib.course.learner.explorer import explore\nexplore()"],
    "guess.ipynb": ["from gradmem_lib import predict_first\npredict_first('0.a', 'How many?');"],
    "schedule.ipynb": ["from gradmem_lib import explore_schedule\nexplore_schedule()"],
}


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    folder = tmp_path_factory.mktemp("notebooks")
    for name, cells in NOTEBOOKS.items():
        notebook = notebook_of(*cells)
        notebook.cells.insert(0, nbformat.v4.new_markdown_cell("# A heading"))
        nbformat.write(notebook, folder / name)
    with Lab(folder) as running:
        yield running


def assert_finished_picture(output) -> None:
    """The finished picture is drawn by its own script, and a still picture stands ready."""
    output.locator(".gm-explorable canvas.gm-canvas[data-recording=false]").first.wait_for()
    assert output.locator("canvas[data-recording=true]").count() == 0
    image = output.locator(".gm-still img")
    assert image.get_attribute("src").startswith("data:image/png;base64,")
    assert image.evaluate("(img) => img.decode().then(() => img.naturalWidth)") > 600
    assert not image.is_visible()


def test_a_notebook_that_never_gets_ready_is_an_error_not_a_wait(browser, lab):
    with pytest.raises(RuntimeError, match=r"no_such\.ipynb was not ready after 2 s"):
        Notebook(browser, lab, "no_such.ipynb", ready_within=2)


@pytest.mark.parametrize("theme", each(2, ["Dark", "Light"]))
def test_plot_moves_while_the_cell_runs_then_becomes_a_picture(browser, lab, theme):
    with Notebook(browser, lab, "live.ipynb", scale=1.5) as notebook:
        notebook.theme(f"JupyterLab {theme}")
        notebook.start()
        # The cell trains until it has shown five different pictures, however long a busy machine
        # takes to draw them.
        notebook.watch(until=lambda pictures: pictures >= 5)
        shot(notebook, f"live_{theme.lower()}")
        height = notebook.output(1).bounding_box()["height"]
        assert notebook.running()
        (lab.folder / SEEN).touch()
        notebook.watch()
        (lab.folder / SEEN).unlink()
        assert_finished_picture(notebook.output(1))
        assert notebook.output(1).bounding_box()["height"] == height, "the page moves at the end"
        shot(notebook, f"after_{theme.lower()}")
        assert notebook.errors == []


def test_two_ranks_move_side_by_side_on_one_scale(browser, lab):
    with Notebook(browser, lab, "ranks.ipynb", scale=1.5) as notebook:
        notebook.start()
        notebook.watch(until=lambda pictures: pictures >= 5)
        views = notebook.output(1).locator(".gm-small")
        assert [name.strip() for name in views.locator(".gm-title").all_inner_texts()] == [
            "rank 0, two ranks",
            "rank 1, two ranks",
        ]
        left, right = (view.bounding_box() for view in views.all())
        assert (
            left["y"] == right["y"]
            and left["x"] + left["width"] <= right["x"]
            and left["width"] > 200
        )
        frames = views.locator("canvas.gm-canvas")
        assert all(int(canvas.get_attribute("data-frames")) >= 2 for canvas in frames.all())
        views.last.locator("tfoot").scroll_into_view_if_needed()
        shot(notebook, "ranks_live")
        assert notebook.running()
        (lab.folder / SEEN).touch()
        notebook.watch()
        (lab.folder / SEEN).unlink()
        assert_finished_picture(notebook.output(1))
        notebook.output(1).scroll_into_view_if_needed()
        shot(notebook, "ranks_after")
        assert notebook.failed() == 0 and notebook.errors == []


def test_an_interrupted_cell_ends_in_a_picture_and_a_restart_ends_the_recording(browser, lab):
    with Notebook(browser, lab, "endless.ipynb") as notebook:
        notebook.start()
        notebook.watch(until=lambda pictures: pictures >= 2)
        notebook.command("notebook:interrupt-kernel")
        notebook.watch()
        assert_finished_picture(notebook.output(1))
        words = notebook.output(1).inner_text()
        assert "KeyboardInterrupt" in words and "train(" in words
        assert "site-packages" not in words and "gradmem_lib" not in words

        notebook.start()
        notebook.watch(until=lambda pictures: pictures >= 2)
        notebook.page.evaluate(
            "() => jupyterapp.shell.currentWidget.sessionContext.restartKernel()"
        )
        notebook.output(1).locator("canvas.gm-canvas[data-recording=false]").wait_for()
        assert not notebook.output(1).locator(".gm-dot").is_visible()
        assert "the kernel has ended" in notebook.output(1).inner_text()
        shot(notebook, "restarted")


def test_a_guess_is_typed_recorded_and_kept_in_the_file(browser, lab):
    with Notebook(browser, lab, "guess.ipynb") as notebook:
        notebook.run_all()
        field = notebook.output(0).locator("input")
        field.fill("3 KiB")
        field.press("Enter")
        notebook.output(0).get_by_text("recorded: 3.00 KiB").wait_for()
        outputs = """() => jupyterapp.shell.currentWidget.content.widgets
          .filter((cell) => cell.model.type === 'code')
          .flatMap((cell) => cell.model.outputs.toJSON())"""
        [output] = notebook.page.evaluate(outputs)
        assert set(output["data"]) == {"text/plain", "text/html"}
        assert "Your guess: 3.00 KiB" in output["data"]["text/html"]
        # The output was replaced under the reader, who goes on typing.
        notebook.page.wait_for_function("document.activeElement.tagName === 'INPUT'")
        assert notebook.errors == []


def test_keyboard_and_mouse_read_the_timeline(browser, lab):
    with Notebook(browser, lab, "after.ipynb", width=900) as notebook:
        notebook.run_all()
        output = notebook.output(2)
        canvas, spoken = output.locator("canvas.gm-canvas"), output.locator(".gm-read")
        canvas.wait_for()
        assert "Peak" in canvas.get_attribute("aria-label")
        shown = [
            output.locator(".gm-figure b").first.inner_text(),
            *output.locator("tbody td").all_inner_texts(),
        ]
        assert ", ".join(shown) == notebook.output(3).inner_text().strip()
        figure = output.locator(".gm-figure").first
        assert figure.evaluate("node => node.scrollWidth <= node.clientWidth"), "nothing is cut"
        canvas.focus()
        active = "() => jupyterapp.shell.currentWidget.content.activeCellIndex"
        cell, said = notebook.page.evaluate(active), []
        for key in ("Home", "ArrowRight", "p", "End", "ArrowLeft"):
            notebook.page.keyboard.press(key)
            said.append(spoken.inner_text())
            assert said[-1].startswith("operation ")
        assert len(set(said)) == len(said)
        # JupyterLab must not have taken the keys to move to another cell.
        assert notebook.page.evaluate(active) == cell
        peak = output.locator(".gm-figure b").first.inner_text()
        assert f": {peak}, of which" in said[2]
        assert spoken.get_attribute("aria-live") == "polite"
        shot(notebook, "keyboard")
        notebook.page.keyboard.press("Escape")
        assert not spoken.inner_text().startswith("operation ")
        box = canvas.bounding_box()
        notebook.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        assert spoken.inner_text().startswith("operation ")
        a_change_of_theme_redraws(notebook, canvas)


def a_change_of_theme_redraws(notebook, canvas) -> None:
    in_its_colours = f"() => {CANVAS}.dataset.ink === getComputedStyle({CANVAS}).color"
    notebook.theme("JupyterLab Light")
    notebook.page.wait_for_function(in_its_colours)
    light = canvas.get_attribute("data-ink")
    notebook.theme("JupyterLab Dark")
    notebook.page.wait_for_function(f"(before) => {CANVAS}.dataset.ink !== before", arg=light)
    notebook.page.wait_for_function(in_its_colours)
    canvas.scroll_into_view_if_needed()
    shot(notebook, "shown_dark")
    # A theme may also change colours alone, and move nothing.
    notebook.page.evaluate(
        "document.body.style.setProperty('--jp-ui-font-color1', 'rgb(1, 200, 3)')"
    )
    notebook.page.wait_for_function(f"() => {CANVAS}.dataset.ink === 'rgb(1, 200, 3)'")


def test_a_finished_picture_is_an_instrument(browser, lab):
    """Its script has been brought by another cell."""
    with Notebook(browser, lab, "instrument.ipynb", width=900, scale=1.5) as notebook:
        notebook.theme("JupyterLab Light")
        notebook.run_all()
        output = notebook.output(2)
        canvas = output.locator("canvas[data-drawn]")
        canvas.wait_for()
        canvas.scroll_into_view_if_needed()
        keys_read_each_block_of_a_moment_and_pin_one(notebook, output, canvas)
        the_pointer_names_a_byte_zooms_and_pans(notebook, output, canvas)
        a_group_stands_alone_and_the_same_bytes_regroup(notebook, output, canvas)
        assert notebook.errors == []


def keys_read_each_block_of_a_moment_and_pin_one(notebook, output, canvas) -> None:
    assert "function" not in output.locator("script").inner_text(), "the script stands once"
    press, spoken = notebook.page.keyboard.press, output.locator(".gm-block")
    largest_weight = notebook.output(3).inner_text().strip().split("; ")
    canvas.focus()
    press("p")
    heard = []  # from the foot of the stack, where the weights are, the largest first
    for _ in range(5):
        press("ArrowUp")
        heard.append(spoken.inner_text())
    assert all(word in heard[0] for word in largest_weight)
    assert len(set(heard)) == len(heard)
    press("ArrowDown")
    assert spoken.inner_text() == heard[-2]
    press("Enter")
    press("End")
    assert "Pinned: " in output.locator(".gm-read").inner_text()
    shot(notebook, "instrument_pinned")
    press("Escape")
    assert canvas.get_attribute("data-pinned") == ""


def the_pointer_names_a_byte_zooms_and_pans(notebook, output, canvas) -> None:
    mouse, box = notebook.page.mouse, canvas.bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + 0.8 * box["height"]
    mouse.move(x - 1, y)
    mouse.move(x, y)
    named = output.locator(".gm-tip b").inner_text()
    assert named.split(" ")[0] in output.locator(".gm-block").inner_text()
    mouse.wheel(0, -600)
    first, last = view_of(canvas)
    mouse.down()
    mouse.move(x - 80, y, steps=4)
    mouse.up()
    assert view_of(canvas)[0] > first and view_of(canvas)[1] > last
    shot(notebook, "instrument_zoomed")
    mouse.dblclick(x, y)
    assert canvas.get_attribute("data-view") == ""
    mouse.click(box["x"] + 0.3 * box["width"], box["y"] + 24)  # a phase in the strip
    assert view_of(canvas)[1] < last
    notebook.page.keyboard.press("0")
    assert canvas.get_attribute("data-view") == ""


def a_group_stands_alone_and_the_same_bytes_regroup(notebook, output, canvas) -> None:
    row = output.locator("tbody tr").nth(2)
    name = row.locator("th").inner_text()
    for key, alone in (("Enter", name), (" ", "")):
        row.press(key)
        assert canvas.get_attribute("data-alone") == alone
    row.click()
    shot(notebook, "instrument_alone")
    total = output.locator("tfoot td").first.inner_text()
    for by in ("module", "line", "holder"):
        output.locator(f"[data-by={by}]").click()
        assert canvas.get_attribute("data-by") == by
        assert output.locator("tfoot td").first.inner_text() == total
        shot(notebook, f"instrument_by_{by}")
    canvas.focus()
    notebook.page.keyboard.press("g")
    assert canvas.get_attribute("data-by") == "category"


def view_of(canvas) -> list[int]:
    """The first and the last operation that a zoomed picture shows."""
    return [int(number) for number in canvas.get_attribute("data-view").split()]


def test_what_grows_is_read_at_the_peak(browser, lab):
    """Not after it: the error frees what the function has kept."""
    with Notebook(browser, lab, "grows.ipynb") as notebook:
        notebook.run_all()
        growing = notebook.output(0).locator(".gm-growing td").inner_text()
        assert growing == notebook.output(1).inner_text().strip() != "0 B"


def test_explorer_reacts_to_a_slider(browser, lab):
    with Notebook(browser, lab, "explorer.ipynb", scale=1.5) as notebook:
        notebook.theme("JupyterLab Light")
        notebook.run_all()
        shot(notebook, "explorer_light")
        assert_explorer_reacts(notebook)
        notebook.panel.locator(".widget-dropdown select").first.select_option("Llama-2-7B")
        notebook.panel.locator(".gm-exceeds").wait_for()
        notebook.theme("JupyterLab Dark")
        shot(notebook, "explorer_dark")
        assert notebook.errors == []


def test_schedule_explorer_reacts_to_the_keyboard(browser, lab):
    with Notebook(browser, lab, "schedule.ipynb", scale=1.5) as notebook:
        notebook.theme("JupyterLab Light")
        notebook.run_all()
        assert_explorer_reacts(notebook, to="segment")
        shot(notebook, "schedule_light")
        notebook.theme("JupyterLab Dark")
        shot(notebook, "schedule_dark")
        assert notebook.errors == []


def test_the_moving_and_the_still_picture_are_as_wide(browser):
    """``edgesOf`` in run.js is the rule of ``edges_of``."""
    page = browser.new_page()
    for run in ([0], [0, 0], [0, 0, 1, 3, 9, 9], [5, 300, 300, 300, 1000], [*range(0, 4000, 3)]):
        drawn = page.evaluate(f"(() => {{ {drawing()}; return edgesOf({json.dumps(run)}); }})()")
        assert drawn == pytest.approx(stills.edges_of(run).tolist())
    page.close()


READ = """async ([frame, packed, appearance]) => {
  const bytes = (list) => Uint8Array.from(list);
  const run = await withBlocks(decodeFrame(new DataView(bytes(frame).buffer), 6), bytes(packed));
  const placesOf = (groups) => {
    const places = (i) => stackAt(groups, i).map(({ low, bytes }) => [low, bytes]);
    return Array.from({ length: run.n }, (_, i) => places(i));
  };
  const whole = GROUPINGS.map((by) => placesOf(arrange(run, by, appearance)));
  const one = (name) => placesOf(arrangeOne(run, name, "category", appearance));
  return [whole, appearance.names.map((name) => [name, one(name)])];
}"""


@pytest.mark.parametrize("grows", [False, True])
def test_all_groups_and_one_alone_have_the_bytes_of_each_moment_without_a_gap(browser, grows):
    net = torch.nn.Sequential(torch.nn.Linear(30, 70), torch.nn.Tanh(), torch.nn.Linear(70, 9))
    adam = torch.optim.Adam(net.parameters(), foreach=False)
    kept = []
    with MemoryTracker(net, adam) as tracker:
        for _ in range(8):
            y = net(torch.ones(1100, 30))
            if grows:
                kept.append(y)
            y.square().sum().backward()
            adam.step()
            adam.zero_grad()
    timeline = tracker.timeline
    assert (timeline.growing is not None) == grows
    frame, blocks = encode_frame(timeline, None, None, True), encode_blocks(timeline)
    script = f"(given) => {{ {drawing()}; return ({READ})(given); }}"
    page = browser.new_page()
    page.goto("about:blank")
    whole, alone = page.evaluate(script, [list(frame), list(blocks), APPEARANCE])
    assert len(whole) == 4
    stated = [(moments, timeline.totals) for moments in whole]
    stated += [(moments, timeline.by_category[name]) for name, moments in alone]
    for moments, totals in stated:
        assert [sum(nbytes for _, nbytes in stack) for stack in moments] == list(totals)
        for stack in moments:
            ends = [0, *(low + nbytes for low, nbytes in stack)]
            assert [low for low, _ in stack] == ends[:-1]
    page.close()
