# One image for all three roles: the task (job-runner), the Dask scheduler and the Dask workers.
# torch brings its own CUDA, so that GPU nodes work; on CPU nodes it trains with gloo. Build it for a version, and
# register the workflows with the same (see docs/guides/run_on_flyte.md):
#
#   docker build -t registry.example/daskpytorch:v1 .

FROM ubuntu:24.04 AS build

# hadolint ignore=DL3008 # the distribution's newest fixes, not a version that it withdraws
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3-venv \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /build
COPY pyproject.toml README.md LICENSE ./
COPY plugins ./plugins
# hadolint ignore=DL3013 # pyproject.toml has the versions
RUN python3 -m venv /opt/venv && /opt/venv/bin/pip install --no-cache-dir '.[workflows]'


FROM nvidia/cuda:13.0.1-base-ubuntu24.04

# gcc: torch.compile builds kernels with it.
# hadolint ignore=DL3008 # as above
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates gcc libc6-dev python3 python3-dev \
    && rm -rf /var/lib/apt/lists/*

COPY --from=build /opt/venv /opt/venv

# Flyte unpacks fast-registered code into /root; pyflyte-execute and dask-worker must both find it there.
ENV PYTHONPATH=/root \
    PYTHONUNBUFFERED=1 \
    HOME=/root \
    PATH=/opt/venv/bin:$PATH
WORKDIR /root
COPY tasks ./tasks
COPY workflows ./workflows
RUN chown -R 1000:1000 /root

# By its number, which Kubernetes' runAsNonRoot can check.
USER 1000:1000

# No ENTRYPOINT: the backend's commands (pyflyte-execute, dask-scheduler, dask-worker) are run as they are.
