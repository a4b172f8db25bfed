PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin

.PHONY: train test lint clean

# Trains the default recipe on the source text of Python's standard library. ARGS="--train.steps 100" changes it.
train: $(VENV)/train.stamp
	$(BIN)/functitan train debug $(ARGS)

# ARGS="-m slow", ARGS="tests/test_jit.py" and so on choose among the tests.
test: $(VENV)/test.stamp
	$(BIN)/python -m pytest $(ARGS)

lint: $(VENV)/test.stamp
	$(BIN)/ruff check .

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/train.stamp: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[tensorboard]'
	@touch $@

$(VENV)/test.stamp: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[test]'
	@touch $@ $(VENV)/train.stamp

clean:
	rm -rf $(VENV) build *.egg-info
