-- The floor: what somebody would write who knows the answer beforehand. Every lease is an ordinary one, no
-- holder is asked about, no row is odd, nothing is counted or reported; only the writes are the same.

-- name: rescue
-- One batch: the next expired rows, the same columns, the same event with the values as they were.
WITH batch AS MATERIALIZED (
    SELECT
        ctid AS place, id, locked_by, lease_expires_at, last_heartbeat_at, processing_started_at, attempt_count,
        max_attempts, stage, attempt_count - attempts_refunded >= max_attempts AS exhausted,
        trunc(1000 * (1 + random() * 0.1)
            * (ARRAY[30, 120, 600])[least(greatest(attempt_count - attempts_refunded, 1), 3)]) / 1000 AS backoff
    FROM {table}
    WHERE status = 'processing' AND lease_expires_at < now()
    ORDER BY lease_expires_at
    LIMIT %(limit)s
    FOR UPDATE SKIP LOCKED
), written AS (
    UPDATE {table} AS t SET
        status = CASE WHEN b.exhausted THEN 'failed' ELSE 'queued' END,
        locked_by = NULL, lease_expires_at = NULL, last_heartbeat_at = NULL, processing_started_at = NULL,
        next_earliest_run_at = CASE WHEN NOT b.exhausted THEN now() + make_interval(secs => b.backoff) END,
        fail_code = CASE WHEN b.exhausted THEN 'timeout' END,
        fail_reason = CASE WHEN b.exhausted THEN 'lease_expired' END
    FROM batch AS b
    WHERE t.ctid = b.place
    RETURNING b.*
)
INSERT INTO job_events (job_id, data)
SELECT id, jsonb_build_object(
    'type', CASE WHEN exhausted THEN 'reaper:failed(timeout)' ELSE 'reaper:requeued' END,
    'table', %(name)s::text, 'at', now(),
    'details', jsonb_build_object(
        'reason', 'lease_expired', 'verdict', 'UNKNOWN', 'locked_by', locked_by, 'attempt', attempt_count,
        'max_attempts', max_attempts, 'stage', stage, 'lease_expires_at', lease_expires_at,
        'last_heartbeat_at', last_heartbeat_at, 'processing_started_at', processing_started_at,
        'backoff_sec', CASE WHEN NOT exhausted THEN backoff END,
        'fail_code', CASE WHEN exhausted THEN 'timeout' END, 'pod', NULL))
FROM written
