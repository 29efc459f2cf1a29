# For people: `make demo` shows the main job, `make test` passes all tests.
# Each installs what it needs, or says precisely what it lacks.

export BKO_CACHE ?= $(HOME)/.cache/bko
HOST := $(shell rustc -vV | sed -n 's/^host: //p')
TARGET_DIR := $(or $(CARGO_TARGET_DIR),target)
EXECUTABLE := $(TARGET_DIR)/release/bko-install
# Clusters need root; cargo and the compiler do not.
ifneq ($(shell id -u),0)
export CARGO_TARGET_$(shell echo $(HOST) | tr a-z- A-Z_)_RUNNER := sudo -n -E
endif

# The simulation is optimised, and shares dependencies and library with the executable.
STATIC := RUSTFLAGS="$$RUSTFLAGS -C target-feature=+crt-static" cargo
SIMULATED := test --release --locked --target $(HOST)
SIMULATE := $(STATIC) $(SIMULATED)

.PHONY: help tools build test test-full simulation demo demo-cluster bench lint format clean

help:
	@echo 'make demo       show the main job on this host'
	@echo 'make demo-cluster  the same on a real Kubernetes node'
	@echo 'make test       run all tests; long repetitions run a tenth of their count'
	@echo 'make test-full  run all tests in full'
	@echo 'make simulation run the simulation; with SEED=n, print one history'
	@echo 'make build      make the static executable $(EXECUTABLE)'
	@echo 'make tools      install what tests need: Debian packages, Kubernetes, BuildKit'
	@echo 'make bench      measure control plane, one host and installer, for docs/performance.md'
	@echo 'make lint       check format, lints, licences and documentation'

tools:
	@tests/tools/install.sh

# Static, so that it is also the whole of its own image.
build:
	$(STATIC) build --release --locked --target $(HOST)
	@mkdir -p $(TARGET_DIR)/release
	@install -m 755 $(TARGET_DIR)/$(HOST)/release/bko-install $(EXECUTABLE)

# What is to be tested, and what tests it: two builds, each of which leaves a core idle for much of its time.
.PHONY: compiled debug-tests release-tests
compiled: tools
	@$(MAKE) --no-print-directory --jobs=2 debug-tests release-tests
debug-tests:
	cargo test --locked --no-run
release-tests: build
	$(SIMULATE) --no-run --test simulation --test mutants

test: export BKO_REPEAT ?= tenth
test-full: export BKO_REPEAT = full
test test-full: compiled
	@tests/run.sh $(TARGET_DIR)/simulation.log \
	  RUSTFLAGS="$$RUSTFLAGS -C target-feature=+crt-static" cargo $(SIMULATED) --test simulation --test mutants

# With SEED, one history is printed: of the product, or of a broken variant of it.
simulation: export BKO_SEED = $(SEED)
simulation: export BKO_MUTANT = $(MUTANT)
simulation:
	@$(SIMULATE) --quiet --test $(if $(MUTANT),mutants,simulation)

demo: build
	@tests/tools/install.sh host
	@PATH="$(BKO_CACHE)/bin:$$PATH" tests/demo/host.sh $(EXECUTABLE)

demo-cluster: tools build
	cargo test --locked --quiet --test demo

# The program that measures is not what is measured: any profile will do.
bench: tools build
	cargo bench --locked --profile dev --bench control_plane --bench one_host --bench installer

lint:
	cargo fmt --check
	cargo clippy --locked --all-targets -- -D warnings
	cargo clippy --locked --test simulation --test mutants -- -D warnings
	@tests/tools/install.sh lint
	PATH="$(BKO_CACHE)/bin:$$PATH" cargo deny --log-level error check licenses bans sources
	RUSTDOCFLAGS='-D warnings' cargo doc --locked --no-deps

format:
	cargo fmt

clean:
	cargo clean
