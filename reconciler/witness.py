"""Which second witness this process has: decided once, from REAPER_LIVENESS and where we run."""

from __future__ import annotations

import logging
import os

from reconciler.config import Settings
from reconciler.errors import UsageError
from reconciler.logs import say
from reconciler.ports import Cluster, NullCluster


def choose_cluster(settings: Settings) -> Cluster:
    """The lease alone, until the Kubernetes witness is built in; never a silent choice."""
    if settings.liveness_mode == "kubernetes":
        raise UsageError(
            "REAPER_LIVENESS=kubernetes: this version has no Kubernetes witness yet; use auto or off"
        )
    if settings.liveness_mode == "auto" and "KUBERNETES_SERVICE_HOST" in os.environ:
        say("no Kubernetes witness in this version: the lease alone decides", level=logging.WARNING)
    return NullCluster()
