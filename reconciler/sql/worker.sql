-- The worker's queries. {names} are the app's identifiers and words, filled by the driver; see
-- worker/statements.py. Each primitive is one statement.
--
-- Instants are Postgres' own (statement_timestamp(): a caller's long transaction must not shorten a lease,
-- and a wait for a row lock must not lengthen one). Rows are locked FOR NO KEY UPDATE: an app that inserts
-- a child row holds a key-share lock on the job, which must neither hide it from a claim nor stop a beat.
--
-- Words are untyped literals on purpose: beside the column they take its type, be it text, varchar or an enum.

-- name: fence
-- The run we own, and nothing else. A worker's name alone is no proof: the same worker may hold a later
-- run of the same job, and its zombie must not beat or finish that one.
j.{id} = %(id)s AND j.{locked_by} = %(holder)s AND j.{attempt} = %(attempt)s AND j.{status} = {processing}

-- name: lease_sec
-- As in sla.py, in exact arithmetic; greatest() ignores the NULL of an unknown stage or duration.
coalesce(%(lease_sec)s::float8, least(
    greatest(%(default_lease_sec)s::numeric,
             ceil(j.{expected_ms}::numeric * (%(factors)s::jsonb ->> j.{stage}::text)::numeric * 0.001)),
    %(max_lease_sec)s::numeric)::float8)

-- name: beat_at
-- Strictly later than the claim, even in one transaction or after the server's clock was set back: the
-- reaper tells a beat from a fresh claim by that.
greatest(statement_timestamp(), j.{start} + interval '1 microsecond')

-- name: lease_at
-- A beat that waited long for its row may arrive after a later one: it must not shorten that one's lease.
CASE WHEN j.{beat} > statement_timestamp() AND j.{lease} <> 'infinity'
     THEN greatest(j.{lease}, statement_timestamp() + make_interval(secs => {length}))
     ELSE statement_timestamp() + make_interval(secs => {length}) END

-- name: counter
-- A counter that saturates: an overflow in a claim would freeze the queue behind that row.
least(coalesce(j.{column}, 0)::bigint + 1, CASE pg_typeof(j.{column})
    WHEN 'smallint'::regtype THEN 32767 WHEN 'integer'::regtype THEN 2147483647
    ELSE 9223372036854775806 END)

-- name: claim
-- Take queued, due, unexhausted jobs. The attempt grows here and never shrinks: it is the fencing token.
-- `absent` answers for a table without a max_attempts column: inside the LATERAL the bare name means the
-- table's column where there is one, and falls through to this NULL where there is none.
WITH picked AS MATERIALIZED (
    SELECT p.*
    FROM (SELECT NULL::bigint AS {max_attempts}) AS absent
    CROSS JOIN LATERAL (
        SELECT
            j.{id} AS id,
            {lease_sec} AS lease_sec,
            -- Left behind by a dead run: a retry says why in fail_code, a release leaves no delay.
            coalesce(j.{attempt}, 0) > 0 AND j.{due} IS NOT NULL AND j.{fail_code} IS NULL AS recovered
        FROM {table} AS j
        WHERE {which}
          AND j.{status} = {queued}
          AND (j.{due} IS NULL OR j.{due} <= statement_timestamp())
          AND coalesce({max_attempts}::bigint, %(max_attempts)s)
              > greatest(coalesce(j.{attempt}, 0)::bigint - coalesce(j.{refunded}, 0)::bigint, 0)
        {page}
    ) AS p
)
UPDATE {table} AS j SET
    {status} = {processing},
    {locked_by} = %(holder)s,
    {attempt} = {next_attempt},
    {lease} = statement_timestamp() + make_interval(secs => picked.lease_sec),
    {beat} = statement_timestamp(),
    {start} = statement_timestamp(),
    {due} = NULL,
    {fail_code} = NULL,
    {fail_reason} = NULL
FROM picked
WHERE j.{id} = picked.id
RETURNING j.{id}, j.{attempt}::bigint, j.{stage}::text, picked.lease_sec, picked.recovered

-- name: one
-- One id. It waits for a row lock: "somebody else took it" must not be said of a row the app merely edits.
j.{id} = %(id)s

-- name: one_page
FOR NO KEY UPDATE OF j

-- name: any
true

-- name: staged
j.{stage}::text = ANY(%(stages)s::text[])

-- name: any_page
-- Retries that have come due first (they have waited, and are few), then by id. SKIP LOCKED: a hundred
-- workers must not queue up behind one row.
ORDER BY j.{due}, j.{id} LIMIT %(limit)s FOR NO KEY UPDATE OF j SKIP LOCKED

-- name: beat
-- One beat: waits its turn in the row's lock queue, so that it cannot starve behind a busy app.
UPDATE {table} AS j SET
    {beat} = {beat_at},
    {lease} = {lease_at}
WHERE {fence}
RETURNING {lease_sec}

-- name: beat_batch
-- All of a worker's jobs in one UPDATE. Rows that somebody locks are skipped, never waited for: one stuck
-- row must not stop the beats of all others. They come back as busy, to be beaten singly.
WITH held AS MATERIALIZED (
    {held}
), free AS MATERIALIZED (
    SELECT h.ord, j.{id} AS id, coalesce(h.lease_sec, {lease_sec}) AS lease_sec
    FROM {table} AS j
    JOIN held AS h ON j.{id} = h.id
    WHERE j.{locked_by} = h.holder AND j.{attempt} = h.attempt AND j.{status} = {processing}
    ORDER BY j.{id}
    FOR NO KEY UPDATE OF j SKIP LOCKED
), beaten AS (
    UPDATE {table} AS j SET
        {beat} = {beat_at},
        {lease} = {batch_lease_at}
    FROM free
    WHERE j.{id} = free.id
    RETURNING free.ord, free.lease_sec
)
SELECT
    h.ord, b.lease_sec,
    -- Still ours as far as this snapshot sees, yet not beaten: somebody holds the row.
    b.ord IS NULL AND EXISTS (
        SELECT FROM {table} AS j
        WHERE j.{id} = h.id AND j.{locked_by} = h.holder AND j.{attempt} = h.attempt
          AND j.{status} = {processing}) AS busy
FROM held AS h
LEFT JOIN beaten AS b USING (ord)
ORDER BY h.ord

-- name: held_uuid
SELECT e.* FROM unnest(%(ids)s::uuid[], %(holders)s::text[], %(attempts)s::bigint[], %(leases)s::float8[])
    WITH ORDINALITY AS e(id, holder, attempt, lease_sec, ord)

-- name: held_bigint
SELECT e.* FROM unnest(%(ids)s::bigint[], %(holders)s::text[], %(attempts)s::bigint[], %(leases)s::float8[])
    WITH ORDINALITY AS e(id, holder, attempt, lease_sec, ord)

-- name: held_text
-- Ids that come as text may belong to a column of any type: jsonb_populate_record gives them that type.
SELECT r.{id} AS id, e.holder, e.attempt, e.lease_sec, e.ord
FROM unnest(%(ids)s::text[], %(holders)s::text[], %(attempts)s::bigint[], %(leases)s::float8[])
    WITH ORDINALITY AS e(id, holder, attempt, lease_sec, ord)
CROSS JOIN LATERAL jsonb_populate_record(NULL::{table}, jsonb_build_object(%(id_column)s::text, e.id)) AS r

-- name: set_stage
-- The next stage has its own SLA: stage and lease change together, so that no beat falls between them.
UPDATE {table} AS j SET
    {stage} = %(stage)s,
    {expected_ms} = coalesce(%(expected_ms)s, j.{expected_ms}),
    {beat} = {beat_at},
    {lease} = statement_timestamp() + make_interval(secs => {new_lease_sec})
WHERE {fence}
RETURNING {lease_sec}

-- name: new_lease_sec
-- lease_sec, by the stage the row is about to have.
coalesce(%(lease_sec)s::float8, least(
    greatest(%(default_lease_sec)s::numeric,
             ceil(coalesce(%(expected_ms)s, j.{expected_ms})::numeric
                  * (%(factors)s::jsonb ->> %(stage_key)s::text)::numeric * 0.001)),
    %(max_lease_sec)s::numeric)::float8)

-- name: finish
-- The end of a run, good or bad: the lock fields are cleared, so that nothing looks held any more.
UPDATE {table} AS j SET
    {status} = {ending},
    {locked_by} = NULL, {lease} = NULL, {beat} = NULL, {start} = NULL,
    {fail_code} = %(code)s,
    {fail_reason} = %(reason)s
WHERE {fence}
RETURNING true

-- name: retry
-- Back into the queue with a delay that grows, or failed when the attempts are used up: judged by the row
-- as it is now, under its lock. fail_code keeps the reason of the last run until the next claim.
WITH mine AS MATERIALIZED (
    SELECT p.*
    FROM (SELECT NULL::bigint AS {max_attempts}) AS absent
    CROSS JOIN LATERAL (
        SELECT
            j.{id} AS id,
            greatest(coalesce(j.{attempt}, 0)::bigint - coalesce(j.{refunded}, 0)::bigint, 0) AS counted,
            coalesce({max_attempts}::bigint, %(max_attempts)s) AS allowed
        FROM {table} AS j
        WHERE {fence}
        FOR NO KEY UPDATE OF j
    ) AS p
), weighed AS MATERIALIZED (
    SELECT
        id,
        counted >= allowed AS exhausted,
        -- Jitter after the cap and additive: never earlier than asked, and no herd.
        round(((%(ladder)s::float8[])[least(greatest(counted, 1), array_length(%(ladder)s::float8[], 1))]
               * (1 + random() * %(jitter)s::float8))::numeric, 3)::float8 AS delay_sec
    FROM mine
)
UPDATE {table} AS j SET
    {status} = CASE WHEN w.exhausted THEN {failed} WHEN NOT w.exhausted THEN {queued} ELSE j.{status} END,
    {locked_by} = NULL, {lease} = NULL, {beat} = NULL, {start} = NULL,
    {due} = CASE WHEN NOT w.exhausted THEN statement_timestamp() + make_interval(secs => w.delay_sec) END,
    {fail_code} = %(code)s,
    {fail_reason} = CASE WHEN w.exhausted THEN coalesce(%(reason)s, 'retries_exhausted') ELSE %(reason)s END
FROM weighed AS w
WHERE j.{id} = w.id
RETURNING w.exhausted, w.delay_sec

-- name: release
-- Given back unharmed: at once, and without spending the attempt. The attempt itself never shrinks (it is
-- the fencing token), so the refund is counted beside it.
UPDATE {table} AS j SET
    {status} = {queued},
    {locked_by} = NULL, {lease} = NULL, {beat} = NULL, {start} = NULL,
    {due} = NULL,
    {refunded} = {next_refunded}
WHERE {fence}
RETURNING true

-- name: end_lease
-- This run is over, but its end is the reaper's to tell: no status change, the lease just ends now. Never
-- before the start, or it would read as a leftover of an earlier run.
UPDATE {table} AS j SET {lease} = greatest(statement_timestamp(), j.{start})
WHERE {fence}
RETURNING true

-- name: emit
-- An event of the run we own; a zombie writes none. The id travels as text and takes the type of the
-- events table's own column.
INSERT INTO {events} ({event_job_id}, {event_data})
SELECT %(event_job)s, jsonb_build_object(
    'type', %(type)s::text, 'table', %(name)s::text, 'details', %(details)s::jsonb,
    'at', to_char(statement_timestamp() AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'))
FROM {table} AS j
WHERE {fence}
RETURNING true

-- name: ended_as
-- Did an ending commit although its answer was lost? The attempt is still ours and nobody holds the row.
-- The reaper leaves such a row too: the rest tells its verdict from our ending.
SELECT CASE WHEN j.{status} = {done} THEN 'done' WHEN j.{status} = {failed} THEN 'failed'
            WHEN j.{status} = {queued} THEN 'queued' END,
       j.{fail_code}::text, j.{due} IS NOT NULL
FROM {table} AS j
WHERE j.{id} = %(id)s AND j.{attempt} = %(attempt)s AND j.{locked_by} IS NULL

-- name: row
-- What the app wrote into the job, for the handler that runs it.
SELECT to_jsonb(j) FROM {table} AS j WHERE {fence}

-- name: done_word
{done}

-- name: failed_word
{failed}

-- name: periodic_take
-- One holder at a time, and one start per interval in the whole fleet. A row, not an advisory lock: session
-- locks strand behind PgBouncer, and a transaction held open for a whole task would pin the vacuum.
INSERT INTO {state} AS s (scope, holder, until, counters, updated_at)
VALUES (%(scope)s, %(holder)s, statement_timestamp() + make_interval(secs => %(ttl_sec)s),
        jsonb_build_object('started', extract(epoch FROM statement_timestamp())), statement_timestamp())
ON CONFLICT (scope) DO UPDATE SET
    holder = excluded.holder, until = excluded.until, updated_at = excluded.updated_at,
    counters = s.counters || excluded.counters
WHERE (s.until IS NULL OR s.until <= statement_timestamp())
  -- A little early is not early: each worker's own timer jitters.
  AND coalesce((s.counters ->> 'started')::float8, 0)
      <= extract(epoch FROM statement_timestamp())::float8 - %(every_sec)s::float8 * 0.9
RETURNING true

-- name: periodic_keep
-- Only while it is still ours: who lost it must stop its task.
UPDATE {state} SET until = statement_timestamp() + make_interval(secs => %(ttl_sec)s),
    updated_at = statement_timestamp()
WHERE scope = %(scope)s AND holder = %(holder)s AND until > statement_timestamp()
RETURNING true

-- name: periodic_give
UPDATE {state} SET until = statement_timestamp(), updated_at = statement_timestamp(),
    last_success_at = CASE WHEN %(ok)s THEN statement_timestamp() ELSE last_success_at END
WHERE scope = %(scope)s AND holder = %(holder)s AND until > statement_timestamp()
RETURNING true
