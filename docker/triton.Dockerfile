# Serving with GPUs: NVIDIA's Triton with Serin and its ONNX backend. A container runs one release (a pod on Kubernetes),
# or the releases of a machine with Envoy and the rollout controller. It has no torch. Built from the repository's root.
# For a private package index: --secret id=pip,src=pip.conf (no layer keeps it).
ARG TRITON_IMAGE
FROM ${TRITON_IMAGE} AS build

# The one that passed the gate, for the models too; the package for GPUs brings the CUDA libraries that it needs.
ARG ONNXRUNTIME=onnxruntime-gpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 SERIN_TRITON=/opt/tritonserver
# A C++ compiler, for the ONNX backend and the gateway's request filter.
# hadolint ignore=DL3008
RUN { command -v g++ && python3 -m ensurepip --version; } \
    || { apt-get update && apt-get install --yes --no-install-recommends g++ python3-venv && rm -rf /var/lib/apt/lists/*; }
RUN python3 -m venv /opt/serin
WORKDIR /src
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY docker/without_torch.py ./
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    python3 without_torch.py pyproject.toml console mlflow s3 > requirements.txt \
    && echo "${ONNXRUNTIME}" >> requirements.txt \
    && /opt/serin/bin/pip install --constraint constraints.txt --requirement requirements.txt
COPY serin serin
COPY flows flows
COPY tasks tasks
COPY deployments deployments
COPY triton_models triton_models
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    /opt/serin/bin/pip install --no-deps . \
    && /opt/serin/bin/serin install triton

FROM ${TRITON_IMAGE}

RUN groupadd --gid 10001 serin \
    && useradd --uid 10001 --gid serin --create-home serin \
    && install --directory --owner serin --group serin /var/lib/serin
# Two environments: Serin's, and one for the models, with the request filter beside it.
COPY --from=build /opt/serin /opt/serin
COPY --from=build /opt/serin-triton /opt/serin-triton
COPY --from=build /opt/tritonserver/backends/serin_onnx /opt/tritonserver/backends/serin_onnx
ENV SERIN_HOME=/var/lib/serin \
    SERIN_TRITON=/opt/tritonserver \
    PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /var/lib/serin
EXPOSE 8080
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s --retries=3 \
    CMD ["/opt/serin/bin/python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8080/v2/health/live', timeout=4)"]
# NVIDIA's entrypoint prints a banner and sets up what a shell needs; neither is wanted here.
ENTRYPOINT []
CMD ["/opt/serin/bin/serin", "agent", "--alone", "--address", "0.0.0.0", "--port", "8080"]
