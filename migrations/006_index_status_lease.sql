-- Finds expired leases without reading the finished rows (000: idx_jobs_status_lease).

-- name: table
-- Lock: SHARE UPDATE EXCLUSIVE. Workers read and write throughout; it waits for transactions older than
-- itself. Killed half-way it leaves an INVALID index, which the next run drops and builds anew.
CREATE INDEX CONCURRENTLY IF NOT EXISTS {index} ON {table} ({status}, {lease_expires_at});

-- name: partitioned
-- A partitioned table cannot be indexed CONCURRENTLY. ONLY makes an empty index that becomes valid when
-- the last partition's index is attached. Lock: SHARE on the parent for milliseconds, under lock_timeout.
CREATE INDEX IF NOT EXISTS {index} ON ONLY {table} ({status}, {lease_expires_at});

-- name: attach
-- Lock: on the two indexes, for milliseconds; a change of the catalogue only.
ALTER INDEX {index} ATTACH PARTITION {partition_index};
