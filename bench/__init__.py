"""Measurements of the reaper, each as a ratio against something measured in the same run.

What may live here: one module per measurement (`measure(stand) -> Result`), the stand they share (a durable
Postgres of their own), and their SQL. Nothing here is asserted by a test: a busy machine is not a bug.
"""
