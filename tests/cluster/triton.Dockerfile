# The base of docker/triton.Dockerfile where NVIDIA's image cannot be pulled: the wheel's Triton in the same folders.
ARG BASE
FROM ${BASE}
ARG WHEEL
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    python3 -m venv /tmp/env && /tmp/env/bin/pip install --no-deps --target /tmp/wheel "${WHEEL}" \
    && mv /tmp/wheel/pytriton/tritonserver /opt/tritonserver && mv /tmp/wheel/nvidia_pytriton.libs /opt/tritonserver/lib \
    && cp /opt/tritonserver/python_backend_stubs/3.11/* /opt/tritonserver/backends/python/ && rm -r /tmp/env /tmp/wheel
