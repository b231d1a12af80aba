# One image for all three roles: the task (job-runner), the Dask scheduler and the Dask workers. Build it for a version,
# and register the workflows with the same (see docs/guides/run_on_flyte.md):
#
#   docker build -t registry.example/daskpytorch:v1 .
#
# torch of PyPI brings its own CUDA, so that GPU nodes work; on CPU nodes it trains with gloo. For CPU nodes alone:
#
#   docker build --build-arg BASE=ubuntu:24.04 --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu \
#       -t registry.example/daskpytorch:v1-cpu .
#
# BASE brings what lets drivers run a CUDA that is newer than they are; TORCH_INDEX is where torch and torchvision come
# from (empty: from where pip finds all others).
# `python tests/backend/image.py` builds it with Docker, and runs it as user 1000 on a read-only root.

ARG BASE=nvidia/cuda:13.0.1-base-ubuntu24.04

# hadolint ignore=DL3006 # BASE has a tag
FROM ${BASE}

# torch.compile builds kernels: for CPUs with g++, for GPUs with gcc.
# hadolint ignore=DL3008 # the distribution's newest fixes, not a version that it withdraws
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates g++ libc6-dev python3-dev python3-venv \
    && find /usr/lib -name 'libpython*.a' -delete \
    && rm -rf /var/lib/apt/lists/*

# What pyproject.toml asks for, installed for a package that is still empty: a layer of gigabytes, which a change of
# code leaves as it is. Nobody links static libraries, or runs libraries' tests; numpy.testing imports some of numpy's.
WORKDIR /build
COPY pyproject.toml ./
ARG TORCH_INDEX=
# hadolint ignore=DL3013 # pyproject.toml has the versions
RUN python3 -m venv /opt/venv \
    && mkdir -p plugins/flytekitplugins plugins/flyteplugins && touch README.md LICENSE \
    && if [ -n "$TORCH_INDEX" ]; then \
           /opt/venv/bin/pip install --no-cache-dir --index-url "$TORCH_INDEX" torch torchvision; \
       fi \
    && /opt/venv/bin/pip install --no-cache-dir '.[workflows]' \
    && /opt/venv/bin/pip uninstall -y flytekitplugins-daskpytorch \
    && find /opt/venv -name '*.a' -delete \
    && find /opt/venv -type d -name tests -not -path '*/numpy/*' -prune -exec rm -r {} +

COPY README.md LICENSE ./
COPY plugins ./plugins
RUN /opt/venv/bin/pip install --no-cache-dir --no-deps . && rm -r /build/*

# Flyte unpacks fast-registered code into /root; pyflyte-execute and dask-worker must both find it there.
# BASE says NVIDIA_VISIBLE_DEVICES=all, by which a pod without GPUs in its limits would see all GPUs of its machine.
# Kubernetes' device plugin, and `docker run --gpus`, set this variable anew for containers that are given GPUs.
ENV NVIDIA_VISIBLE_DEVICES=void \
    PYTHONPATH=/root \
    PYTHONUNBUFFERED=1 \
    HOME=/root \
    PATH=/opt/venv/bin:$PATH
WORKDIR /root
RUN chown 1000:1000 /root
COPY --chown=1000:1000 tasks ./tasks
COPY --chown=1000:1000 workflows ./workflows

# By its number, which Kubernetes' runAsNonRoot can check.
USER 1000:1000

# No ENTRYPOINT: the backend's commands (pyflyte-execute, dask-scheduler, dask-worker) are run as they are.
