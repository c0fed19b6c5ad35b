"""Many workers, killed at random: every job done exactly once in effect, none lost."""

from __future__ import annotations

import random
import signal
import time

import psycopg

from tests.factories import a_queued_job
from tests.postgres import Connection
from tests.worker_fleet import WorkerProcess, one, reap

JOBS = 500
WORKERS = 20
KILLS = 40
HANDLER = """
create table output (job_id uuid primary key, attempt int not null);
create table tries (job_id uuid, attempt int, first boolean, primary key (job_id, attempt));
create function publish(job uuid, run int, holder text) returns boolean language plpgsql as $$
begin
    -- The app's own effect, under the same fence as the SDK's statements. A run that finds it made already
    -- (its predecessor died between effect and "done") has nothing left to do.
    perform from jobs where id = job and attempt_count = run and locked_by = holder and status = 'processing'
        for update;
    if not found then return false; end if;
    insert into output values (job, run) on conflict do nothing;
    insert into tries values (job, run, found);
    return true;
end $$;
"""


def test_500_jobs_over_20_workers_killed_at_random_are_each_done_exactly_once_in_effect(
    dsn: str, conn: Connection
) -> None:
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    dice = random.Random(seed)
    conn.execute(HANDLER)
    for _ in range(JOBS):
        a_queued_job(conn, max_attempts=1000)

    def a_worker() -> WorkerProcess:
        return WorkerProcess(dsn, program="chaos", lease_sec=2, concurrency=2, poll_sec=0.3)

    fleet = [a_worker() for _ in range(WORKERS)]
    leaving: list[WorkerProcess] = []
    kills = 0
    deadline = time.monotonic() + 240
    try:
        while one(conn, "select count(*) from jobs where status <> 'done'"):
            assert time.monotonic() < deadline, (
                f"seed {seed}: {conn.execute('select status, count(*) from jobs group by 1').fetchall()}"
            )
            # Accidents follow progress, not time: on any machine one for every few jobs that are done.
            done = int(one(conn, "select count(*) from jobs where status = 'done'"))
            ready = [number for number, worker in enumerate(fleet) if worker.says("worker started")]
            dice.shuffle(ready)
            for victim in ready[: max(0, done * KILLS // JOBS + 1 - kills)]:
                fleet[victim].send(dice.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM]))
                leaving.append(fleet[victim])
                fleet[victim] = a_worker()
                kills += 1
            reap(conn)
            time.sleep(0.05)  # pacing of the killer, not synchronisation
    finally:
        for worker in fleet + leaving:
            worker.close()
    print(f"{kills} kills, {one(conn, 'select max(attempt_count) from jobs')} runs at most")
    assert kills >= WORKERS, "too few accidents to prove anything"
    with psycopg.connect(dsn) as fresh:
        assert one(fresh, "select count(*) from jobs where status = 'done'") == JOBS
        assert one(fresh, "select count(*) from output") == JOBS
        # One effect per job, by a run that owned it then; later runs saw it and only finished.
        assert one(fresh, "select count(*) from tries where first") == JOBS
        assert one(fresh, "select bool_and(o.attempt <= j.attempt_count) from output o"
                          " join jobs j on j.id = o.job_id")  # fmt: skip
