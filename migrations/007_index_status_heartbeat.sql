-- Finds silent jobs of workers that set no lease (002: CREATE INDEX ON jobs (status, last_heartbeat_at)).
-- The document gives no name, so it has the one Postgres itself would choose. An index on the same columns
-- under any other name is used as it is.

-- name: table
-- Lock: SHARE UPDATE EXCLUSIVE. Workers read and write throughout; it waits for transactions older than
-- itself. Killed half-way it leaves an INVALID index, which the next run drops and builds anew.
CREATE INDEX CONCURRENTLY IF NOT EXISTS {index} ON {table} ({status}, {last_heartbeat_at});

-- name: partitioned
-- A partitioned table cannot be indexed CONCURRENTLY. ONLY makes an empty index that becomes valid when
-- the last partition's index is attached. Lock: SHARE on the parent for milliseconds, under lock_timeout.
CREATE INDEX IF NOT EXISTS {index} ON ONLY {table} ({status}, {last_heartbeat_at});

-- name: attach
-- Lock: on the two indexes, for milliseconds; a change of the catalogue only.
ALTER INDEX {index} ATTACH PARTITION {partition_index};
