"""What a database looks like, read straight from its catalogue: for tests about migrations."""

from __future__ import annotations

from typing import Any

from tests.postgres import Connection


def the_columns(conn: Connection, table: str = "jobs") -> dict[str, str]:
    """Each column as `type [not null] [default …]`."""
    rows = conn.execute(
        """
        select a.attname, concat_ws(' ', format_type(a.atttypid, a.atttypmod),
            case when a.attnotnull then 'not null' end,
            'default ' || pg_get_expr(d.adbin, d.adrelid))
        from pg_attribute a left join pg_attrdef d on d.adrelid = a.attrelid and d.adnum = a.attnum
        where a.attrelid = %s::regclass and a.attnum > 0 and not a.attisdropped order by a.attnum
        """,
        (table,),
    )
    return dict(rows.fetchall())


def the_indexes(conn: Connection, table: str = "jobs") -> dict[str, str]:
    """Each index as the part of its definition behind the access method; `INVALID` in front if it is."""
    rows = conn.execute(
        """
        select c.relname, concat(case when not x.indisvalid then 'INVALID ' end,
            regexp_replace(pg_get_indexdef(c.oid), '^.* USING ', ''))
        from pg_index x join pg_class c on c.oid = x.indexrelid
        where x.indrelid = %s::regclass and not x.indisprimary order by 1
        """,
        (table,),
    )
    return dict(rows.fetchall())


def fingerprint(conn: Connection) -> list[Any]:
    """All that a migration could change: relations with storage and options, columns, rows of ours."""
    facts: list[Any] = conn.execute(
        """
        select n.nspname, c.relname, c.relkind, c.relfilenode, c.reloptions::text, c.relacl::text
        from pg_class c join pg_namespace n on n.oid = c.relnamespace
        where n.nspname not in ('pg_catalog', 'information_schema', 'pg_toast') order by 1, 2
        """
    ).fetchall()
    facts += conn.execute(
        """
        select a.attrelid::regclass::text, a.attname, a.atttypid, a.attnotnull, a.atthasdef
        from pg_attribute a join pg_class c on c.oid = a.attrelid
        join pg_namespace n on n.oid = c.relnamespace
        where n.nspname not in ('pg_catalog', 'information_schema', 'pg_toast') order by 1, a.attnum
        """
    ).fetchall()
    row = conn.execute("select to_regclass('reaper_migrations')").fetchone()
    if row is not None and row[0] is not None:
        facts += conn.execute("select * from reaper_migrations order by 1, 2").fetchall()
    return facts


def storage(conn: Connection, table: str) -> Any:
    """The file of a table: another one after a rewrite."""
    row = conn.execute("select pg_relation_filenode(%s::regclass)", (table,)).fetchone()
    assert row is not None
    return row[0]
