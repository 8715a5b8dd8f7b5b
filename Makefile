# Each target does all its own set-up; PYTHON is the interpreter that .venv is made from (3.11 or newer).
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
LOCK := requirements.lock
READY := $(VENV)/.ready-$(shell cat pyproject.toml $(LOCK) | cksum | cut -d' ' -f1)

.PHONY: setup quickstart scaling btm test margins test-gpu test-py312 conformance check bench lock clean

setup: data/small/dataset.json  ## .venv with everything, and the committed texts indexed

quickstart: data/laptop/dataset.json  ## dense against Switch of equal compute on real text, 2 processes: table, report/index.html
	$(BIN)/python -m tools.quickstart

scaling: data/laptop/dataset.json  ## held-out loss with 1, 4, 8 and 16 experts, 3 seeds each; goes on where it was stopped
	$(BIN)/python -m tools.scaling

btm: data/eight/dataset.json  ## Branch-Train-Merge, c-BTM and BTX on eight domains, 3 seeds, an hour; goes on where it was stopped
	$(BIN)/python -m tools.btm

test: $(READY)  ## the whole test suite
	$(BIN)/python -m pytest

test-gpu: $(READY)  ## what needs a CUDA device; the other tests hide it
	$(BIN)/python -m pytest -m gpu

margins: $(READY)  ## the suite, and how much of its bound each numeric check uses
	@mkdir -p report; rm -f report/margins.txt
	TEST_MARGINS=$(CURDIR)/report/margins.txt $(BIN)/python -m pytest --assert=plain; $(BIN)/python -m tests.margins report/margins.txt

# The distributed and patch tests on a newer interpreter, which gets the newer megatron-core.
test-py312:
	@python=$$(.ci/find-python312) && $(MAKE) --no-print-directory PYTHON=$$python VENV=.venv-py312 _smoke
_smoke: $(READY)
	$(BIN)/python -m pytest tests/distributed tests/patches

# Every recipe at 2 and 4 ranks, one at 8, one in bf16; most of an hour. Goes on after one that is off, and then fails.
CONFORMANCE := dense dense_untied switch_8e top2_8e fine_grained_32e_top4_shared
conformance: $(READY)  ## layouts of every kind against one process: tables, report/conformance_*.json
	@failed=0; \
	check() { \
	  untied=; case $$1 in *_untied) untied=model.share_embeddings_and_output_weights=false;; esac; \
	  echo "$$1 on $$2 ranks in $$3"; \
	  $(BIN)/python -m tools.conformance experiment=$${1%_untied} $$untied --world-size $$2 --precision $$3 \
	    --json report/conformance_$$1_$$2_$$3.json || failed=1; \
	}; \
	for recipe in $(CONFORMANCE); do check $$recipe 2 fp32; check $$recipe 4 fp32; done; \
	check switch_8e 8 fp32; check dense 2 bf16; check switch_8e 4 bf16; exit $$failed

check: $(READY)  ## lint, format, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(READY)  ## ratios against the peers
	$(BIN)/python -m tools.bench train_step --json report/train_step.json

# UPGRADE="NAME ..." (or all): their newest versions. ALSO="FILE ...": wheels on this machine's disk whose hashes are allowed too.
lock:  ## requirements.lock anew, from the ranges in pyproject.toml
	@test -x .venv-lock/bin/uv || { $(PYTHON) -m venv .venv-lock && .venv-lock/bin/pip install --quiet uv; }
	.venv-lock/bin/python -m tools.lock --uv .venv-lock/bin/uv --upgrade $(UPGRADE) --also $(ALSO)

clean:  ## remove what can be made again, but not runs
	rm -rf .venv .venv-py312 .venv-lock data report

$(READY):
	@$(PYTHON) -c "import sys; v = sys.version_info; sys.exit(v < (3, 11) and f'Python {v.major}.{v.minor} is too old: set PYTHON to 3.11 or newer')"
	@echo "installing into $(VENV) (once; about 1 GB, minutes)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(MAKE) --no-print-directory _install
	@rm -f $(VENV)/.ready-*; touch $@

# What is installed, and each file of it, is named in the lock. Of torch one version has several builds: with hashes to choose by, pip
# takes the index's, with 4 GB of CUDA, before one on this machine's disk, so it chooses without them, and they are checked after.
PINNED := $(VENV)/pinned
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
_install:
	@rm -rf $(PINNED); mkdir $(PINNED)
	@for name in pip setuptools torch; do sed -n "/^$$name==/,/[^\\\\]\$$/p" $(LOCK) > $(PINNED)/$$name; done
	@$(BIN)/python -c "import tomllib; project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
	  print(*project['dependencies'], *project['optional-dependencies']['dev'], sep='\n')" > $(PINNED)/needed
	@$(PIP) install --require-hashes --no-deps -r $(PINNED)/pip -r $(PINNED)/setuptools
	@$(PIP) download --no-deps --only-binary :all: --dest $(PINNED) "$$(sed -n 's/^\(torch==[^ ]*\).*/\1/p' $(LOCK))"
	@$(PIP) install --require-hashes --no-deps --no-index --find-links $(PINNED) -r $(PINNED)/torch
	@$(PIP) install --require-hashes --no-build-isolation -c $(LOCK) -r $(PINNED)/needed
	@PYTHONWARNINGS=ignore $(PIP) install --no-deps --no-build-isolation -e .
	@rm -r $(PINNED)

data/small/dataset.json: | $(READY)
	$(BIN)/python -m tools.corpus --out data/corpus_small --offline --max-bytes-per-domain 400000
	$(BIN)/python -m tools.tokenizer train --input data/corpus_small --vocab-size 4096 --out data/corpus_small/tokenizer.model
	$(BIN)/python -m tools.index --input data/corpus_small --tokenizer data/corpus_small/tokenizer.model --split 80,10,10 --out data/small --overwrite

data/laptop/dataset.json: | $(READY)
	$(BIN)/python -m tools.corpus --out data/corpus
	$(BIN)/python -m tools.tokenizer train --input data/corpus --vocab-size 4096 --out data/corpus/tokenizer.model
	$(BIN)/python -m tools.index --input data/corpus --tokenizer data/corpus/tokenizer.model --split 92,6,2 --out data/laptop --overwrite

# Eight domains; the spare ones stand in for those whose package cannot be had here, which is said.
EIGHT := wiki_en ja code_py scripture_en recipes_en legal_en math biomed
SPARE := wiki_fr wiki_es de ru code_dj
data/eight/dataset.json: | $(READY)
	@rm -f data/corpus_8/*.jsonl; found=0; for domain in $(EIGHT) $(SPARE); do \
	  test $$found -eq 8 || ! $(BIN)/python -m tools.corpus --out data/corpus_8 --domains $$domain || found=$$((found + 1)); \
	done; test $$found -eq 8 || { echo "data/eight: only $$found of 8 domains can be had here"; exit 1; }
	$(BIN)/python -m tools.tokenizer train --input data/corpus_8 --vocab-size 4096 --out data/corpus_8/tokenizer.model
	$(BIN)/python -m tools.index --input data/corpus_8 --tokenizer data/corpus_8/tokenizer.model --split 92,6,2 --out data/eight --overwrite
