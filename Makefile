# Every target works on a fresh machine with Python 3.11+ and git; each installs what it needs first.
PYTHON ?= python3
BIN := .venv/bin
# One thread per rank: processes, not threads, are what runs in parallel here.
export OMP_NUM_THREADS := 1

.PHONY: install demo test check bench gpu docs clean

install: .venv/.installed

.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[data]" --group dev
	touch $@

# The demo needs none of the test tools, so that a newcomer waits less.
.venv/.runnable:
	test -e .venv/.installed || $(PYTHON) -m venv .venv
	test -e .venv/.installed || $(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[data]"
	touch $@

demo: .venv/.runnable
	$(BIN)/anabranch demo

# Three at a time on two cores: most tests wait for their ranks now and then, and a rank has one
# thread. Compiled tests are kept, whatever the environment says: asserts take each worker ten
# seconds to compile.
test: install
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --numprocesses 3 --dist worksteal

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/codespell src tests docs examples benchmarks README.md CHANGELOG.md CONTRIBUTING.md

bench: install
	$(BIN)/python -m benchmarks.planners
	$(BIN)/python -m benchmarks.runtime
	$(BIN)/python -m benchmarks.asynchronous
	$(BIN)/python -m benchmarks.memory

# With a Python whose torch sees a GPU, as `make install` takes torch's CPU build; without one it says
# what would run.
gpu:
	@if $(PYTHON) -c "import torch; assert torch.cuda.is_available()" 2>/dev/null; \
	then PYTHONPATH=src $(PYTHON) -m benchmarks.gpu; \
	else $(MAKE) install && $(BIN)/python -m benchmarks.gpu; fi

docs: install
	$(BIN)/python -m pip install --quiet --group docs
	$(BIN)/sphinx-build -W --keep-going -b html docs docs/_build/html

clean:
	rm -rf .venv build dist docs/_build runs .pytest_cache .mypy_cache .ruff_cache .hypothesis
