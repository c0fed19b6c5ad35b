-- The least a job table has, for a database where the app does not own one yet. What the reaper and the
-- workers add comes with 005, on new and on old tables alike.
--
-- Only run when there is no such table. Lock: none on any table of the app. Safe to repeat.

-- name: create
CREATE TABLE IF NOT EXISTS {table} (
    {id} uuid PRIMARY KEY DEFAULT gen_random_uuid(),
    {status} text NOT NULL DEFAULT {queued}
);
