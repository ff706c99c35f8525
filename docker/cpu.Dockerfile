# Prefect's server, the worker of the pool cpu and the job that makes the deployments: one image, three commands.
# Built from the repository's root: docker compose -f docker/compose.yaml build
# For a private package index: --secret id=pip,src=pip.conf (no layer keeps it).
ARG PYTHON_IMAGE
FROM ${PYTHON_IMAGE} AS build

ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python3 -m venv /opt/serin
WORKDIR /src
COPY constraints.txt ./
# torch from PyTorch's own index: the build on PyPI brings several GB of CUDA packages on x86_64.
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    grep '^torch==' constraints.txt > torch.txt \
    && /opt/serin/bin/pip install --index-url https://download.pytorch.org/whl/cpu --requirement torch.txt
COPY pyproject.toml README.md LICENSE ./
COPY serin serin
COPY flows flows
COPY tasks tasks
COPY deployments deployments
COPY triton_models triton_models
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    /opt/serin/bin/pip install --constraint constraints.txt ".[cpu,flows,kubernetes,mlflow,prefect-server,s3,xgboost]"

FROM ${PYTHON_IMAGE}

RUN groupadd --gid 10001 serin \
    && useradd --uid 10001 --gid serin --create-home serin \
    && install --directory --owner serin --group serin /var/lib/serin
COPY --from=build /opt/serin /opt/serin
ENV PATH=/opt/serin/bin:${PATH} \
    SERIN_HOME=/var/lib/serin \
    PYTHONUNBUFFERED=1 \
    DO_NOT_TRACK=1
USER 10001:10001
WORKDIR /var/lib/serin
HEALTHCHECK --interval=15s --timeout=5s --start-period=60s --retries=4 \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8081/health', timeout=4)"]
CMD ["prefect", "--no-prompt", "worker", "start", "--pool", "cpu", "--type", "serin", "--install-policy", "never", "--with-healthcheck"]
