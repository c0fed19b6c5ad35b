-- The reaper's own memory: who runs the pass and until when, when one last succeeded, what was counted.
-- One row per scope, updated a few times a pass: room on the page keeps those updates HOT.
--
-- Lock: none on any table of the app. Safe to repeat.

-- name: create
CREATE TABLE IF NOT EXISTS {state} (
    scope text PRIMARY KEY,
    holder text,
    until timestamptz,
    last_success_at timestamptz,
    resumed_at timestamptz,
    counters jsonb NOT NULL DEFAULT '{{}}',
    updated_at timestamptz NOT NULL DEFAULT now()
) WITH (fillfactor = 70);
