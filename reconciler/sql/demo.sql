-- The demonstration's own queries: an app's tables, what the view shows, and the final check.

-- name: app_tables
-- The tables as an app might own them before it meets job-reaper: no lease, no holder, no attempts. The
-- migrations add those, as they would in production. The events are the app's own, too: where a namesake
-- lies in another schema, the migrations rightly refuse to guess.
CREATE TABLE jobs (
    id bigint PRIMARY KEY, status text NOT NULL DEFAULT 'queued',
    title text NOT NULL, stage text, expected_duration_ms int, work_sec float8 NOT NULL, fate text NOT NULL
);
CREATE TABLE asr_jobs (LIKE jobs INCLUDING ALL);
CREATE TABLE job_events (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, job_id text NOT NULL, data jsonb NOT NULL
);
-- What the workers produce. On purpose without a unique key: a job done twice must show, not be refused.
CREATE TABLE demo_output (
    job_table text NOT NULL, job_id bigint NOT NULL, attempt int NOT NULL, worker text NOT NULL,
    at timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- name: add_task
INSERT INTO {table} (id, title, stage, expected_duration_ms, work_sec, fate)
VALUES (%(id)s, %(title)s, %(stage)s, %(expected_ms)s, %(work_sec)s, %(fate)s)

-- name: task
SELECT title, work_sec, fate FROM {table} WHERE id = %(id)s

-- name: produce
-- Runs in the transaction of finish_job: a worker that lost its lease produces nothing.
INSERT INTO demo_output (job_table, job_id, attempt, worker)
VALUES (%(table)s, %(id)s, %(attempt)s, %(worker)s)

-- name: rows
-- Both tables as the view shows them. Ages are Postgres' own.
SELECT
    t.job_table, t.id, t.title, t.stage, t.status, t.locked_by, t.attempt_count, t.max_attempts,
    extract(epoch FROM t.lease_expires_at - clock_timestamp())::float8,
    extract(epoch FROM t.next_earliest_run_at - clock_timestamp())::float8, t.fail_code
FROM (
    SELECT 'jobs' AS job_table, jobs.* FROM jobs
    UNION ALL
    SELECT 'asr_jobs', asr_jobs.* FROM asr_jobs
) AS t
ORDER BY t.job_table DESC, t.id

-- name: events
-- What the reaper wrote since we last looked.
SELECT id, job_id, data FROM job_events WHERE id > %(after)s ORDER BY id

-- name: account
-- For the final check: each row with what was produced and recorded about it.
SELECT
    t.job_table, t.id, t.status, t.attempt_count, t.attempts_refunded, t.max_attempts, t.fail_code, t.fail_reason,
    t.locked_by IS NULL AND t.lease_expires_at IS NULL AS is_free,
    ARRAY(SELECT o.attempt FROM demo_output AS o WHERE o.job_table = t.job_table AND o.job_id = t.id) AS outputs,
    ARRAY(SELECT e.data ->> 'type' FROM job_events AS e
          WHERE e.job_id = t.id::text AND e.data ->> 'table' = t.job_table ORDER BY e.id) AS events
FROM (
    SELECT 'jobs' AS job_table, jobs.* FROM jobs
    UNION ALL
    SELECT 'asr_jobs', asr_jobs.* FROM asr_jobs
) AS t

-- name: recovery
-- How long after the end of its lease each job was back in the queue.
SELECT
    min(extract(epoch FROM (data ->> 'at')::timestamptz - (data #>> '{{details,lease_expires_at}}')::timestamptz))::float8,
    max(extract(epoch FROM (data ->> 'at')::timestamptz - (data #>> '{{details,lease_expires_at}}')::timestamptz))::float8
FROM job_events WHERE data ->> 'type' = 'reaper:requeued'
