PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin

.PHONY: train test lint clean

# Trains the default recipe on the source text of Python's standard library. ARGS="--train.steps 100" changes it.
train: $(VENV)/train.stamp
	$(BIN)/functitan train debug $(ARGS)

# ARGS="tests/test_jit.py -k donat" and so on choose among the tests.
test: $(VENV)/test.stamp
	$(BIN)/python -m pytest $(ARGS)

lint: $(VENV)/test.stamp
	$(BIN)/ruff check .

# The stamp says that the environment is whole: a venv that failed halfway is made again.
$(VENV)/venv.stamp:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "functitan needs Python 3.11 or newer; give one with: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -m venv --clear $(VENV) \
		|| { echo "Python's venv is missing (on Debian: apt-get install python3-venv)"; exit 1; }
	@touch $@

$(VENV)/train.stamp: pyproject.toml constraints.txt | $(VENV)/venv.stamp
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[tensorboard]'
	@touch $@

$(VENV)/test.stamp: pyproject.toml constraints.txt | $(VENV)/venv.stamp
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[test]'
	@touch $@ $(VENV)/train.stamp

clean:
	rm -rf $(VENV) build *.egg-info
