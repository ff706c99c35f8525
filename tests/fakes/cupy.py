"""Stands in for cupy where there is no GPU: arrays that refuse, as cupy's do, to be mixed with numpy's by accident."""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

_COMPILED = (
    "any",
    "all",
    "count_nonzero",
)  # of booleans: cupy compiles a kernel of two seconds for every size


class Array(np.lib.mixins.NDArrayOperatorsMixin):
    """Its memory is the host's; everything else is as strict as on a GPU."""

    def __init__(self, host: Any) -> None:
        self._host = host

    def get(self, out: Any = None) -> Any:
        if out is None:
            return self._host.copy()
        out[...] = self._host
        return out

    def set(self, host: Any) -> None:
        self._host[...] = host

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError("Implicit conversion to a NumPy array is not allowed. Please use `.get()`")

    def __array_ufunc__(self, function: Any, method: str, *inputs: Any, **options: Any) -> Any:
        out = options.pop("out", None)
        if out is not None:  # in place
            options["out"] = unwrapped(out)
        made = wrapped(getattr(function, method)(*unwrapped(inputs), **options))
        return made if out is None else out[0]

    def __array_function__(self, function: Any, types: Any, inputs: Any, options: Any) -> Any:
        _refuse_compiling(function.__name__)
        return wrapped(function(*unwrapped(inputs), **options))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        _refuse_compiling(name)
        found = getattr(self._host, name)
        if not callable(found):
            return found
        return lambda *inputs, **options: wrapped(found(*unwrapped(inputs), **options))

    def __getitem__(self, place: Any) -> Any:
        return wrapped(self._host[_place(place)])

    def __setitem__(self, place: Any, value: Any) -> None:
        (plain,) = unwrapped((value,))
        self._host[_place(place)] = plain

    def __len__(self) -> int:
        return len(self._host)

    def __bool__(self) -> bool:
        return bool(self._host)

    def __int__(self) -> int:
        return int(self._host)

    def __reduce__(self) -> Any:
        return wrapped, (self._host,)


Array.__module__ = "cupy"


def _refuse_compiling(name: str) -> None:
    if name in _COMPILED:
        raise AssertionError(f"{name}() of booleans compiles a kernel: use any_true or count_true")


def unwrapped(values: Any) -> Any:
    for value in values:
        if isinstance(value, np.ndarray) and value.ndim:
            raise TypeError("Unsupported type <class 'numpy.ndarray'>")
    return tuple(_unwrapped(value) for value in values)


def _unwrapped(value: Any) -> Any:
    if isinstance(value, list) and any(isinstance(each, Array) for each in value):
        return list(unwrapped(value))
    return value._host if isinstance(value, Array) else value


def wrapped(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(wrapped(each) for each in value)
    return Array(np.asarray(value)) if isinstance(value, np.ndarray | np.generic) else value


def _place(place: Any) -> Any:
    return unwrapped(place) if isinstance(place, tuple) else unwrapped((place,))[0]


class FakeCupy(ModuleType):
    """`asarray` is the only door from the host; `full_at`: the number of the upload at which memory is at its end."""

    def __init__(self, full_at: int | None = None) -> None:
        super().__init__("cupy")
        self.__spec__ = ModuleSpec("cupy", None)
        self.cuda = SimpleNamespace(
            runtime=SimpleNamespace(memGetInfo=lambda: (2**33, 2**34)),
            get_current_stream=lambda: SimpleNamespace(synchronize=lambda: None),
        )
        self.add = SimpleNamespace(at=lambda *inputs: np.add.at(*unwrapped(inputs)))
        self.uploads = 0
        self._full_at = full_at

    def asarray(self, value: Any, dtype: Any = None) -> Array:
        if isinstance(value, Array):
            return value
        self.uploads += 1
        if self._full_at is not None and self.uploads >= self._full_at:
            raise MemoryError("Out of memory allocating 1,024 bytes (a stand-in)")
        return Array(np.array(value, dtype))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        function = getattr(np, name)
        return lambda *inputs, **options: wrapped(function(*unwrapped(inputs), **options))


def install(monkeypatch: pytest.MonkeyPatch, full_at: int | None = None) -> FakeCupy:
    """cupy, as the code under test will import it."""
    module = FakeCupy(full_at)
    pinned = ModuleType("cupyx")
    pinned.empty_pinned = np.empty  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cupy", module)
    monkeypatch.setitem(sys.modules, "cupyx", pinned)
    return module
