-- The columns of the documents, and attempts_refunded: runs that did not count.
--
-- All in one statement, so that the table is locked once. Lock: ACCESS EXCLUSIVE, for the milliseconds a
-- change of the catalogue takes; it waits at most lock_timeout, then steps back and tries again, so that
-- workers never queue up behind it. No rewrite, no scan: every column is nullable or has a constant
-- default, which Postgres keeps in the catalogue since version 11. Old workers do not see the difference:
-- whatever they insert takes the defaults.
--
-- Columns that exist are left exactly as they are.

-- name: table
ALTER TABLE {table}
    ADD COLUMN IF NOT EXISTS {locked_by} text,
    ADD COLUMN IF NOT EXISTS {lease_expires_at} timestamptz,
    ADD COLUMN IF NOT EXISTS {last_heartbeat_at} timestamptz,
    ADD COLUMN IF NOT EXISTS {processing_started_at} timestamptz,
    ADD COLUMN IF NOT EXISTS {attempt_count} int NOT NULL DEFAULT 0,
    ADD COLUMN IF NOT EXISTS {max_attempts} int NOT NULL DEFAULT {default_max_attempts},
    ADD COLUMN IF NOT EXISTS {attempts_refunded} int NOT NULL DEFAULT 0,
    ADD COLUMN IF NOT EXISTS {fail_code} text,
    ADD COLUMN IF NOT EXISTS {fail_reason} text,
    ADD COLUMN IF NOT EXISTS {stage} text,
    ADD COLUMN IF NOT EXISTS {next_earliest_run_at} timestamptz,
    ADD COLUMN IF NOT EXISTS {expected_duration_ms} int;
