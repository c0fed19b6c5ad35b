-- What has been applied to which table, with the checksum of the file that did it. `detail` keeps what a
-- later run must know: which index set was chosen, which fillfactor was there before ours.
--
-- Lock: none on any table of the app. Safe to repeat.

-- name: create
CREATE TABLE IF NOT EXISTS {bookkeeping} (
    step text NOT NULL,
    target text NOT NULL,
    checksum text NOT NULL,
    detail jsonb NOT NULL DEFAULT '{{}}',
    applied_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (step, target)
);
