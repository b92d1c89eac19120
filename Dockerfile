# vLLM's own image with the plugin; `make wheel` first. For another release: docker build --build-arg TAG=v0.26.0 .
ARG TAG=v0.32.0
FROM vllm/vllm-openai:${TAG}
RUN --mount=type=bind,source=dist,target=/dist uv pip install --system --no-cache /dist/*.whl
