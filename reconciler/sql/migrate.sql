-- What the catalogue says, for `job-reaper migrate`. Reading only; the changes are in migrations/*.sql.

-- name: server
SELECT
    pg_is_in_recovery() OR current_setting('transaction_read_only')::bool AS read_only,
    current_setting('server_version_num')::int AS version, current_schema() AS schema,
    current_user::text AS role, pg_backend_pid() AS pid

-- name: relation
-- One table by its configured name: in its schema, or where the search path finds it.
SELECT
    c.oid::bigint AS oid, n.nspname AS schema, c.relname AS name, c.relkind::text AS kind,
    c.relispartition AS is_partition, pg_get_userbyid(c.relowner)::text AS owner,
    pg_has_role(c.relowner, 'USAGE') AS is_ours, has_schema_privilege(n.oid, 'CREATE') AS may_create
FROM pg_catalog.pg_class AS c
JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
WHERE c.oid = CASE WHEN %(schema)s::text IS NULL THEN to_regclass(quote_ident(%(table)s))
    ELSE to_regclass(quote_ident(%(schema)s) || '.' || quote_ident(%(table)s)) END

-- name: home
-- Where a missing table would be created, and whether we may.
SELECT n.nspname AS schema, has_schema_privilege(n.oid, 'CREATE') AS may_create
FROM pg_catalog.pg_namespace AS n
WHERE n.nspname = coalesce(%(schema)s, current_schema())

-- name: namesakes
-- Tables that a missing one may have been meant to be: the same word in other letters or another schema.
SELECT quote_ident(n.nspname) || '.' || quote_ident(c.relname) AS name
FROM pg_catalog.pg_class AS c
JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
WHERE c.relkind IN ('r', 'p') AND lower(c.relname) = lower(%(table)s)
  AND n.nspname = coalesce(%(schema)s, n.nspname)
  AND n.nspname NOT LIKE 'pg\_%%' AND n.nspname <> 'information_schema'
ORDER BY 1

-- name: columns
SELECT
    a.attname AS name, format_type(a.atttypid, a.atttypmod) AS type, format_type(b.oid, NULL) AS base,
    CASE WHEN a.atttypmod > 4 AND b.typname IN ('varchar', 'bpchar') THEN a.atttypmod - 4 END AS length,
    a.attnotnull AS not_null, a.atthasdef OR a.attidentity <> '' AS has_default,
    a.attgenerated <> '' AS is_generated,
    ARRAY(SELECT e.enumlabel::text FROM pg_catalog.pg_enum AS e WHERE e.enumtypid = b.oid) AS words
FROM pg_catalog.pg_attribute AS a
JOIN pg_catalog.pg_type AS t ON t.oid = a.atttypid
JOIN pg_catalog.pg_type AS b ON b.oid = coalesce(nullif(t.typbasetype, 0), t.oid)
WHERE a.attrelid = %(oid)s::oid AND a.attnum > 0 AND NOT a.attisdropped
ORDER BY a.attnum

-- name: tree
-- The table and its partitions, parents first. pg_partition_tree() knows nothing of a plain table.
SELECT
    c.oid::bigint AS oid, t.parentrelid::oid::bigint AS parent, n.nspname AS schema, c.relname AS name,
    c.relkind::text AS kind, pg_has_role(c.relowner, 'USAGE') AS is_ours,
    (SELECT o.option_value::int FROM pg_options_to_table(c.reloptions) AS o
     WHERE o.option_name = 'fillfactor') AS fillfactor
FROM pg_catalog.pg_class AS c
JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
LEFT JOIN pg_partition_tree(%(oid)s::oid::regclass) AS t ON t.relid = c.oid
WHERE c.oid = %(oid)s::oid OR t.relid IS NOT NULL
ORDER BY t.level NULLS FIRST, c.oid

-- name: indexes
-- Every index of these tables. `columns` are the key columns (an expression reads NULL), `touches` all
-- columns it depends on, in its predicate too. `plain`: btree, ascending, default operators and collation.
SELECT
    x.indexrelid::bigint AS oid, x.indrelid::bigint AS table_oid, n.nspname AS schema, c.relname AS name,
    ARRAY(SELECT a.attname::text FROM unnest(x.indkey::int2[]) WITH ORDINALITY AS k(attnum, i)
          LEFT JOIN pg_catalog.pg_attribute AS a ON a.attrelid = x.indrelid AND a.attnum = k.attnum AND k.attnum > 0
          WHERE k.i <= x.indnkeyatts ORDER BY k.i) AS columns,
    x.indnkeyatts < x.indnatts AS includes_more,
    ARRAY(SELECT DISTINCT a.attname::text FROM pg_catalog.pg_attribute AS a
          WHERE a.attrelid = x.indrelid AND (a.attnum = ANY (x.indkey::int2[]) OR EXISTS (
              SELECT FROM pg_catalog.pg_depend AS d
              WHERE d.classid = 'pg_class'::regclass AND d.objid = x.indexrelid
                AND d.refclassid = 'pg_class'::regclass AND d.refobjid = x.indrelid
                AND d.refobjsubid = a.attnum AND a.attnum > 0))) AS touches,
    pg_get_expr(x.indpred, x.indrelid) AS predicate,
    m.amname = 'btree' AND NOT EXISTS (
        SELECT FROM unnest(x.indoption::int2[]) AS o(flags) WHERE o.flags <> 0) AND NOT EXISTS (
        SELECT FROM unnest(x.indclass::oid[]) AS p(oid)
        JOIN pg_catalog.pg_opclass AS q ON q.oid = p.oid WHERE NOT q.opcdefault) AS plain,
    x.indisunique OR x.indisexclusion OR EXISTS (
        SELECT FROM pg_catalog.pg_constraint AS k WHERE k.conindid = x.indexrelid) AS is_rule,
    x.indisvalid AND x.indisready AND x.indislive AS valid,
    h.inhparent::bigint AS parent
FROM pg_catalog.pg_index AS x
JOIN pg_catalog.pg_class AS c ON c.oid = x.indexrelid
JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
JOIN pg_catalog.pg_am AS m ON m.oid = c.relam
LEFT JOIN pg_catalog.pg_inherits AS h ON h.inhrelid = x.indexrelid
WHERE x.indrelid = ANY (%(oids)s::bigint[]::oid[])
ORDER BY c.relname

-- name: taken
-- The names that relations of these schemas have: an index needs one that is free.
SELECT n.nspname, c.relname, c.oid::bigint
FROM pg_catalog.pg_class AS c
JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
WHERE n.nspname = ANY (%(schemas)s)

-- name: castable
-- Fails at parse time when Postgres knows no such cast.
SELECT x.id::{job_id_type} FROM (SELECT NULL::text::{id_type} AS id LIMIT 0) AS x

-- name: lock
-- Tried, never waited for: a waiting statement holds a snapshot, and the CREATE INDEX CONCURRENTLY of the
-- migrator that has the lock would wait for that snapshot: a deadlock.
SELECT pg_try_advisory_lock(%(key)s)

-- name: unlock
SELECT pg_advisory_unlock(%(key)s)

-- name: rival
SELECT a.pid, coalesce(a.application_name, '') AS application_name, coalesce(a.client_addr::text, 'local') AS host
FROM pg_catalog.pg_locks AS l
JOIN pg_catalog.pg_stat_activity AS a ON a.pid = l.pid
WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1
  AND (l.classid::bigint << 32) | l.objid::bigint = %(key)s

-- name: records
SELECT step, target, checksum, detail, applied_at::text AS applied_at FROM {bookkeeping}

-- name: record
INSERT INTO {bookkeeping} (step, target, checksum, detail)
VALUES (%(step)s, %(target)s, %(checksum)s, %(detail)s::jsonb)
ON CONFLICT (step, target) DO UPDATE SET
    checksum = excluded.checksum, detail = excluded.detail, applied_at = now()

-- name: forget
DELETE FROM {bookkeeping} WHERE step = %(step)s AND target = %(target)s

-- name: old_transactions
-- What an index that is built or dropped CONCURRENTLY will wait for.
SELECT a.pid, coalesce(a.application_name, '') AS application_name,
       extract(epoch FROM clock_timestamp() - a.xact_start)::int AS age_sec
FROM pg_catalog.pg_stat_activity AS a
WHERE a.xact_start < clock_timestamp() - interval '10 seconds' AND a.pid <> pg_backend_pid()
  AND a.datname = current_database() AND a.backend_type = 'client backend'
ORDER BY a.xact_start
LIMIT 3
