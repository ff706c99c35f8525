# Serving on machines without GPUs: Envoy, the rollout controller, and releases on the Triton of the nvidia-pytriton
# wheel. A tenth of the size of NVIDIA's image (triton.Dockerfile), which is the one for GPUs. It has no torch.
# Built from the repository's root. For a private package index: --secret id=pip,src=pip.conf (no layer keeps it).
ARG PYTHON_IMAGE
FROM ${PYTHON_IMAGE} AS build

ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# A C++ compiler, for the gateway's request filter, Triton's ONNX backend and its guard against cancelled calls.
# hadolint ignore=DL3008
RUN command -v g++ \
    || { apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*; }
RUN python3 -m venv /opt/serin
WORKDIR /src
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY docker/without_torch.py ./
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    python3 without_torch.py pyproject.toml cpu console mlflow s3 > requirements.txt \
    && /opt/serin/bin/pip install --constraint constraints.txt --requirement requirements.txt
COPY serin serin
COPY flows flows
COPY tasks tasks
COPY deployments deployments
COPY triton_models triton_models
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    /opt/serin/bin/pip install --no-deps . \
    && /opt/serin/bin/serin install triton

FROM ${PYTHON_IMAGE}

RUN groupadd --gid 10001 serin \
    && useradd --uid 10001 --gid serin --create-home serin \
    && install --directory --owner serin --group serin /var/lib/serin
COPY --from=build /opt/serin /opt/serin
COPY --from=build /opt/serin-triton /opt/serin-triton
ENV PATH=/opt/serin/bin:${PATH} \
    SERIN_HOME=/var/lib/serin \
    PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /var/lib/serin
EXPOSE 8080
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s --retries=3 \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8080/v2/health/live', timeout=4)"]
CMD ["serin", "agent", "--alone", "--address", "0.0.0.0", "--port", "8080"]
