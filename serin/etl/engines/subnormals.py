"""Kernels of cupy that keep subnormal float32, as the host does (docs/adr/0022-subnormal-numbers.md).

cupy compiles everything with -ftz=true, which makes numbers nearer to zero than 1.2e-38 zero in comparisons and
products. It has no setting for that.
"""

from __future__ import annotations

import logging
from typing import Any

_log = logging.getLogger(__name__)
_CACHE_KEY = "_get_cupy_cache_key"
_MARK = " keeps subnormal numbers"  # kernels of other programs are in the same cache


def keep_subnormals() -> None:
    """Lets cupy compile without -ftz in this process, from now on."""
    from cupy.cuda import compiler

    program: Any = getattr(compiler, "_NVRTCProgram", None)
    cache_key: Any = getattr(compiler, _CACHE_KEY, None)
    if program is not None and cache_key is not None and not hasattr(program, "keeps_subnormals"):
        compiled, key = program.compile, f"{cache_key()}{_MARK}"

        def compile_exactly(self: Any, options: tuple[str, ...] = (), *rest: Any, **named: Any) -> Any:
            exact = tuple("-ftz=false" if option == "-ftz=true" else option for option in options)
            return compiled(self, exact, *rest, **named)

        program.compile, program.keeps_subnormals = compile_exactly, True
        setattr(compiler, _CACHE_KEY, lambda: key)


def warn_if_flushed() -> None:
    """Warns when subnormal numbers are zero on the GPU even so, as with a cupy whose names have changed."""
    import cupy

    if not bool((cupy.asarray([1e-45], dtype="f4") * 2 > 0)[0]):
        _log.warning(
            "cupy %s makes numbers nearer to zero than 1.2e-38 zero; the host does not", cupy.__version__
        )


def dask_setup(worker: Any) -> None:
    """Called by each worker of a Dask cluster that preloads this module, before it has a CUDA context."""
    del worker
    keep_subnormals()
