"""Output that may be made twice but is published once.

A run works in a directory of its own (per job *and* attempt: a zombie shares nothing with its successor),
renames the finished file, asks whether it still owns the job, and only then publishes. A result that is
already there and whole is not made again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

from reconciler.worker.context import JobContext
from reconciler.worker.errors import ArgumentError, EmptyOutputError
from reconciler.worker.events import DONE, UPLOADED


def safe_name(job_id: Any) -> str:
    """A job id as one path component: no separators, no dots that climb, and different ids stay different."""
    name = quote(str(job_id), safe="-_")
    if not name.strip("."):
        name = name.replace(".", "%2E")  # quote() leaves dots alone, and ".." climbs
    if not name or len(name) > 200:
        raise ArgumentError("job_id", job_id, "1 to 200 characters, as a file name")
    return name


@dataclass(frozen=True, slots=True)
class Scratch:
    """`<root>/<table>/<job>/<attempt>/`, readable by this user alone. Ids may repeat between tables."""

    root: Path
    directory: Path
    name: str

    @classmethod
    def of(cls, root: Path, job_id: Any, attempt: int, table: str = "jobs") -> Scratch:
        """Make the directory for this run."""
        name = safe_name(job_id)
        root = root.resolve()
        directory = root / safe_name(table) / name / str(attempt)
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not directory.resolve().is_relative_to(root):
            # A link planted below the root would lead the work elsewhere.
            raise ArgumentError(
                "scratch", name, "a directory below the scratch root", "remove the link there"
            )
        return cls(root, directory, name)

    def work_file(self, suffix: str = ".mp4") -> Path:
        """Where the work writes: never looked at by anybody else."""
        return self.directory / f"{self.name}-work{suffix}"

    def finalize(self, suffix: str = ".mp4") -> Path:
        """Rename the work file to its final name. An empty one is damaged: EmptyOutputError."""
        work = self.work_file(suffix)
        if not work.exists() or work.stat().st_size == 0:
            raise EmptyOutputError(f"{work.name} is missing or empty")
        final = self.directory / f"{self.name}-final{suffix}"
        work.replace(final)
        return final

    def remove(self) -> None:
        """Delete this run's files, and the job's directory when no other run is in it."""
        shutil.rmtree(self.directory, ignore_errors=True)
        with contextlib.suppress(OSError):
            self.directory.parent.rmdir()


@dataclass(frozen=True, slots=True)
class Stored:
    """What storage says about an object; `whole` is false when its size or checksum do not fit."""

    key: str
    size: int
    sha256: str | None
    whole: bool


class Storage(Protocol):
    """Where results live. Two methods: look, and put in one step.

    A storage that can copy first and publish at once may have a third, as FileStorage has: a context manager
    `prepare(key, path, sha256)` that gives the commit, before which the fence is asked for again.
    """

    def head(self, key: str) -> Stored | None: ...

    def put(self, key: str, path: Path, sha256: str) -> None: ...


class FileStorage:
    """A directory. `prepare` copies, its commit renames into place; the checksum lies beside the file."""

    def __init__(self, root: Path | str) -> None:
        self._root = Path(root).resolve()

    def head(self, key: str) -> Stored | None:
        path = self._path(key)
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            return None
        try:
            expected = path.with_name(path.name + ".sha256").read_text(encoding="ascii").strip()
        except FileNotFoundError:
            return Stored(key, size, None, whole=False)
        return Stored(key, size, expected, whole=size > 0 and sha256_of(path) == expected)

    def put(self, key: str, path: Path, sha256: str) -> None:
        with self.prepare(key, path, sha256) as commit:
            commit()

    @contextlib.contextmanager
    def prepare(self, key: str, path: Path, sha256: str) -> Iterator[Callable[[], None]]:
        """Everything that takes time, under names of this run alone; the commit is two renames."""
        target = self._path(key)
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".put-") as own:
            copy, checksum = Path(own, "copy"), Path(own, "sha256")
            with path.open("rb") as source, copy.open("wb") as sink:
                shutil.copyfileobj(source, sink)
                sink.flush()
                os.fsync(sink.fileno())
            checksum.write_text(sha256, encoding="ascii")

            def commit() -> None:
                # The checksum first: a crash in between leaves a file that is not whole, never one that
                # seems so.
                checksum.replace(target.with_name(target.name + ".sha256"))
                copy.replace(target)

            yield commit

    def _path(self, key: str) -> Path:
        path = (self._root / key).resolve()
        if not path.is_relative_to(self._root) or path == self._root:
            raise ArgumentError("key", key, "a name below the storage root", "no '..' and no absolute path")
        return path


class S3Storage:
    """A bucket, by any client with boto3's `head_object` and `upload_file`. The SDK does not import boto3."""

    def __init__(self, client: Any, bucket: str, prefix: str = "") -> None:
        self._client = client
        self._bucket = bucket
        self._prefix = prefix

    def head(self, key: str) -> Stored | None:
        try:
            found = self._client.head_object(Bucket=self._bucket, Key=self._prefix + key)
        except Exception as error:
            if _is_not_found(error):
                return None
            raise
        size = int(found["ContentLength"])
        metadata = found.get("Metadata", {})
        whole = size > 0 and metadata.get("size") == str(size) and bool(metadata.get("sha256"))
        return Stored(key, size, metadata.get("sha256"), whole)

    def put(self, key: str, path: Path, sha256: str) -> None:
        metadata = {"sha256": sha256, "size": str(path.stat().st_size)}
        self._client.upload_file(
            str(path), self._bucket, self._prefix + key, ExtraArgs={"Metadata": metadata}
        )


def already_published(job: JobContext, storage: Storage, key: str) -> bool:
    """Is the result there, and whole? Then say `uploaded` and `done`; the handler has nothing left to do."""
    found = storage.head(key)
    if found is None or not found.whole:
        return False
    job.emit(UPLOADED, {"key": key, "size": found.size, "sha256": found.sha256, "skipped": True})
    job.emit(DONE, {"key": key, "skipped": True})
    return True


def publish(job: JobContext, storage: Storage, key: str, path: Path) -> Stored:
    """Put a finished file into storage: not empty, and only while the run still owns its job."""
    size = path.stat().st_size
    if size == 0:
        raise EmptyOutputError(f"{path.name} is empty")
    digest = sha256_of(path)
    # The fence last: hashing and copying a large file take long enough to lose a lease.
    prepare = getattr(storage, "prepare", None)
    if prepare is None:
        job.assert_held()
        storage.put(key, path, digest)
    else:
        with prepare(key, path, digest) as commit:
            job.assert_held()
            commit()
    job.emit(UPLOADED, {"key": key, "size": size, "sha256": digest, "skipped": False})
    return Stored(key, size, digest, whole=True)


def sha256_of(path: Path) -> str:
    """The file's checksum, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _is_not_found(error: Exception) -> bool:
    response = getattr(error, "response", None)
    code = response.get("Error", {}).get("Code") if isinstance(response, dict) else None
    return str(code) in ("404", "NoSuchKey", "NotFound")
