-- An index that is replaced by the other set, or that a killed run left INVALID.

-- name: table
-- Lock: SHARE UPDATE EXCLUSIVE. Workers read and write throughout; it waits for transactions that use it.
DROP INDEX CONCURRENTLY IF EXISTS {index};

-- name: partitioned
-- A partitioned index cannot be dropped CONCURRENTLY. Lock: ACCESS EXCLUSIVE on the table and all
-- partitions for milliseconds, under lock_timeout with retries.
DROP INDEX IF EXISTS {index};
