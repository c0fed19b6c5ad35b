-- Rows to measure with. Everything is a function of the row's number, so that two fills are alike.

-- name: finished
-- What a queue consists of after a while: jobs that are done.
INSERT INTO {table} (status, attempt_count, max_attempts, stage, expected_duration_ms)
SELECT 'done', 1 + n %% 3, 3, (ARRAY['clip', 'asr', 'burnin'])[1 + n %% 3], 10000
FROM generate_series(1::bigint, %(rows)s) AS n

-- name: expired
-- A fleet that died within an hour: every other job is on its last attempt.
INSERT INTO {table} (status, locked_by, lease_expires_at, last_heartbeat_at, processing_started_at,
                     attempt_count, max_attempts, stage, expected_duration_ms)
SELECT
    'processing', 'k8s://prod/media/worker-' || n %% %(holders)s || '/uid/main#1700000000000',
    now() - make_interval(secs => age), now() - make_interval(secs => age + 300),
    now() - make_interval(secs => age + 900),
    CASE WHEN n %% 2 = 0 THEN 3 ELSE 1 + n %% 4 / 2 END, 3,
    (ARRAY['clip', 'asr', 'burnin'])[1 + n %% 3], 10000
FROM generate_series(1::bigint, %(rows)s) AS n
-- A number without pattern, the same in every fill: leases do not end in the order of insertion.
CROSS JOIN LATERAL (SELECT 60 + (n * 7919) %% 3600 + (n * 104729) %% 1000 / 1000.0 AS age) AS spread

-- name: live
-- Jobs at work: the lease ends in ten hours, the last beat was a moment ago.
INSERT INTO {table} (status, locked_by, lease_expires_at, last_heartbeat_at, processing_started_at,
                     attempt_count, max_attempts, stage, expected_duration_ms)
SELECT
    'processing', 'k8s://prod/media/worker-' || n %% %(holders)s || '/uid/main#1700000000000',
    now() + interval '10 hours', now(), now() - interval '10 minutes', 1, 3,
    (ARRAY['clip', 'asr', 'burnin'])[1 + n %% 3], 10000
FROM generate_series(1::bigint, %(rows)s) AS n

-- name: writes
-- What a side wrote to one table, row for row, as one word. Instants of the run itself (the clock of the
-- requeue and of the event) differ by nature; that they are there, and the step of the backoff, do not.
SELECT
    count(*) FILTER (WHERE j.status = 'queued'), count(*) FILTER (WHERE j.status = 'failed'), count(e.job_id),
    md5(string_agg(concat_ws('|',
        j.id, j.status, j.locked_by, j.lease_expires_at, j.last_heartbeat_at, j.processing_started_at,
        j.attempt_count, j.attempts_refunded, j.max_attempts, j.fail_code, j.fail_reason, j.stage,
        j.next_earliest_run_at > now(), e.data #- '{{at}}' #- '{{details,backoff_sec}}',
        e.data ? 'at', width_bucket((e.data #>> '{{details,backoff_sec}}')::float8, ARRAY[30, 33.1, 120, 132.1])
    ), ',' ORDER BY j.id))
FROM {table} AS j
LEFT JOIN job_events AS e ON e.job_id = j.id::text AND e.data ->> 'table' = %(name)s
WHERE j.status <> 'done'
