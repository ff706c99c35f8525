# The worker of the pool gpu: CUDA, cuDF and torch beside the flows. Needs the NVIDIA container toolkit on its host.
# Built from the repository's root: docker compose -f docker/compose.yaml --profile gpu build
# For a private package index: --secret id=pip,src=pip.conf (no layer keeps it).
ARG CUDA_IMAGE
FROM ${CUDA_IMAGE} AS build

ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3.12-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3.12 -m venv /opt/serin
WORKDIR /src
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY serin serin
COPY flows flows
COPY tasks tasks
COPY deployments deployments
COPY triton_models triton_models
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    /opt/serin/bin/pip install --constraint constraints.txt ".[flows,gpu,mlflow,s3]"

FROM ${CUDA_IMAGE}

# A C++ compiler, since torch.compile calls one. (Ubuntu drops old package versions: they cannot be pinned.)
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ python3.12 python3.12-dev \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 10001 serin \
    && useradd --uid 10001 --gid serin --create-home serin \
    && install --directory --owner serin --group serin /var/lib/serin
COPY --from=build /opt/serin /opt/serin
# CUDF_SPILL also in the process that starts the cluster: without it results cannot be read back there.
ENV PATH=/opt/serin/bin:${PATH} \
    SERIN_HOME=/var/lib/serin \
    CUDF_SPILL=on \
    PYTHONUNBUFFERED=1 \
    DO_NOT_TRACK=1
USER 10001:10001
WORKDIR /var/lib/serin
HEALTHCHECK --interval=15s --timeout=5s --start-period=60s --retries=4 \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8081/health', timeout=4)"]
CMD ["prefect", "--no-prompt", "worker", "start", "--pool", "gpu", "--type", "serin", "--install-policy", "never", "--with-healthcheck"]
