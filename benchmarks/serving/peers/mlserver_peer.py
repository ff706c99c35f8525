"""MLServer with a custom runtime and the Open Inference Protocol's JSON.

It runs in the server's process, which is faster than a worker process for a model this small.
"""

from __future__ import annotations

from mlserver import MLModel
from mlserver.codecs import NumpyCodec, StringCodec
from mlserver.types import InferenceRequest, InferenceResponse, ResponseOutput

from benchmarks.serving.peers.graph import Graph


class Scorer(MLModel):
    async def load(self) -> bool:
        self.graph = Graph()
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        columns = {
            tensor.name: StringCodec.decode_input(tensor)
            if tensor.datatype == "BYTES"
            else NumpyCodec.decode_input(tensor)
            for tensor in payload.inputs
        }
        scores = self.graph.score(columns)
        output = ResponseOutput(name="score", shape=[len(scores), 1], datatype="FP32", data=scores)
        return InferenceResponse(model_name=self.name, outputs=[output])
