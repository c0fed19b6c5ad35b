"""Container images without Docker: a static pause, a debootstrapped base, the project's Dockerfile on it.

buildah runs in a mount namespace of its own, because it leaves its storage directory mounted; its storage
lies in the project's cache and never touches the machine's. Finished archives are checksummed like every
other asset.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.cluster import assets
from tests.cluster.assets import REPOSITORY, Progress, cache_root, intact, keep, lock, say
from tests.cluster.node_config import PAUSE_IMAGE
from tests.cluster.process import ClusterError, run_limited

SUITE = "bookworm"
BASE_IMAGE = "localhost/job-reaper-base:bookworm"
BUILD_BASE_IMAGE = "localhost/job-reaper-build-base:bookworm"
# The runtime needs an interpreter and the authorities' certificates; a venv (for uv) is needed only to build.
BASE_PACKAGES = ("python3", "ca-certificates")
BUILD_PACKAGES = ("python3-venv",)
PRODUCT_IMAGE = "job-reaper.test/job-reaper:test"
CERTIFICATES = Path("/etc/ssl/certs")
COMMAND_SECONDS = 1200.0
# Every build leaves layers. Both bases, one product and its cached layers are about 1.5 GB.
STORAGE_LIMIT = 3 * 10**9


def pause_image(progress: Progress = say) -> Path:
    """The image that holds a pod's namespaces: one static program that sleeps."""
    directory = _image_cache()
    source = Path(__file__).parent / "pause.c"
    archive = directory / f"pause-{assets.sha256(source)[:10]}.tar"
    with lock(directory / ".lock", progress):
        if not intact(archive):
            progress("building the pause image")
            with tempfile.TemporaryDirectory(prefix=".partial-", dir=directory) as partial:
                program = Path(partial) / "pause"
                _run(["gcc", "-Os", "-static", "-s", "-o", str(program), str(source)])
                _buildah_script(
                    'c=$(buildah from scratch); buildah copy "$c" "$1" /pause; '
                    'buildah config --entrypoint \'["/pause"]\' --user 65535:65535 "$c"; '
                    f'buildah commit --quiet "$c" "docker-archive:$2:{PAUSE_IMAGE}"; buildah rm "$c"',
                    str(program),
                    f"{partial}/pause.tar",
                )
                keep(Path(partial) / "pause.tar", archive)
    return archive


def product_image(progress: Progress = say) -> Path:
    """The image of the real Dockerfile, on the debootstrapped base; rebuilt when its inputs change."""
    directory = _image_cache()
    with lock(directory / ".lock", progress):
        bases = _base_archives(directory, progress)
        archive = directory / f"job-reaper-{_inputs(bases)}.tar"
        if not intact(archive):
            _base_images(bases)
            progress(f"building {PRODUCT_IMAGE} from Dockerfile")
            with tempfile.TemporaryDirectory(prefix=".partial-", dir=directory) as partial:
                _build_product(Path(partial))
                keep(Path(partial) / "product.tar", archive)
            drop_old_archives(directory)
            prune(progress)
    return archive


def drop_old_archives(directory: Path, *, kept: int = 2) -> None:
    """Keep the newest images of the project: today's source, and the one before it."""
    for older in sorted(directory.glob("job-reaper-*.tar"), key=os.path.getmtime)[:-kept]:
        assets.discard(older)
    for alone in directory.glob("*.tar.sha256"):
        if not alone.with_suffix("").exists():
            alone.unlink()


def prune(progress: Progress = say, *, limit: int = STORAGE_LIMIT) -> None:
    """Keep buildah's storage small. Only under the lock of the images: nobody builds meanwhile.

    Layers that are still cached make the next build quick, so they go only when there are too many.
    """
    # Left by builds that were killed.
    _buildah_script("buildah rm --all >/dev/null")
    if _storage_size() <= limit:
        return
    progress(f"buildah's storage is over {limit / 1e9:.1f} GB: removing what no image uses")
    _buildah_script("buildah rmi --prune --force >/dev/null")
    if _storage_size() > limit:
        # The bases come again from their archives, in seconds.
        _isolated(["rm", "-rf", str(_storage() / "root"), str(_storage() / "run")])


def _storage() -> Path:
    return cache_root() / "buildah"


def _storage_size() -> int:
    answer = run_limited(["du", "-s", "--block-size=1", str(_storage().resolve())], seconds=COMMAND_SECONDS)
    if answer.returncode != 0:
        raise ClusterError(f"du of buildah's storage failed: {answer.stderr}")
    return int(answer.stdout.split()[0])


def _build_product(partial: Path) -> None:
    arguments = ["--build-arg", f"BASE={BASE_IMAGE}", "--build-arg", f"BUILD_BASE={BUILD_BASE_IMAGE}"]
    # The build downloads from the package index as this machine does, so it must trust whom this machine
    # trusts.
    arguments += ["--volume", f"{CERTIFICATES}:{CERTIFICATES}:ro"]
    bundle = CERTIFICATES / "ca-certificates.crt"
    if bundle.exists():
        arguments += ["--build-arg", f"SSL_CERT_FILE={bundle}", "--build-arg", f"PIP_CERT={bundle}"]
    _buildah_script(
        'buildah build --isolation chroot --network host --pull-never --layers "$@" . && '
        f'buildah push --quiet {PRODUCT_IMAGE} "docker-archive:$ARCHIVE:{PRODUCT_IMAGE}"',
        *arguments,
        "--tag",
        PRODUCT_IMAGE,
        environment={"ARCHIVE": f"{partial}/product.tar"},
    )


def _base_archives(directory: Path, progress: Progress) -> tuple[Path, Path]:
    """debootstrap once per machine (a minute); both bases come from the one tree."""
    recipe = hashlib.sha256(repr((SUITE, BASE_PACKAGES, BUILD_PACKAGES)).encode()).hexdigest()[:10]
    archive = directory / f"base-{SUITE}-{recipe}.tar"
    build_archive = directory / f"build-base-{SUITE}-{recipe}.tar"
    if not (intact(archive) and intact(build_archive)):
        progress(f"debootstrap of {SUITE} for the base image (a minute)")
        with tempfile.TemporaryDirectory(prefix=".partial-", dir=directory) as partial:
            root = Path(partial) / "root"
            script = 'set -e; debootstrap --variant=minbase --include="$1" "$2" "$3" ${4:+"$4"}; '
            _isolated(["sh", "-c", script, "-", ",".join(BASE_PACKAGES), SUITE, str(root), _mirror()])
            for junk in ("var/cache/apt/archives", "var/lib/apt/lists", "usr/share/doc", "usr/share/man"):
                shutil.rmtree(root / junk, ignore_errors=True)
            _run(["tar", "-C", str(root), "-cf", f"{partial}/base.tar", "."])
            packages = ["apt-get", "install", "--yes", "--no-install-recommends", *BUILD_PACKAGES]
            shutil.copy("/etc/resolv.conf", root / "etc/resolv.conf")
            _isolated(["chroot", str(root), "apt-get", "update"])
            _isolated(["chroot", str(root), *packages])
            _run(["tar", "-C", str(root), "-cf", f"{partial}/build-base.tar", "."])
            keep(Path(partial) / "base.tar", archive)
            keep(Path(partial) / "build-base.tar", build_archive)
        for kind, current in (("base", archive), ("build-base", build_archive)):
            for older in set(directory.glob(f"{kind}-{SUITE}-*.tar")) - {current}:
                assets.discard(older)
    return archive, build_archive


def _base_images(bases: tuple[Path, Path]) -> None:
    """Have both bases in buildah's storage."""
    for image, tree in zip((BASE_IMAGE, BUILD_BASE_IMAGE), bases, strict=True):
        _buildah_script(
            # A marker by checksum: a base made anew must not be mistaken for the one in the storage.
            'buildah inspect --type image "$1" 2>/dev/null | grep -q "$3" && exit 0; '
            'c=$(buildah from scratch); buildah add --quiet "$c" "$2" /; '
            'buildah config --label tree="$3" --env PATH=/usr/local/bin:/usr/bin:/bin "$c"; '
            'buildah commit --quiet "$c" "$1"; buildah rm "$c"',
            image,
            str(tree),
            assets.sha256(tree),
        )


def _mirror() -> str:
    """This machine's own Debian mirror, where it has one; else debootstrap's default."""
    if shutil.which("apt-get") is None:
        return ""
    answer = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(CODENAME) $(SITE)"],
        capture_output=True,
        text=True,
        check=False,
    )
    for line in answer.stdout.splitlines():
        codename, _, site = line.partition(" ")
        if codename == SUITE:
            return site
    return ""


def _inputs(bases: tuple[Path, Path]) -> str:
    """A digest of everything the image is made of: both bases, the Dockerfile, and its context."""
    digest = hashlib.sha256()
    for base in bases:
        digest.update(assets.recorded_sum(base).encode())
    named = ["Dockerfile", ".dockerignore", "pyproject.toml", "uv.lock", "README.md", "LICENSE"]
    trees = [path for tree in ("reconciler", "migrations") for path in sorted((REPOSITORY / tree).rglob("*"))]
    for path in [*(REPOSITORY / name for name in named), *trees]:
        if path.is_file() and "__pycache__" not in path.parts:
            digest.update(str(path.relative_to(REPOSITORY)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _image_cache() -> Path:
    directory = cache_root() / "images"
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def _buildah_script(script: str, *arguments: str, environment: dict[str, str] | None = None) -> None:
    storage = _storage()
    places = f'buildah() {{ command buildah --root "{storage}/root" --runroot "{storage}/run" "$@"; }}; '
    full = {**os.environ, "BUILDAH_ISOLATION": "chroot", **(environment or {})}
    _isolated(["bash", "-euc", places + script, "-", *arguments], environment=full)


def _isolated(argv: Sequence[str], *, environment: dict[str, str] | None = None) -> None:
    """Run in a mount namespace of its own: whatever it mounts is gone when it ends."""
    _run(["unshare", "--mount", "--propagation", "private", *argv], environment=environment)


def _run(argv: Sequence[str], *, environment: dict[str, str] | None = None) -> None:
    answer = run_limited(argv, seconds=COMMAND_SECONDS, env=environment, cwd=REPOSITORY)
    if answer.returncode != 0:
        words = (answer.stdout + answer.stderr)[-4000:]
        raise ClusterError(f"{' '.join(argv)[:300]} failed with {answer.returncode}:\n{words}")
