"""What GPU tests need, and why it is missing where it is."""

from serin.errors import TritonMissing


def why_no_release(backend: str = "") -> str:
    """Why no release can be served by a GPU here, with a backend of Triton's; empty where one can."""
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    from serin.scoring.session import has_device
    from serin.serving.triton.installation import find_triton

    if not torch.cuda.is_available():
        return "no GPU that torch can use"
    if not has_device("cuda"):
        return "this ONNX Runtime has no CUDA provider"
    try:
        server = find_triton().describe(gpus=True)
    except TritonMissing as error:
        return str(error)
    if backend:
        return server.no_cuda if backend in server.backends else f"this Triton has no backend {backend}"
    return "" if "cuda" in server.accelerators else "the ONNX Runtime of Triton's Python has no CUDA provider"
