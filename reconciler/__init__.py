"""job-reaper: no job stays stuck.

What may live at this level: the version and the one object an application embeds. Everything else is
imported from the room that owns it, so that `import reconciler` costs nothing to a worker.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["Reaper", "__version__"]

if TYPE_CHECKING:
    from reconciler.reaper import Reaper


def __getattr__(name: str) -> Any:
    # Lazy, because a worker that only needs `reconciler.worker` must not pay for the reaper's imports.
    if name == "Reaper":
        from reconciler.reaper import Reaper  # noqa: PLC0415 - see above

        return Reaper
    raise AttributeError(f"module 'reconciler' has no attribute {name!r}")
