"""Batch size: the same rescue in batches of 1,000, 5,000 and 10,000 rows. It justifies the default."""

from __future__ import annotations

from bench.report import Result
from bench.rescue import EXPIRED, FINISHED, FLOOR, interleaved, one_pass, prepared, summed
from bench.rescue import floor as floor_of_5000
from bench.stand import Stand

SIZES = (1_000, 5_000, 10_000)


def measure(stand: Stand) -> Result:
    # A tenth of the finished rows: the batches never look at them.
    expired = stand.rows(EXPIRED)
    template = prepared(stand, stand.rows(FINISHED // 10), expired)
    sides = {FLOOR: floor_of_5000} | {
        f"{size:,}": one_pass(REAPER_PARALLEL="1", REAPER_BATCH_SIZE=str(size)) for size in SIZES
    }
    taken, _ = interleaved(stand, template, sides, stand.times(5))
    stand.drop(template)
    facts = summed(taken, expired)["sides"]
    return Result(
        name="batches",
        title=f"{expired:,} expired rows, tables in turn",
        header=("batch", "rows/s", "of the floor", "processor"),
        rows=[
            (
                size,
                f"{facts[size]['rows_per_sec']:,}",
                f"{facts[size]['of_floor']:.2f}",
                "-" if (work := facts[size]["of_floor_processor"]) is None else f"{work:.2f}",
            )
            for size in facts
        ],
        facts={"sizes": facts},
    )
