-- What the catalogue says about a table. pg_catalog is readable by every role, information_schema hides
-- what we may not touch, and then "no rights" would look like "no such column".

-- name: columns
-- One row per column; no row at all means there is no such table on the search path.
SELECT
    c.relkind::text, a.attname, format_type(a.atttypid, a.atttypmod), format_type(b.oid, NULL), b.typtype::text,
    a.attnotnull, a.atthasdef OR a.attidentity <> '' OR a.attgenerated <> '', n.nspname,
    -- Part of a key that another table could refer to: writing it needs the stronger row lock.
    EXISTS (SELECT FROM pg_catalog.pg_index AS i
            WHERE i.indrelid = c.oid AND i.indisunique AND i.indimmediate AND i.indpred IS NULL
              AND i.indexprs IS NULL AND a.attnum = ANY (i.indkey))
FROM pg_catalog.pg_class AS c
JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
JOIN pg_catalog.pg_attribute AS a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
JOIN pg_catalog.pg_type AS t ON t.oid = a.atttypid
JOIN pg_catalog.pg_type AS b ON b.oid = coalesce(nullif(t.typbasetype, 0), t.oid)
WHERE c.oid = to_regclass(%(table)s)
ORDER BY a.attnum

-- name: rights
-- Which of the rights a pass needs are missing, in words a DBA can act on.
SELECT
    has_table_privilege(%(table)s, 'SELECT') OR NOT EXISTS (
        SELECT 1 FROM unnest(%(read)s::text[]) AS x WHERE NOT has_column_privilege(%(table)s, x, 'SELECT')),
    ARRAY(SELECT x FROM unnest(%(write)s::text[]) AS x WHERE NOT has_column_privilege(%(table)s, x, 'UPDATE')),
    (SELECT bool_and(has_column_privilege(%(events)s, x, 'INSERT')) FROM unnest(%(event_columns)s::text[]) AS x)

-- name: server
-- Where we are and whether we may write there.
SELECT pg_is_in_recovery() OR current_setting('transaction_read_only')::bool, current_setting('server_version_num')::int

-- name: castable
-- Fails at parse time when there is no such cast. Of no row: a domain may refuse NULL.
SELECT {id}::{job_id_type} FROM {table} LIMIT 0

-- name: castable_word
-- Fails when the type of the status column does not know this word.
SELECT %(word)s::text::{status_type}
