# One image for all three roles: the task (job-runner), the Dask scheduler and the Dask workers.
# Built on CUDA's runtime, so that GPU nodes work; on CPU nodes it trains with gloo.
#
#   docker build -t REGISTRY/daskpytorch:TAG .
#   pyflyte run --remote --image REGISTRY/daskpytorch:TAG workflows/pet_names.py pet_names
FROM nvidia/cuda:13.0.1-runtime-ubuntu24.04

# Flyte unpacks fast-registered code into /root; pyflyte-execute and dask-worker must both find it there.
ENV PYTHONPATH=/root \
    PYTHONUNBUFFERED=1 \
    PIP_NO_CACHE_DIR=1 \
    VIRTUAL_ENV=/opt/venv \
    PATH=/opt/venv/bin:$PATH

# gcc: torch.compile builds kernels with it.
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates gcc libc6-dev python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/venv

WORKDIR /root

# The dependencies, in a layer that changes only with pyproject.toml.
COPY pyproject.toml README.md LICENSE ./
COPY plugins ./plugins
RUN pip install '.[workflows]' && rm -rf plugins

COPY tasks ./tasks
COPY workflows ./workflows

# No ENTRYPOINT: the backend's commands (pyflyte-execute, dask-scheduler, dask-worker) are run as they are.
