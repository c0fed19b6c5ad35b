-- Rights for the reaper's own database role, and no more: it can neither read a payload nor insert, delete or
-- finish a job. Run it as the owner of the tables, after `job-reaper migrate`, as often as you like:
--
--     CREATE ROLE job_reaper LOGIN PASSWORD '…';
--     psql "$OWNER_URL" -v ON_ERROR_STOP=1 -f migrations/grants.sql
--
-- Names are variables; these are the defaults. Write names as in SQL: -v tables='"App"."Jobs",asr_jobs'.
--
--     -v role=job_reaper          the reaper
--     -v worker=app_worker        also grant what a worker needs to this role (default: nobody)
--     -v tables=jobs,asr_jobs     the job tables
--     -v events=job_events        the event table, with -v job_id=job_id -v data=data for its columns
--     -v state=reaper_state       the reaper's memory
--     -v read=…  -v write=…  -v stage=…   column lists, where the configuration maps other names than below
--
-- Everything else a pass asks it reads from pg_catalog, which every role may read.

\set ON_ERROR_STOP on
\if :{?role}
\else
    \set role job_reaper
\endif
\if :{?tables}
\else
    \set tables jobs,asr_jobs
\endif
\if :{?events}
\else
    \set events job_events
\endif
\if :{?job_id}
\else
    \set job_id job_id
\endif
\if :{?data}
\else
    \set data data
\endif
\if :{?state}
\else
    \set state reaper_state
\endif
-- What a pass changes. SELECT … FOR UPDATE needs UPDATE on at least one column: it is covered by these.
\if :{?write}
\else
    \set write 'status,locked_by,lease_expires_at,last_heartbeat_at,processing_started_at,next_earliest_run_at,attempt_count,attempts_refunded,fail_code,fail_reason'
\endif
-- What a pass reads besides. ctid and tableoid say where a row lies; they are columns to the rights system.
\if :{?read}
\else
    \set read 'id,max_attempts,stage,expected_duration_ms'
\endif
-- What a worker writes besides.
\if :{?stage}
\else
    \set stage 'stage,expected_duration_ms'
\endif

BEGIN;

SELECT format('GRANT CONNECT ON DATABASE %I TO %I', current_database(), :'role') \gexec

SELECT DISTINCT format('GRANT USAGE ON SCHEMA %I TO %I', n.nspname, :'role')
FROM unnest(string_to_array(:'tables', ',') || ARRAY[:'events', :'state']) AS t(name)
JOIN pg_catalog.pg_class AS c ON c.oid = trim(t.name)::regclass
JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace \gexec

SELECT format('GRANT SELECT (ctid, tableoid, %s, %s), UPDATE (%s) ON %s TO %I',
              :'read', :'write', :'write', trim(t.name)::regclass, :'role')
FROM unnest(string_to_array(:'tables', ',')) AS t(name) \gexec

-- SELECT: refunds are counted from a job's own events, `explain` shows them.
SELECT format('GRANT SELECT (%I, %I), INSERT (%I, %I) ON %s TO %I',
              :'job_id', :'data', :'job_id', :'data', :'events'::regclass, :'role') \gexec

SELECT format('GRANT SELECT, INSERT, UPDATE ON %s TO %I', :'state'::regclass, :'role') \gexec

-- An app's own event table may number its rows from a sequence (serial); an identity column needs nothing.
SELECT format('GRANT USAGE ON SEQUENCE %s TO %I', d.objid::regclass, :'role')
FROM pg_catalog.pg_depend AS d
JOIN pg_catalog.pg_class AS c ON c.oid = d.objid AND c.relkind = 'S'
WHERE d.refobjid = :'events'::regclass AND d.deptype = 'a' AND d.classid = 'pg_class'::regclass \gexec

\if :{?worker}
-- A worker reads the whole job (its payload is the work) and also writes the stage it is in.
SELECT DISTINCT format('GRANT USAGE ON SCHEMA %I TO %I', n.nspname, :'worker')
FROM unnest(string_to_array(:'tables', ',') || ARRAY[:'events']) AS t(name)
JOIN pg_catalog.pg_class AS c ON c.oid = trim(t.name)::regclass
JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace \gexec

SELECT format('GRANT CONNECT ON DATABASE %I TO %I', current_database(), :'worker') \gexec

SELECT format('GRANT SELECT, UPDATE (%s, %s) ON %s TO %I',
              :'write', :'stage', trim(t.name)::regclass, :'worker')
FROM unnest(string_to_array(:'tables', ',')) AS t(name) \gexec

SELECT format('GRANT SELECT (%I, %I), INSERT (%I, %I) ON %s TO %I',
              :'job_id', :'data', :'job_id', :'data', :'events'::regclass, :'worker') \gexec

SELECT format('GRANT USAGE ON SEQUENCE %s TO %I', d.objid::regclass, :'worker')
FROM pg_catalog.pg_depend AS d
JOIN pg_catalog.pg_class AS c ON c.oid = d.objid AND c.relkind = 'S'
WHERE d.refobjid = :'events'::regclass AND d.deptype = 'a' AND d.classid = 'pg_class'::regclass \gexec
\endif

COMMIT;
