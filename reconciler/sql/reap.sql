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
    CASE WHEN seen.without_lease THEN (
        SELECT count(*) FROM {table} WHERE {status} = {processing} AND {is_stale}) ELSE 0 END AS stale,
    -- Two probes instead of one OR: each finds its few rows by the index.
    CASE WHEN seen.without_lease THEN (
        SELECT count(*) FROM {table} WHERE {status} = {processing} AND {is_unstamped}) ELSE 0 END
    + (SELECT count(*) FROM {table} WHERE {status} = {processing} AND {is_far_unstamped}) AS unleased
FROM (
    SELECT
        count(*) AS n,
        coalesce(extract(epoch FROM statement_timestamp() - min({lease}) FILTER (WHERE isfinite({lease}))), 0)
            ::float8 AS oldest_sec
    FROM {table}
    WHERE {status} = {processing} AND {is_expired}
) AS e
CROSS JOIN (
    -- NULL sorts as the last lease: one row read off the index says whether there is any. Asked to look for
    -- them, the planner, who knows that most rows have no lease (the finished ones), reads every job at work.
    SELECT coalesce((
        SELECT {lease} IS NULL FROM {table} WHERE {status} = {processing} ORDER BY {lease} DESC LIMIT 1), false)
        AS without_lease
    OFFSET 0
) AS seen

-- name: processing_count
-- Only asked when brake.maxExpiredShare is set: the share needs a whole.
SELECT count(*) FROM {table} WHERE {status} = {processing}

-- name: holders
-- Who must be asked about. Those waiting longest come first: what does not fit is judged in the next pass.
SELECT holder FROM (
    SELECT {locked_by}::text AS holder, min({lease}) AS since FROM {table}
    WHERE {status} = {processing} AND {is_expired} AND {locked_by} IS NOT NULL GROUP BY 1
    UNION ALL
    SELECT {locked_by}::text, min({lease}) FROM {table}
    WHERE {status} = {processing} AND {is_far} AND {locked_by} IS NOT NULL GROUP BY 1
    UNION ALL
    SELECT {locked_by}::text, min(coalesce({beat}, {start})) FROM {table}
    WHERE {status} = {processing} AND {is_stale} AND {locked_by} IS NOT NULL GROUP BY 1
) AS waiting
GROUP BY holder
ORDER BY min(since)
LIMIT %(limit)s

-- name: fleet
-- Only asked when brake.outageGraceSec is set: a few holders are enough to call it a fleet, one fresh
-- beat is enough to know that beats still arrive.
SELECT
    ARRAY(SELECT DISTINCT {locked_by}::text FROM {table}
          WHERE {status} = {processing} AND {locked_by} IS NOT NULL LIMIT %(enough)s),
    EXISTS (SELECT 1 FROM {table}
            WHERE {status} = {processing} AND {beat} < statement_timestamp() + interval '1 day'
              AND {beat} > statement_timestamp() - make_interval(secs => %(silent_sec)s))

-- name: reap
-- One batch. Rows are locked in index order, those that others hold are skipped; the holders' rules are
-- looked up only for the rows of this page (under the LIMIT they would be looked up for all rows); the row
-- is judged as it is now, under our lock; what changes and its event are one statement, so that a crash
-- cannot part them. No row back means the job moved on by itself: good news.
--
-- Each step names what the next one needs; OFFSET 0 keeps the planner from folding the steps into one
-- another, which would evaluate every expression many times over.
WITH {edge} page AS MATERIALIZED (
    SELECT
        ctid AS row_ctid, tableoid AS row_table, {id} AS id, {locked_by}::text AS locked_by, {lease} AS lease,
        {beat} AS beat, {start} AS start, {due} AS due, {attempt}::bigint AS attempt,
        {refunded}::bigint AS refunded, {max_attempts}::bigint AS max_attempts, {stage}::text AS stage,
        {expected_ms} AS expected_ms
    FROM {table}
    WHERE {status} = {processing} AND {which} {after} {up_to_edge}
      -- Evidence grows old: a reaper that was paused since it asked acts on nothing.
      AND statement_timestamp() < %(as_of)s::timestamptz + make_interval(secs => %(evidence_sec)s)
    ORDER BY {order}
    LIMIT %(limit)s
    {lock}
), ruled AS (
    SELECT
        page.*,
        -- The holder's rule. No rule at all (NULL verdict) leaves the row for the next pass.
        r.*,
        -- A beat or a start more than a day ahead says nothing, like infinity.
        CASE WHEN beat <= statement_timestamp() + make_interval(secs => %(far_sec)s) THEN beat END AS beaten,
        CASE WHEN start <= statement_timestamp() + make_interval(secs => %(far_sec)s) THEN start END AS started
    FROM page CROSS JOIN LATERAL ({rule}) AS r
    OFFSET 0
), measured AS (
    SELECT
        ruled.*,
        -- Exact arithmetic, as in sla.py: a lease must not differ by a second between worker and reaper. It is
        -- dear, so it is done only where a step below asks for it; NULL for a lease that is simply over.
        CASE
            WHEN NOT (coalesce(lease < started, true) OR mode = 'capped'
                      OR lease > statement_timestamp() + make_interval(secs => %(far_sec)s)) THEN NULL
            WHEN expected_ms IS NULL THEN %(default_lease_sec)s
            ELSE least(greatest(%(default_lease_sec)s::numeric,
                                ceil(expected_ms * (%(factors)s::jsonb ->> stage)::numeric * 0.001)),
                       %(max_lease_sec)s::numeric)::float8
        END AS lease_sec
    FROM ruled
    OFFSET 0
), stamped AS (
    -- The stamp that decides (SPEC.md decision 2).
    SELECT
        measured.*,
        CASE
            -- A lease that ended before this run began belongs to an earlier run.
            WHEN lease IS NULL OR lease < least(started, statement_timestamp()) AND started IS NOT NULL THEN
                CASE WHEN beaten IS NOT NULL THEN 'beat' WHEN started IS NOT NULL THEN 'start' ELSE 'none' END
            WHEN lease > statement_timestamp() + make_interval(secs => greatest(2 * lease_sec, %(far_sec)s))
                THEN CASE WHEN coalesce(beaten, started) IS NOT NULL THEN 'far' ELSE 'none' END
            ELSE 'lease'
        END AS kind
    FROM measured
    OFFSET 0
), counted AS (
    SELECT
        stamped.*,
        CASE WHEN kind = 'lease' THEN lease ELSE coalesce(beaten, started) END AS mark,
        CASE kind WHEN 'lease' THEN 0 WHEN 'far' THEN lease_sec WHEN 'beat' THEN %(lease_timeout_sec)s
            ELSE greatest(%(start_stale_sec)s, %(lease_timeout_sec)s, lease_sec) END AS need_sec,
        CASE kind WHEN 'lease' THEN 0 WHEN 'far' THEN lease_sec ELSE %(lease_timeout_sec)s END AS allow_sec,
        kind IN ('beat', 'start') AS uncounted,
        coalesce(attempt, 0) - coalesce(refunded, 0) + CASE WHEN kind IN ('beat', 'start') THEN 1 ELSE 0 END
            AS attempts_counted,
        coalesce(max_attempts, %(max_attempts)s) AS attempts_allowed
    FROM stamped
    OFFSET 0
), aged AS (
    SELECT
        counted.*,
        mark < statement_timestamp() - make_interval(secs => need_sec) AS expired,
        -- The same identity went on beating other jobs long after this one ran out.
        coalesce(verdict = 'ALIVE' AND mark < %(as_of)s::timestamptz - make_interval(secs =>
            allow_sec + other_beat_age + %(dropped_after_sec)s), false) AS forgotten
    FROM counted
    OFFSET 0
), patient AS (
    SELECT
        aged.*,
        greatest(
            CASE WHEN mode = 'capped' AND NOT forgotten
                 THEN least(lease_sec * %(defer_factor)s, %(defer_max_sec)s) ELSE 0 END,
            CASE WHEN dead THEN 0 ELSE %(grace_sec)s END) AS patience_sec
    FROM aged
    OFFSET 0
), fated AS (
    SELECT
        patient.*,
        CASE
            WHEN kind = 'none' THEN 'unleased'
            WHEN verdict IS NULL THEN 'no_rule'
            WHEN NOT (
                CASE WHEN mode = 'now' AND (min_silence_sec IS NULL OR beat IS NULL OR beat
                    < statement_timestamp() - make_interval(secs => min_silence_sec)) THEN true
                ELSE expired
                    AND (dead OR NOT %(hold)s)
                    AND (patience_sec = 0 OR mark
                         < statement_timestamp() - make_interval(secs => allow_sec + patience_sec))
                END
            ) THEN CASE WHEN expired THEN 'deferred' ELSE 'live' END
            WHEN attempts_counted >= attempts_allowed OR attempts_allowed <= 0 THEN 'failed'
            WHEN due > statement_timestamp() THEN 'not_due'
            ELSE 'requeued'
        END AS outcome
    FROM patient
    OFFSET 0
), judged AS MATERIALIZED (
    -- From here on rows are kept in memory: only what is still asked for.
    SELECT
        row_ctid, row_table, id, locked_by, lease, beat, start, attempt, attempts_allowed, stage, uncounted, expired,
        outcome, pod,
        CASE
            WHEN NOT expired THEN 'pod_dead'
            WHEN forgotten THEN 'dropped'
            WHEN mode = 'capped' THEN 'defer_cap'
            WHEN uncounted THEN 'stale'
            ELSE 'lease_expired'
        END AS reason,
        CASE WHEN forgotten AND expired THEN 'DROPPED' ELSE verdict END AS verdict,
        CASE WHEN expired AND isfinite(mark)
             THEN date_part('epoch', statement_timestamp() - mark) - allow_sec END AS overdue_sec,
        -- Rounded once here: the row's clock, its event and our log agree on one delay.
        CASE WHEN outcome = 'requeued' THEN trunc(1000 * (1 + random() * %(jitter)s)
            * (%(ladder)s::float8[])[least(greatest(attempts_counted, 1), array_length(%(ladder)s::float8[], 1))]
        ) / 1000 END AS backoff_sec
    FROM fated
), worded AS (
    SELECT
        judged.*,
        {event} AS event,
        CASE WHEN outcome = 'failed' THEN
            CASE WHEN NOT expired THEN 'worker_lost' WHEN uncounted THEN 'RETRIES_EXHAUSTED' ELSE 'timeout' END
        END AS fail_code,
        CASE WHEN outcome = 'failed' THEN
            CASE WHEN NOT expired THEN 'pod_dead' WHEN uncounted THEN 'heartbeat_stale' ELSE 'lease_expired' END
        END AS fail_reason
    FROM judged
    WHERE outcome IN ('requeued', 'failed')
    LIMIT %(cap)s::bigint
), {touched}
SELECT
    (SELECT jsonb_build_array({last_key}) FROM judged {last_which} ORDER BY id DESC LIMIT 1),
    {edge_key},
    (SELECT jsonb_object_agg(outcome, n) FROM (
        SELECT outcome, count(*) AS n FROM judged GROUP BY 1) AS o),
    (SELECT jsonb_agg(id) FROM (
        SELECT id FROM judged WHERE outcome = 'deferred' LIMIT %(deferred_detail)s) AS s),
    statement_timestamp() < %(as_of)s::timestamptz + make_interval(secs => %(evidence_sec)s),
    {told}

-- name: told_each
-- The first jobs of a pass are told one by one.
(SELECT json_agg(json_build_array(
    id, outcome, reason, event, verdict, locked_by, stage, attempt, attempts_allowed, backoff_sec, fail_code,
    overdue_sec, pod)) FROM touched),
NULL

-- name: told_groups
-- Later ones are summed up where they are: a million rows must not travel to be counted.
NULL,
(SELECT json_agg(json_build_array(outcome, reason, stage, bucket, locked_by, n, overdue_sum, by_holder))
 FROM (
    SELECT outcome, reason, stage, width_bucket(overdue_sec, %(buckets)s::float8[]) AS bucket, locked_by,
           count(*) AS n, sum(overdue_sec) AS overdue_sum, grouping(locked_by) = 0 AS by_holder
    FROM touched GROUP BY GROUPING SETS ((1, 2, 3, 4), (1, 2, 5))) AS g)

-- name: rule_per_holder
SELECT
    CASE WHEN w.earlier THEN 'DEAD_INFERRED' ELSE w.j ->> 'verdict' END AS verdict,
    CASE WHEN w.earlier THEN 'expired' ELSE w.j ->> 'mode' END AS mode,
    w.earlier OR w.j ->> 'verdict' LIKE 'DEAD%%' AS dead,
    CASE WHEN NOT w.earlier THEN (w.j ->> 'other_beat_age')::float8 END AS other_beat_age,
    CASE WHEN NOT w.earlier THEN (w.j ->> 'min_silence_sec')::float8 END AS min_silence_sec,
    w.j -> 'pod' AS pod
FROM (
    SELECT
        g.j,
        -- An earlier process of the same name claimed this row: only the name is alive.
        coalesce(start < %(as_of)s::timestamptz
            - make_interval(secs => (g.j ->> 'claimed_before_age')::float8), false) AS earlier
    FROM (SELECT CASE WHEN locked_by IS NULL THEN %(unknown_rule)s::jsonb
                      ELSE coalesce(%(rules)s::jsonb -> locked_by, %(default_rule)s::jsonb) END AS j OFFSET 0) AS g
    OFFSET 0
) AS w

-- name: rule_for_all
-- Nobody was asked (liveness is off): the lease alone decides for every holder.
SELECT 'UNKNOWN'::text AS verdict, 'expired'::text AS mode, false AS dead, NULL::float8 AS other_beat_age,
       NULL::float8 AS min_silence_sec, NULL::jsonb AS pod

-- name: event
CASE
    WHEN outcome = 'failed' THEN
        CASE WHEN NOT expired THEN 'reaper:failed(worker_lost)'
             WHEN uncounted THEN 'reaper:failed(retries_exhausted)' ELSE 'reaper:failed(timeout)' END
    WHEN uncounted AND expired THEN 'requeued:stale'
    ELSE 'reaper:requeued'
END

-- name: touched
-- Hand jobs back or end them, but only those that are still the run we judged. The join is by physical
-- row: a row that was rewritten between our snapshot and our lock is not found, and waits for the next
-- pass. RETURNING sees the judged row too, so the event tells the values as they were before.
touched AS (
    UPDATE {table} AS t SET
        {status} = (CASE w.outcome WHEN 'failed' THEN {failed} ELSE {queued} END)::{status_type},
        {locked_by} = NULL, {lease} = NULL, {beat} = NULL, {start} = NULL,
        {due} = CASE w.outcome WHEN 'requeued'
                THEN statement_timestamp() + make_interval(secs => w.backoff_sec) ELSE t.{due} END,
        {attempt} = CASE WHEN w.outcome = 'requeued' AND w.uncounted
                    THEN least(coalesce(w.attempt, 0) + 1, %(attempt_ceiling)s)::{attempt_type}
                    ELSE t.{attempt} END,
        {fail_code} = coalesce(w.fail_code, t.{fail_code}),
        {fail_reason} = coalesce(w.fail_reason, t.{fail_reason})
    FROM worded AS w
    WHERE t.ctid = w.row_ctid AND t.tableoid = w.row_table AND t.{status} = {processing}
    RETURNING
        w.id, w.outcome, w.reason, w.event, w.verdict, w.locked_by, w.stage, w.attempt, w.attempts_allowed, w.lease,
        w.beat, w.start, w.backoff_sec, w.fail_code, w.overdue_sec, w.pod
), written AS (
    INSERT INTO {events} ({event_job_id}, {event_data})
    SELECT
        id::{event_job_id_type},
        jsonb_build_object(
            'type', event, 'table', {name}::text, 'at', statement_timestamp(),
            'details', jsonb_build_object(
                'reason', reason, 'verdict', verdict, 'locked_by', locked_by, 'attempt', attempt,
                'max_attempts', attempts_allowed, 'stage', stage, 'lease_expires_at', lease,
                'last_heartbeat_at', beat, 'processing_started_at', start, 'backoff_sec', backoff_sec,
                'fail_code', fail_code, 'pod', pod)
        )::{event_data_type}
    FROM touched
)

-- name: would_touch
-- The dry run judges the same rows by the same rule and stops here.
touched AS (SELECT * FROM worded)

-- name: edge
-- Where this page ends, read off the index. Without it a planner whose statistics are older than the
-- outage sorts every expired row for every page. NULL: there is no full page left. It is told, because a
-- page that others' locks have thinned out is not the last one.
edge AS MATERIALIZED (
    SELECT (SELECT {lease} FROM {table} WHERE {status} = {processing} AND {which} {after}
            ORDER BY {lease} OFFSET greatest(%(limit)s - 1, 0) LIMIT 1) AS lease
),

-- name: peek
-- The next row nobody else holds: the one a batch of one would try. It is named before it is tried, so
-- that a row which cannot be written is the one that gets blamed.
SELECT jsonb_build_array({last_key}), to_jsonb({id})
FROM {table}
WHERE {status} = {processing} AND {which} {after}
ORDER BY {order}
LIMIT 1
{lock}
