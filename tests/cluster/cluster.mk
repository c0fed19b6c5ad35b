# The test cluster's targets; included by the Makefile at the top. Each prints its times.
.PHONY: cluster-assets cluster-api-assets e2e e2e-long cluster-up cluster-down

cluster-api-assets: setup ## Get etcd, kube-apiserver and kubectl for the API tier (minutes once, then seconds)
	@$(PY) -m tests.cluster prepare api

cluster-assets: setup ## Get programs, system packages and images for the node tier (root)
	@$(PY) -m tests.cluster prepare node

e2e: cluster-assets ## Run the node tier: a whole Kubernetes node, without Docker (root)
	@PYTEST_ADDOPTS="$$PYTEST_ADDOPTS $(PYTEST_ARGS)" scripts/test e2e

e2e-long: cluster-assets ## Start and tear down the node ten times; nothing may be left (root)
	@PYTEST_ADDOPTS="$$PYTEST_ADDOPTS $(PYTEST_ARGS)" scripts/test e2e-long

cluster-up: setup ## Start a node that stays, and print what kubectl and helm need (root)
	@$(PY) -m tests.cluster up

cluster-down: setup ## End that node; nothing is left of it
	@$(PY) -m tests.cluster down
