"""The peers: how each is started, its requests and its answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.serving import model


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """How a peer is started (the arguments of its Python), and its requests and answers."""

    package: str
    command: tuple[str, ...]
    body: Callable[[model.Columns], Any]
    path: str = "/score"
    bytes_path: str = ""  # if it also takes plain bytes
    read: Callable[[Any], list[float]] = lambda answer: answer["score"]


def columns_body(columns: model.Columns) -> Any:
    return {name: values.reshape(-1).tolist() for name, values in columns.items()}


def bytes_body(columns: model.Columns) -> bytes:
    """Returns the bytes that the peers' Graph.score_bytes reads."""
    count = len(columns["n0"])
    numbers = b"".join(columns[f"n{index}"].astype("<f4").tobytes() for index in range(model.NUMBERS))
    texts = [text for index in range(model.TEXTS) for text in columns[f"t{index}"].reshape(-1).tolist()]
    return count.to_bytes(4, "little") + numbers + "\n".join(texts).encode()


def protocol_body(columns: model.Columns) -> Any:
    """Returns the JSON of the Open Inference Protocol."""
    return {
        "inputs": [
            {
                "name": column.name,
                "datatype": column.dtype,
                "shape": list(columns[column.name].shape),
                "data": columns[column.name].reshape(-1).tolist(),
            }
            for column in model.SCHEMA.inputs
        ]
    }


def protocol_answer(answer: Any) -> list[float]:
    data: list[float] = answer["outputs"][0]["data"]
    return data


PACKAGE = "benchmarks.serving.peers"
PEERS = {
    "FastAPI": Peer(
        package="fastapi", command=("-m", f"{PACKAGE}.fastapi_peer"), body=columns_body, bytes_path="/score_bytes"
    ),
    "LitServe": Peer(package="litserve", command=("-m", f"{PACKAGE}.litserve_peer"), body=columns_body),
    "BentoML": Peer(
        package="bentoml",
        command=("-m", "bentoml", "serve", f"{PACKAGE}.bentoml_peer:Scorer", "--host", "127.0.0.1", "--port", "{port}"),
        body=lambda columns: {"columns": columns_body(columns)},
    ),
    "Ray Serve": Peer(package="ray", command=("-m", f"{PACKAGE}.ray_peer"), body=columns_body),
    "MLServer": Peer(
        package="mlserver",
        command=("-c", "from mlserver.cli import main; main()", "start", "{folder}"),
        path="/v2/models/scorer/infer",
        body=protocol_body,
        read=protocol_answer,
    ),
}  # fmt: skip
