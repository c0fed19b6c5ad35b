"""The demonstration: workers that really die, on a Postgres that needs no installation.

What may live here: finding and running a private Postgres, the simulated workers, the live view, and the
checked summary. The tests and the benchmark use the Postgres runner too. Nothing outside imports from
here except the command line, so a worker image never pays for it.
"""
