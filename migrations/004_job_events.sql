-- Where events are written, for a database where the app does not own such a table yet.
--
-- job_id is text: one event table serves several job tables, whose ids may be uuid, bigint or text, and
-- text is the one type each of them can be cast to. The index serves the history of one job.
--
-- Only run when there is no such table. Lock: none on any table of the app. Safe to repeat.

-- name: create
CREATE TABLE IF NOT EXISTS {events} (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    {job_id} text NOT NULL,
    {data} jsonb NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now()
);

-- name: index
-- On a table that was created a moment ago: there is nobody to block and nothing to scan.
CREATE INDEX IF NOT EXISTS {events_index} ON {events} ({job_id});
