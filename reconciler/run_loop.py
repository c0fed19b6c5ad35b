"""`job-reaper run`: the documents' start:reaper. The same pass every interval, needing no Kubernetes.

For systemd, PM2 or a container anywhere. SIGTERM ends it after the batch under way, exit 0.
"""

from __future__ import annotations

import signal
from types import FrameType

from reconciler.config import Settings
from reconciler.logs import say
from reconciler.reaper import Reaper
from reconciler.web import WebServer


def run_loop(settings: Settings) -> int:
    """Run until a signal comes."""
    reaper = Reaper(settings=settings, with_metrics=True)
    loop = reaper.interval_loop()

    def stop(signum: int, _: FrameType | None) -> None:
        say("stopping after the batch under way", fields={"signal": signal.Signals(signum).name})
        reaper.request_stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    assert reaper.metrics is not None
    web = WebServer(settings.metrics_port, reaper.metrics.registry, lambda: loop.healthy)
    say(
        "reaper started",
        fields={
            "tables": [spec.name for spec in reaper.specs],
            "interval_sec": reaper.policy.interval_sec,
            "metrics_port": web.port,
            "dry_run": settings.dry_run,
            "config": settings.checksum[:12],
        },
    )
    try:
        loop.run()
    finally:
        web.close()
        reaper.close()
    say("reaper stopped")
    return 0
