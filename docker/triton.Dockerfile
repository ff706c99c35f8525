# Serving: NVIDIA's Triton with Serin beside it. One container holds the releases (a Triton process each), Envoy before
# them and the rollout controller that starts and stops them. It has no torch. Built from the repository's root.
# For a private package index: --secret id=pip,src=pip.conf (no layer keeps it).
ARG TRITON_IMAGE
FROM ${TRITON_IMAGE} AS build

ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# A C++ compiler, for the gateway's request filter: without it the gateway would listen on the loopback interface only.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/serin
WORKDIR /src
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY docker/without_torch.py ./
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    python3 without_torch.py pyproject.toml cpu console s3 > requirements.txt \
    && /opt/serin/bin/pip install --constraint constraints.txt --requirement requirements.txt
COPY serin serin
COPY flows flows
COPY tasks tasks
COPY deployments deployments
COPY triton_models triton_models
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    /opt/serin/bin/pip install --no-deps . \
    && /opt/serin/bin/serin install gateway

FROM ${TRITON_IMAGE}

ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN groupadd --gid 10001 serin \
    && useradd --uid 10001 --gid serin --create-home serin \
    && install --directory --owner serin --group serin /var/lib/serin
WORKDIR /src
COPY constraints.txt ./
# Triton's own Python runs the graphs: the ONNX Runtime that passed the gate, and a numpy that its stub can take.
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    grep '^onnxruntime==' constraints.txt > runtime.txt && echo 'numpy==1.26.4' >> runtime.txt \
    && python3 -m pip install --break-system-packages --requirement runtime.txt
# Serin has its own Python, which must not come first on PATH: Triton would take it for its models. The filter is beside it.
COPY --from=build /opt/serin /opt/serin
COPY --from=build /opt/serin-triton /opt/serin-triton

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
CMD ["/opt/serin/bin/python", "-m", "serin.stack.serve", "--address", "0.0.0.0", "--port", "8080"]
