-- The reaper's own memory: who runs the pass, when one last succeeded, what was counted. One small table,
-- short statements, no session state: it works through PgBouncer in transaction mode.

-- name: take
-- Take the pass for a while, unless somebody else holds it. A gap since the last success is remembered:
-- after an outage of ours or of the database the silent-fleet brake counts from here.
INSERT INTO {state} AS s (scope, holder, until, updated_at)
VALUES (%(scope)s, %(holder)s, now() + make_interval(secs => %(ttl_sec)s), now())
ON CONFLICT (scope) DO UPDATE SET
    holder = excluded.holder,
    until = excluded.until,
    updated_at = now(),
    -- Only once per gap: a pass that keeps failing must not push the brake's grace ahead of itself.
    resumed_at = CASE WHEN s.last_success_at < now() - make_interval(secs => %(gap_sec)s)
                       AND (s.resumed_at IS NULL OR s.resumed_at < s.last_success_at)
                      THEN now() ELSE s.resumed_at END
WHERE s.until IS NULL OR s.until <= now() OR s.holder = excluded.holder
RETURNING extract(epoch FROM now() - resumed_at)::float8

-- name: keep
-- Renew what is ours. No row back: another reaper has taken the pass over.
UPDATE {state} SET until = now() + make_interval(secs => %(ttl_sec)s), updated_at = now()
WHERE scope = %(scope)s AND holder = %(holder)s
RETURNING scope

-- name: give_back
UPDATE {state} SET
    until = now(),
    last_success_at = CASE WHEN %(success)s THEN now() ELSE last_success_at END,
    updated_at = now()
WHERE scope = %(scope)s AND holder = %(holder)s
RETURNING scope

-- name: who
SELECT holder, greatest(extract(epoch FROM until - now()), 0)::float8 FROM {state} WHERE scope = %(scope)s

-- name: count
-- Add to the counters of one table, in the batch's own transaction.
INSERT INTO {state} AS s (scope, counters, updated_at)
VALUES (%(scope)s, %(counts)s::jsonb, now())
ON CONFLICT (scope) DO UPDATE SET
    updated_at = now(),
    counters = s.counters || (
        SELECT jsonb_object_agg(key, coalesce((s.counters ->> key)::bigint, 0) + value::bigint)
        FROM jsonb_each_text(excluded.counters))

-- name: totals
SELECT scope, counters, extract(epoch FROM last_success_at)::float8 FROM {state}
WHERE scope = ANY(%(scopes)s)

-- name: usable
-- Whether the table is there and writable; a reaper without it still reaps, it only cannot count.
SELECT
    to_regclass(%(state)s) IS NOT NULL
    -- One by one: a list in one call asks for any of them.
    AND has_table_privilege(to_regclass(%(state)s)::oid, 'SELECT') IS TRUE
    AND has_table_privilege(to_regclass(%(state)s)::oid, 'INSERT') IS TRUE
    AND has_table_privilege(to_regclass(%(state)s)::oid, 'UPDATE') IS TRUE
