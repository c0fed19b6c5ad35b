-- With --heartbeats=hot: leave a fifth of each page free, so that the new version of a beaten row finds
-- room beside the old one. It holds for pages filled from now on; old pages gain room as they are vacuumed.
--
-- Lock: SHARE UPDATE EXCLUSIVE, for milliseconds: workers read and write throughout. No rewrite.
-- A partitioned table has no pages of its own: its partitions are set one by one.

-- name: set
ALTER TABLE {table} SET (fillfactor = {fillfactor});

-- name: reset
-- Back to what was there before --heartbeats=hot, when that was nothing.
ALTER TABLE {table} RESET (fillfactor);
