"""A real Kubernetes for the tests: no mock, no Docker, nothing left behind.

What may live here: what it takes to get the programs (`assets`, `upstream`, `gobuild`, `system_packages`),
to run them (`process`, `api_tier`, `node_tier`), to talk to them (`kube_api`, `pods`, `access`), and to
hurt them (`fault_proxy`). What may not: anything that knows what job-reaper does. The product is only ever
seen as an image and a Deployment.

Two tiers, one idea: the API tier is etcd and kube-apiserver, up in seconds, pods are objects whose status
the test writes; the node tier is a whole node in namespaces of its own, where pods are processes.
"""
