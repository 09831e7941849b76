# One command to a running model: make run. Everything is set up once, in .venv; "make help" lists the rest.
#
# Stamps of the set-up lie in .make/, each newer than what it was made from, so a second "make run" starts at once. Local
# distributions are installed from their folders and from nowhere else (--no-index); only third parties come from the
# package index, by scripts/third_party.py.

MODEL   ?= smollm2-135m
PROFILE ?=
VENDOR  ?=
ENGINE  ?=
PORT    ?=
SET     ?=
DRY     ?=
DETACH  ?=
REPLACE ?=
PYTHON  ?=
EXHAUSTIVE_DEPTH ?= 12
# How "make test" builds the scheduler's C++ tests: ctest, or ctest-sanitized as every change runs them.
CTEST ?= ctest

# CPU machines want PyTorch's CPU build, which is a tenth of the size: where the package index serves another one, name an
# extra index that has it.
TORCH_SPEC  ?= torch==2.13.0
TORCH_INDEX ?=

BIN        := .venv/bin
# Images are built with a Python 3.11 or newer and nothing else: no .venv is set up for them.
IMAGE_PYTHON = $(or $(PYTHON),$(firstword $(wildcard $(BIN)/python)),python3)
PIP        := $(BIN)/python -m pip --disable-pip-version-check --no-input
LOCAL      := $(PIP) install --quiet --no-index --no-deps --no-build-isolation --no-warn-conflicts
STEP       := scripts/step.sh
PROJECTS   := $(wildcard pyproject.toml scheduler/pyproject.toml tui/pyproject.toml kernel-backends/*/pyproject.toml)
SCHEDULER  := $(shell find scheduler -name build -prune -o \( -name '*.cpp' -o -name '*.h' -o -name '*.hpp' -o -name CMakeLists.txt -o -name pyproject.toml \) -print)
DEVICE_PACKAGES := mla triton amd npu nvidia
KERNEL_CPU := $(shell find kernel-backends/cpu -name build -prune -o \( -name '*.cpp' -o -name '*.h' -o -name '*.hpp' -o -name CMakeLists.txt -o -name pyproject.toml \) -print)

RUN_OPTIONS = $(if $(PROFILE),--profile "$(PROFILE)") $(if $(PORT),--port "$(PORT)") $(if $(SET),--set "$(SET)")
PORT_OPTION = $(if $(PORT),--port "$(PORT)")
VENDOR_OPTION = $(if $(VENDOR),--vendor "$(VENDOR)")
START_OPTIONS = $(VENDOR_OPTION) $(if $(ENGINE),--engine "$(ENGINE)") $(if $(DRY),--dry-run) $(if $(DETACH),--detach) \
	$(if $(REPLACE),$(if $(filter after,$(REPLACE)),--replace-after,--replace))

.PHONY: help setup setup-test setup-lint run plan recipes doctor stop status logs top top-web demo bench verify env test test-long ctest \
	ctest-sanitized ctest-exhaustive mutants coverage fuzz lint image images image-test sbom renders locks clean lower-ascend
.DEFAULT_GOAL := help

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed -E 's/^([a-z-]+):.*## (.*)/  \1\t\2/' | expand -t 19
	@echo
	@echo '  variables: MODEL=$(MODEL) PROFILE= VENDOR= ENGINE=container|native PORT= SET="key=value ..." DRY=1'
	@echo '             DETACH=1 REPLACE=1|after PYTHON= TORCH_SPEC=$(TORCH_SPEC) TORCH_INDEX='

# ----------------------------------------------------------------------------------------------------------- using it

run: setup ## serve MODEL in the way that suits this machine; DRY=1 prints what would happen
	@$(BIN)/tokenspeed run "$(MODEL)" $(RUN_OPTIONS) $(START_OPTIONS)

plan: setup ## what MODEL would need, and where every setting comes from
	@$(BIN)/tokenspeed recipe plan "$(MODEL)" $(RUN_OPTIONS)

recipes: setup ## the models there are recipes for
	@$(BIN)/tokenspeed recipe list

doctor: setup ## what would keep a model from running here, and what mends it
	@$(BIN)/tokenspeed doctor $(if $(filter command line,$(origin MODEL)),"$(MODEL)") $(PORT_OPTION) $(VENDOR_OPTION)

stop: setup ## stop the running server; it drains first
	@$(BIN)/tokenspeed stop $(PORT_OPTION) $(if $(DRY),--dry-run)

status: setup ## the running servers and their probes
	@$(BIN)/tokenspeed status $(PORT_OPTION)

logs: setup ## follow the log of a server in the background
	@$(BIN)/tokenspeed logs --follow $(PORT_OPTION)

top: setup ## the dashboard
	@$(BIN)/tokenspeed top $(if $(PORT),--url "http://127.0.0.1:$(PORT)")

top-web: setup .make/web ## the dashboard in a browser, on http://127.0.0.1:8001
	@$(BIN)/tokenspeed top --web $(if $(PORT),--url "http://127.0.0.1:$(PORT)")

demo: setup ## a small server, agents that ask more than it holds, and the dashboard beside them; q ends all
	@$(BIN)/tokenspeed demo "$(MODEL)" $(if $(DRY),--dry-run)

bench: setup ## measure the running server: prefill, first token, decode at 1, 8 and 32 streams
	@$(BIN)/tokenspeed bench $(PORT_OPTION) $(if $(DRY),--dry-run)

verify: setup ## check MODEL's profile on this machine: answers, API, accuracy, speed
	@$(BIN)/tokenspeed verify "$(MODEL)" $(if $(PROFILE),--profile "$(PROFILE)") $(if $(DRY),--dry-run)

env: setup ## versions, the machine and the kernels: what a report of a fault should hold
	@$(BIN)/tokenspeed env

# ------------------------------------------------------------------------------------------------------------- set-up

# Three chains side by side: the native builds need a compiler and the build tools, not the third parties. The files of
# requirements change only when their content does, so an edit elsewhere in a pyproject.toml installs nothing anew.
setup: .make/begin
	@$(MAKE) --silent --no-print-directory --jobs=3 .make/run

setup-test: .make/begin
	@$(MAKE) --silent --no-print-directory --jobs=3 .make/test

setup-lint: .make/begin
	@$(MAKE) --silent --no-print-directory --jobs=3 .make/dev

# Without a .venv no stamp is true.
.PHONY: .make/begin
.make/begin:
	@[ -x $(BIN)/python ] || rm -rf .make
	@mkdir -p .make

.make/python-path: scripts/preflight.sh
	@scripts/preflight.sh "$(PYTHON)" > $@.new && mv $@.new $@

.make/requirements-%.txt: $(PROJECTS) scripts/third_party.py .make/python-path
	@"$$(cat .make/python-path)" scripts/third_party.py $* > $@.new
	@cmp -s $@.new $@ && rm $@.new || mv $@.new $@

.make/tools: .make/requirements-build.txt
	@$(STEP) tools "virtual environment and build tools" scripts/install_tools.sh $<
	@touch $@

.make/third-party: .make/tools .make/requirements-run.txt
	@$(STEP) third-party "torch and other packages" $(PIP) install $(if $(TORCH_INDEX),--extra-index-url "$(TORCH_INDEX)") \
		"$(TORCH_SPEC)" --requirement .make/requirements-run.txt
	@touch $@

.make/scheduler: .make/tools $(SCHEDULER)
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(STEP) scheduler "scheduler (C++)" $(LOCAL) --editable ./scheduler
	@touch $@

.make/kernel-cpu: .make/tools $(KERNEL_CPU)
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(STEP) kernel-cpu "CPU kernels (C++)" $(LOCAL) --editable ./kernel-backends/cpu
	@touch $@

.make/run: .make/third-party .make/scheduler .make/kernel-cpu
	@$(STEP) local "our own packages" $(LOCAL) --editable ./kernel-backends/core --editable . --editable ./tui
	@touch $@

.make/web: .make/run .make/requirements-web.txt
	@$(STEP) web-packages "packages for the browser" $(PIP) install --requirement .make/requirements-web.txt
	@touch $@

.make/test: .make/run .make/requirements-test.txt
	@$(STEP) test-packages "packages for tests" $(PIP) install "$(TORCH_SPEC)" --requirement .make/requirements-test.txt
	@$(STEP) test-local "kernels for other devices" $(LOCAL) $(addprefix --editable ./kernel-backends/,$(DEVICE_PACKAGES))
	@touch $@

.make/dev: .make/test .make/requirements-dev.txt
	@$(STEP) dev-packages "packages for checks" $(PIP) install --requirement .make/requirements-dev.txt
	@touch $@

# --------------------------------------------------------------------------------------------------------- proving it

test: setup-test $(CTEST) ## all tests that belong to every change
	@$(BIN)/python -m pytest -m "not long"

test-long: setup-test ctest ctest-exhaustive mutants ## all tests, the long ones too, properties with new examples
	@$(BIN)/python -m pytest --hypothesis-profile=search

ctest: setup-test
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(STEP) ctest-build "C++ tests" scripts/build_cpp_tests.sh
	@$(BIN)/ctest --test-dir build/cpp-tests --output-on-failure --no-tests=error --parallel 2

# The same under the address, leak and undefined-behaviour sanitizers.
ctest-sanitized: setup-test ## the scheduler's C++ tests under sanitizers
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(STEP) ctest-sanitized-build "C++ tests, sanitized" \
		scripts/build_cpp_tests.sh build/cpp-sanitized -DTOKENSPEED_SCHEDULER_SANITIZE=ON
	@ASAN_OPTIONS=detect_leaks=1 TOKENSPEED_EXHAUSTIVE_DEPTH=5 $(BIN)/ctest --test-dir build/cpp-sanitized \
		--output-on-failure --no-tests=error --parallel 2

# Every order of events up to that many; most worlds end by themselves before depth 30 (docs/design/testing-the-scheduler.md).
ctest-exhaustive: ctest
	@TOKENSPEED_EXHAUSTIVE_DEPTH=$(EXHAUSTIVE_DEPTH) build/cpp-tests/tests/cpp/test_exhaustive

mutants: setup-test ## planted bugs: how many of them the C++ tests catch
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python scripts/mutate_scheduler.py

# In an environment of its own, for triton-ascend replaces triton; ALL=1 for more than the row kernels.
lower-ascend: .make/ascend/.installed ## lower the Triton kernels for Ascend, without an NPU, and say how far each comes
	@TORCH_DEVICE_BACKEND_AUTOLOAD=0 PYTHONPATH=kernel-backends/core:kernel-backends/triton \
		.make/ascend/bin/python scripts/check_triton_ascend.py $(if $(ALL),--all)

.make/ascend/.installed:
	@$(or $(PYTHON),python3) -m venv .make/ascend
	@.make/ascend/bin/python -m pip --disable-pip-version-check --no-input install --quiet \
		$(if $(TORCH_INDEX),--extra-index-url "$(TORCH_INDEX)") "$(TORCH_SPEC)" numpy pybind11
	@.make/ascend/bin/python -m pip --disable-pip-version-check --no-input install --quiet --no-deps \
		"triton-ascend==3.2.0" "ascendnpu-ir==1.2.0"
	@touch $@

coverage: setup-lint ## lines and branches of the scheduler that its C++ tests take
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(STEP) coverage-build "C++ tests, counted" \
		scripts/build_cpp_tests.sh build/cpp-coverage -DTOKENSPEED_SCHEDULER_COVERAGE=ON
	@find build/cpp-coverage -name '*.gcda' -delete
	@TOKENSPEED_EXHAUSTIVE_DEPTH=5 $(BIN)/ctest --test-dir build/cpp-coverage --exclude-regex '^(refuses|compiles)\.' \
		--output-on-failure --no-tests=error --parallel 2 > build/cpp-coverage/log || { cat build/cpp-coverage/log; exit 1; }
	@$(BIN)/gcovr --root scheduler --config scheduler/gcovr.cfg --txt-metric branch --print-summary build/cpp-coverage

fuzz: setup-test ## streams of random events for FUZZ_SECONDS (600) against the scheduler; SKIPs without clang
	@PATH="$(CURDIR)/$(BIN):$$PATH" scripts/fuzz_scheduler.sh

lint: setup-lint ## format, style, types, and who may import whom
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

image: ## build the image of VENDOR (cpu, nvidia, amd, npu) with docker or podman; SOC=a3, 910b or 950 for npu
	@$(IMAGE_PYTHON) -m scripts.image_build "$(or $(VENDOR),cpu)" $(if $(SOC),--soc "$(SOC)") $(if $(TAG),--tag "$(TAG)") \
		$(if $(DRY),--dry-run)

images: ## build every image whose base this machine has or can pull
	@$(IMAGE_PYTHON) -m scripts.image_build --all $(if $(SOC),--soc "$(SOC)") $(if $(DRY),--dry-run)

image-test: ## build the image of VENDOR and look at it in containers; the CPU image serves
	@$(IMAGE_PYTHON) -m scripts.image_test "$(or $(VENDOR),cpu)"

sbom: setup-lint ## what the image of VENDOR is made of, as dist/sbom-VENDOR.cdx.json (CycloneDX)
	@$(BIN)/python -m scripts.image_sbom "$(or $(VENDOR),cpu)" $(if $(TAG),--image "$(TAG)")

renders: setup ## write images/compose and images/kubernetes anew; a test says when they are old
	@$(BIN)/python scripts/render_examples.py

locks: setup-lint ## resolve the lock files of the images; CHECK=1 only compares, UPGRADE=1 takes the newest that fits
	@$(BIN)/python -m scripts.lock_images $(if $(CHECK),--check) $(if $(UPGRADE),--upgrade) $(VENDOR)

clean: ## remove what was set up and built; downloaded weights stay
	rm -rf .venv .make build dist scheduler/build kernel-backends/*/build
