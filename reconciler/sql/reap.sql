-- The reaper's own queries. {names} are the app's identifiers, filled by the driver; see statements.py.
--
-- Ages are compared, never computed: "stamp older than x" is written  stamp < clock - x , because a stamp
-- may be infinity or a date no Python and no interval can hold. The clock is statement_timestamp(), not
-- now(): a client that was paused inside its transaction must not judge by an old clock.

-- name: survey
-- How many rows ask for attention, without locking any. The counts decide whether the (dearer) reap
-- statement runs at all, so an idle pass costs a few index probes whatever the size of the table.
SELECT
    -- JSON's time stamps do not depend on DateStyle, so they can be handed back by another session.
    to_jsonb(statement_timestamp()) #>> '{{}}' AS as_of,
    e.n AS expired,
    e.oldest_sec AS oldest_sec,
    (SELECT count(*) FROM {table} WHERE {status} = {processing} AND {is_far}) AS far,
    (SELECT count(*) FROM {table} WHERE {status} = {processing} AND {is_stale}) AS stale,
    -- Two probes instead of one OR: each finds its few rows by the index.
    (SELECT count(*) FROM {table} WHERE {status} = {processing} AND {is_unstamped})
    + (SELECT count(*) FROM {table} WHERE {status} = {processing} AND {is_far_unstamped}) AS unleased
FROM (
    SELECT
        count(*) AS n,
        coalesce(extract(epoch FROM statement_timestamp() - min({lease}) FILTER (WHERE isfinite({lease}))), 0)
            ::float8 AS oldest_sec
    FROM {table}
    WHERE {status} = {processing} AND {is_expired}
) AS e

-- name: processing_count
-- Only asked when brake.maxExpiredShare is set: the share needs a whole.
SELECT count(*) FROM {table} WHERE {status} = {processing}

-- name: fleet
-- Only asked when brake.outageGraceSec is set: a few holders are enough to call it a fleet, one fresh
-- beat is enough to know that beats still arrive.
SELECT
    ARRAY(SELECT DISTINCT {locked_by}::text FROM {table}
          WHERE {status} = {processing} AND {locked_by} IS NOT NULL LIMIT %(enough)s),
    EXISTS (SELECT 1 FROM {table}
            WHERE {status} = {processing} AND {beat} <> 'infinity'
              AND {beat} > statement_timestamp() - make_interval(secs => %(silent_sec)s))

-- name: reap
-- One batch. Rows are locked in index order, those that others hold are skipped; the holders' rules are
-- looked up only for the rows of this page (under the LIMIT they would be looked up for all rows); the row
-- is judged as it is now, under our lock; what changes and its event are one statement, so that a crash
-- cannot part them. No row back means the job moved on by itself: good news.
WITH page AS MATERIALIZED (
    SELECT
        ctid AS row_ctid, tableoid AS row_table, {id} AS id, {locked_by}::text AS locked_by, {lease} AS lease,
        {beat} AS beat, {start} AS start, {due} AS due, {attempt}::bigint AS attempt,
        {refunded}::bigint AS refunded, {max_attempts}::bigint AS max_attempts, {stage}::text AS stage,
        {expected_ms}::numeric AS expected_ms
    FROM {table}
    WHERE {status} = {processing} AND {which} {after}
      -- Evidence grows old: a reaper that was paused since it asked acts on nothing.
      AND statement_timestamp() < %(as_of)s::timestamptz + make_interval(secs => %(evidence_sec)s)
    ORDER BY {order}
    LIMIT %(limit)s
    {lock}
), sized AS MATERIALIZED (
    SELECT
        page.*,
        -- Exact arithmetic, as in sla.py: a lease must not differ by a second between worker and reaper.
        least(
            greatest(%(default_lease_sec)s::numeric,
                     ceil(expected_ms * (%(factors)s::jsonb ->> stage)::numeric * 0.001)),
            %(max_lease_sec)s::numeric
        )::float8 AS lease_sec,
        nullif(beat, 'infinity') AS seen,
        nullif(start, 'infinity') AS began,
        CASE WHEN locked_by IS NULL THEN %(unknown_rule)s::jsonb
             ELSE coalesce(%(rules)s::jsonb -> locked_by, %(default_rule)s::jsonb) END AS rule
    FROM page
), stamped AS MATERIALIZED (
    SELECT
        sized.*,
        CASE
            -- A lease that ended before this run began belongs to an earlier run.
            WHEN lease IS NULL OR lease < began
                THEN CASE WHEN seen IS NOT NULL THEN 'beat' WHEN began IS NOT NULL THEN 'start' ELSE 'none' END
            WHEN lease > statement_timestamp() + make_interval(secs => greatest(2 * lease_sec, %(far_sec)s))
                THEN CASE WHEN coalesce(seen, began) IS NOT NULL THEN 'far' ELSE 'none' END
            ELSE 'lease'
        END AS kind,
        least(lease_sec * %(defer_factor)s, %(defer_max_sec)s) AS mercy_sec,
        -- An earlier process of the same name claimed this row: only the name is alive.
        coalesce(start < %(as_of)s::timestamptz
                 - make_interval(secs => (rule ->> 'claimed_before_age')::float8), false) AS predecessor
    FROM sized
), measured AS MATERIALIZED (
    SELECT
        stamped.*,
        CASE kind WHEN 'lease' THEN lease WHEN 'far' THEN coalesce(seen, began)
                  WHEN 'beat' THEN seen WHEN 'start' THEN began END AS mark,
        CASE kind WHEN 'lease' THEN 0 WHEN 'far' THEN lease_sec ELSE %(lease_timeout_sec)s END AS allow_sec,
        CASE kind WHEN 'lease' THEN 0 WHEN 'far' THEN lease_sec WHEN 'beat' THEN %(lease_timeout_sec)s
                  ELSE greatest(%(start_stale_sec)s, %(lease_timeout_sec)s, lease_sec) END AS need_sec,
        kind IN ('beat', 'start') AS uncounted,
        CASE WHEN predecessor THEN 'DEAD_INFERRED' ELSE rule ->> 'verdict' END AS verdict,
        CASE WHEN predecessor THEN 'expired' ELSE rule ->> 'mode' END AS mode,
        coalesce(attempt, 0) + (kind IN ('beat', 'start'))::int - coalesce(refunded, 0) AS counted,
        coalesce(max_attempts, %(max_attempts)s) AS attempts_allowed
    FROM stamped
), weighed AS MATERIALIZED (
    SELECT
        measured.*,
        mark < statement_timestamp() - make_interval(secs => need_sec) AS expired,
        verdict LIKE 'DEAD%%' AS dead,
        -- The same identity went on beating other jobs long after this one ran out.
        coalesce(verdict = 'ALIVE' AND mark < statement_timestamp() - make_interval(secs => need_sec)
            AND mark < %(as_of)s::timestamptz - make_interval(secs =>
                allow_sec + (rule ->> 'other_beat_age')::float8 + %(dropped_after_sec)s), false) AS forgotten,
        counted >= attempts_allowed OR attempts_allowed <= 0 AS exhausted
    FROM measured
), judged AS MATERIALIZED (
    SELECT
        weighed.*,
        CASE
            WHEN kind = 'none' THEN 'unleased'
            WHEN rule IS NULL THEN 'no_rule'
            WHEN mode = 'now' AND (rule ->> 'min_silence_sec' IS NULL OR beat IS NULL OR beat
                < statement_timestamp() - make_interval(secs => (rule ->> 'min_silence_sec')::float8))
                THEN CASE WHEN exhausted THEN 'failed' WHEN due > statement_timestamp() THEN 'not_due'
                          ELSE 'requeued' END
            WHEN NOT expired THEN 'live'
            WHEN NOT dead AND %(hold)s THEN 'deferred'
            WHEN patience.sec > 0
                AND NOT mark < statement_timestamp() - make_interval(secs => allow_sec + patience.sec)
                THEN 'deferred'
            WHEN exhausted THEN 'failed'
            WHEN due > statement_timestamp() THEN 'not_due'
            ELSE 'requeued'
        END AS outcome,
        CASE
            WHEN NOT expired THEN 'pod_dead'
            WHEN forgotten THEN 'dropped'
            WHEN mode = 'capped' THEN 'defer_cap'
            WHEN uncounted THEN 'stale'
            ELSE 'lease_expired'
        END AS reason,
        -- random() in a materialized step: the row's clock, its event and our log agree on one delay.
        round(((%(ladder)s::float8[])[least(greatest(counted, 1), array_length(%(ladder)s::float8[], 1))]
               * (1 + random() * %(jitter)s))::numeric, 3)::float8 AS delay_sec,
        CASE WHEN expired AND isfinite(mark)
             THEN extract(epoch FROM statement_timestamp() - mark)::float8 - allow_sec END AS overdue_sec
    FROM weighed
    CROSS JOIN LATERAL (
        SELECT greatest(CASE WHEN mode = 'capped' AND NOT forgotten THEN mercy_sec ELSE 0 END,
                        CASE WHEN dead THEN 0 ELSE %(grace_sec)s END) AS sec
    ) AS patience
), worded AS (
    SELECT
        judged.*,
        CASE WHEN forgotten THEN 'DROPPED' ELSE verdict END AS verdict_word,
        CASE WHEN outcome = 'requeued' THEN delay_sec END AS backoff_sec,
        CASE
            WHEN outcome = 'failed' AND NOT expired THEN 'worker_lost'
            WHEN outcome = 'failed' AND uncounted THEN 'RETRIES_EXHAUSTED'
            WHEN outcome = 'failed' THEN 'timeout'
        END AS fail_code_word,
        CASE
            WHEN outcome = 'failed' AND NOT expired THEN 'pod_dead'
            WHEN outcome = 'failed' AND uncounted THEN 'heartbeat_stale'
            WHEN outcome = 'failed' THEN 'lease_expired'
        END AS fail_reason_word,
        CASE
            WHEN outcome = 'failed' AND NOT expired THEN 'reaper:failed(worker_lost)'
            WHEN outcome = 'failed' AND uncounted THEN 'reaper:failed(retries_exhausted)'
            WHEN outcome = 'failed' THEN 'reaper:failed(timeout)'
            WHEN uncounted AND expired THEN 'requeued:stale'
            ELSE 'reaper:requeued'
        END AS event
    FROM judged
    WHERE outcome IN ('requeued', 'failed')
    LIMIT %(cap)s::bigint
), {touched}
changed AS MATERIALIZED (SELECT touched.*, row_number() OVER () AS line FROM touched)
{written}
SELECT
    (SELECT count(*) FROM page) AS page_rows,
    (SELECT jsonb_build_array({last_key}) FROM page ORDER BY {last_order} LIMIT 1) AS last_key,
    (SELECT coalesce(jsonb_agg(to_jsonb(d)), '[]') FROM (
        SELECT id, outcome, reason, event, verdict_word AS verdict, locked_by, stage, attempt,
               attempts_allowed AS max_attempts, backoff_sec, fail_code_word AS fail_code,
               overdue_sec, rule -> 'pod' AS pod
        FROM changed WHERE line <= %(detail)s) AS d) AS details,
    (SELECT coalesce(jsonb_agg(to_jsonb(g)), '[]') FROM (
        SELECT outcome, reason, stage, width_bucket(overdue_sec, %(buckets)s::float8[]) AS bucket,
               count(*) AS n, sum(overdue_sec) AS overdue_sum
        FROM changed GROUP BY 1, 2, 3, 4) AS g) AS groups,
    (SELECT coalesce(jsonb_agg(to_jsonb(h)), '[]') FROM (
        SELECT outcome, reason, locked_by, count(*) AS n
        FROM changed WHERE line > %(detail)s GROUP BY 1, 2, 3) AS h) AS holders,
    (SELECT coalesce(jsonb_object_agg(outcome, n), '{{}}') FROM (
        SELECT outcome, count(*) AS n FROM judged GROUP BY 1) AS o) AS judged,
    (SELECT coalesce(jsonb_agg(id), '[]') FROM (
        SELECT id FROM judged WHERE outcome = 'deferred' LIMIT %(deferred_detail)s) AS s) AS deferred,
    statement_timestamp() < %(as_of)s::timestamptz + make_interval(secs => %(evidence_sec)s) AS fresh

-- name: touched
-- Hand jobs back or end them, but only those that are still the run we judged. The join is by physical
-- row: a row that was rewritten between our snapshot and our lock is not found, and waits for the next
-- pass. RETURNING sees the judged row too, so the event tells the values as they were before.
touched AS (
    UPDATE {table} AS t SET
        {status} = (CASE w.outcome WHEN 'failed' THEN {failed} ELSE {queued} END)::{status_type},
        {locked_by} = NULL, {lease} = NULL, {beat} = NULL, {start} = NULL,
        {due} = CASE w.outcome WHEN 'requeued'
                THEN statement_timestamp() + make_interval(secs => w.delay_sec) ELSE t.{due} END,
        {attempt} = CASE WHEN w.outcome = 'requeued' AND w.uncounted
                    THEN least(coalesce(w.attempt, 0) + 1, %(attempt_ceiling)s)::{attempt_type}
                    ELSE t.{attempt} END,
        {fail_code} = coalesce(w.fail_code_word, t.{fail_code}),
        {fail_reason} = coalesce(w.fail_reason_word, t.{fail_reason})
    FROM worded AS w
    WHERE t.ctid = w.row_ctid AND t.tableoid = w.row_table AND t.{status} = {processing}
    RETURNING w.*
),

-- name: written
, written AS (
    INSERT INTO {events} ({event_job_id}, {event_data})
    SELECT
        id::{event_job_id_type},
        jsonb_build_object(
            'type', event, 'table', {name}::text, 'at', statement_timestamp(),
            'details', jsonb_build_object(
                'reason', reason, 'verdict', verdict_word, 'locked_by', locked_by, 'attempt', attempt,
                'max_attempts', attempts_allowed, 'stage', stage, 'lease_expires_at', lease,
                'last_heartbeat_at', beat, 'processing_started_at', start, 'backoff_sec', backoff_sec,
                'fail_code', fail_code_word, 'pod', rule -> 'pod')
        )::{event_data_type}
    FROM changed
)

-- name: would_touch
-- The dry run judges the same rows by the same rule and stops here.
touched AS (SELECT * FROM worded),

-- name: peek
-- The key of the next row, read without a lock, to step over one that cannot be written.
SELECT jsonb_build_array({last_key}), to_jsonb({id})
FROM {table}
WHERE {status} = {processing} AND {which} {after}
ORDER BY {order}
LIMIT 1
