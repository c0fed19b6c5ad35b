-- The queue itself, in the order in which workers claim: claim_next takes the first due row and stops.
-- Without it a claim sorts the whole backlog (100,000 queued rows: 85 ms instead of 0.5 ms), and in the
-- hot set, where no index starts with status, it reads the whole table. It costs about 1 µs for each row
-- that enters the queue. A beat does not touch it, so beats stay HOT.

-- name: table
-- Lock: SHARE UPDATE EXCLUSIVE. Workers read and write throughout; it waits for transactions older than
-- itself. Killed half-way it leaves an INVALID index, which the next run drops and builds anew.
CREATE INDEX CONCURRENTLY IF NOT EXISTS {index} ON {table} ({next_earliest_run_at}, {id}) WHERE {status} = {queued};

-- name: partitioned
-- A partitioned table cannot be indexed CONCURRENTLY. ONLY makes an empty index that becomes valid when
-- the last partition's index is attached. Lock: SHARE on the parent for milliseconds, under lock_timeout.
CREATE INDEX IF NOT EXISTS {index} ON ONLY {table} ({next_earliest_run_at}, {id}) WHERE {status} = {queued};

-- name: attach
-- Lock: on the two indexes, for milliseconds; a change of the catalogue only.
ALTER INDEX {index} ATTACH PARTITION {partition_index};
