# Two commands for a newcomer: `make demo` and `make test`. Both build .venv on their first run.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: demo demo-rl test lint install bench-gpu clean

install: $(STAMP)

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	touch $@

demo: $(STAMP)
	$(BIN)/nybble prepare sotu --out data/sotu --vocab-size 4096
	$(BIN)/nybble pretrain tiny --recipe inkling --data data/sotu --out runs/demo --overwrite
	$(BIN)/nybble sample runs/demo --prompt "The state of the Union is"
	@echo "loss curve: runs/demo/plots/loss.png    precision table: runs/demo/precision.txt"

demo-rl: $(STAMP)
	$(BIN)/nybble sft nano --task arithmetic --level 2 --styles direct,bare --optimiser muon --lr 7e-3 --batch 8 --steps 400 \
		--save-every 0 --out runs/demo-sft --overwrite
	$(BIN)/nybble rl runs/demo-sft --task arithmetic --level 2 --prompts 24 --group 8 --rows 192 --max-new-tokens 14 \
		--steps 50 --lr 3e-4 --warmup 3 --eval-every 25 --eval-problems 128 --save-every 0 --out runs/demo-rl --overwrite
	@echo "reward, mismatch, entropy and length: runs/demo-rl/plots/rl.png"

lint: $(STAMP)
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/mypy

# One process a core, each with one thread: the tests are many and small.
test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto

# The figures of the README on a GPU: kernels, a layer of experts, a whole step.
bench-gpu: $(STAMP)
	$(BIN)/nybble bench --device cuda
	$(BIN)/python benchmarks/experts_cuda.py
	$(BIN)/python benchmarks/pretrain_cuda.py --graph

clean:
	rm -rf $(VENV) runs data dist build
