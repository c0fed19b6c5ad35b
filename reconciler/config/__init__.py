"""The configuration: one YAML file and the environment, judged once, frozen, with the source of each value.

What may live here: reading, judging and showing configuration. Nothing here connects to anything, and
nothing outside reads a variable or the file by itself.

    settings = load()                  # REAPER_CONFIG and os.environ; ConfigError lists every problem at once
    settings.policy(), settings.table_specs(), settings.dsn
    describe(settings)                 # rows of key, value, source; secrets masked
"""

from reconciler.config.describe import describe, document
from reconciler.config.load import load
from reconciler.config.mask import masked_dsn
from reconciler.config.settings import Settings

__all__ = ["Settings", "describe", "document", "load", "masked_dsn"]
