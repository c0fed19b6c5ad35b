-- Stands in for the migrations while those are written.
create table jobs (
    id uuid primary key default gen_random_uuid(), status text not null default 'queued',
    locked_by text, lease_expires_at timestamptz, last_heartbeat_at timestamptz, processing_started_at timestamptz,
    attempt_count int not null default 0, attempts_refunded int not null default 0, max_attempts int not null default 3,
    fail_code text, fail_reason text, stage text, next_earliest_run_at timestamptz, expected_duration_ms int
);
create table asr_jobs (like jobs including all);
create table job_events (job_id text not null, data jsonb not null);
create index idx_jobs_status_lease on jobs (status, lease_expires_at);
create index idx_asr_jobs_status_lease on asr_jobs (status, lease_expires_at);
