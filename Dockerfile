# The image that the chart runs: job-reaper with the operator extra, as a numeric non-root user, on a read-only root.
# The same file builds with docker, podman and buildah, on the public image below or on any Debian with a python3:
#   docker build --tag job-reaper .
#   buildah build --build-arg BASE=... --build-arg BUILD_BASE=... .      (see tests/cluster/images.py)
ARG BASE=python:3.11-slim-bookworm
# Where it is built: the same system and interpreter as BASE, plus `python3 -m venv`. Nothing of it ships.
ARG BUILD_BASE=${BASE}

FROM ${BUILD_BASE} AS build
ARG UV_VERSION=0.13.8
# Behind a company's mirror or its own authority: set these; unset means the tools' own defaults.
ARG PIP_INDEX_URL
ARG PIP_CERT
ARG UV_INDEX_URL
ARG SSL_CERT_FILE
ENV UV_PROJECT_ENVIRONMENT=/opt/job-reaper \
    UV_COMPILE_BYTECODE=1 \
    UV_LINK_MODE=copy \
    UV_NO_CACHE=1 \
    UV_PYTHON_DOWNLOADS=never
RUN python3 -m venv /uv && /uv/bin/python -m pip install --no-cache-dir "uv==${UV_VERSION}"
WORKDIR /src
# The locked dependencies first: they change seldom, so this layer is usually cached.
COPY pyproject.toml uv.lock ./
RUN /uv/bin/uv sync --python "$(command -v python3)" --frozen --no-dev --extra operator --no-install-project
COPY README.md LICENSE ./
COPY migrations/ migrations/
COPY reconciler/ reconciler/
RUN /uv/bin/uv sync --python "$(command -v python3)" --frozen --no-dev --extra operator --no-editable

FROM ${BASE}
ARG VERSION=0.0.0-dev
ARG REVISION=unknown
LABEL org.opencontainers.image.title="job-reaper" \
      org.opencontainers.image.description="Requeues jobs whose worker is gone: the lease in Postgres and the pod in Kubernetes" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
# Public Python images come with pip and without byte code for the standard library. The one has no place in a running
# image; the other would be compiled anew at every start of a CronJob, because the root is read-only.
RUN if python3 -m pip --version >/dev/null 2>&1; then \
        python3 -m pip uninstall --yes --root-user-action=ignore setuptools wheel pip; \
    fi \
    && python3 -m compileall -q -x '/(test|tests|lib2to3|site-packages|dist-packages)/' \
        "$(python3 -c 'import os; print(os.path.dirname(os.__file__))')"
COPY --from=build /opt/job-reaper /opt/job-reaper
ENV PATH=/opt/job-reaper/bin:/usr/local/bin:/usr/bin:/bin \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
USER 65532:65532
ENTRYPOINT ["/opt/job-reaper/bin/job-reaper"]
CMD ["--help"]
