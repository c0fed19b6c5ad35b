-- Wake idle workers the moment a job is queued or requeued. Optional: workers poll as well.
-- A statement-level trigger: one NOTIFY per statement, however many rows it queues.
create or replace function job_reaper_queued() returns trigger language plpgsql as $$
begin
    notify job_reaper_queued;
    return null;
end $$;

create or replace trigger job_reaper_queued
    after insert or update of status on jobs
    for each statement execute function job_reaper_queued();
