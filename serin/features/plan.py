"""The fitted features of a dataset: from columns to the arrays a network reads, in numpy or cupy and as an ONNX graph.

A number that is still null after its steps becomes 0 at the end: a network never sees NaN.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from serin.columns.coded import CodedColumn
from serin.columns.column import Column, any_true, array_module
from serin.errors import ColumnUnusable
from serin.features.aggregates.aggregate import Answer, run_fits
from serin.features.fit import Feature, NumericFeature, fit_feature
from serin.features.fitted import Codes, Encoding, Floats, Sample
from serin.features.numbers import CategoricalFeature, Made, Numbers, through
from serin.features.operator import fitted_class, fitted_name
from serin.features.ops.fill import Fill, Missing
from serin.features.own import OwnCodes
from serin.formats.dataset import CategoricalColumn
from serin.formats.schema import Kind
from serin.spec.features import FeatureSpec

if TYPE_CHECKING:
    from serin.columns.onnx_graph import GraphBuilder

FORMAT, VERSION = "serin.features", 2
BLOCK_ROWS = 2**14
_Rows = Callable[[slice], npt.NDArray[Any]]  # a feature of some of the rows


@dataclass(frozen=True, slots=True, kw_only=True)
class FeaturePlan:
    """Numeric features in the order of the spec, categorical ones in the order of the spec."""

    numbers: tuple[NumericFeature, ...]
    categories: tuple[CategoricalFeature, ...]

    @property
    def numeric(self) -> tuple[str, ...]:
        return tuple(feature.name for feature in self.numbers)

    @property
    def categorical(self) -> tuple[CategoricalColumn, ...]:
        return tuple(output for feature in self.categories for output in feature.outputs)

    @property
    def approximate(self) -> dict[str, float]:
        """The numeric features that hold results of logarithms or sines, which are equal within 1 ulp, not bit by bit;
        and how far apart they may be beyond that, because of steps that follow the function."""
        inexact = (feature for feature in self.numbers if not feature.numbers.exact)
        return {feature.name: feature.numbers.slack for feature in inexact}

    @property
    def columns(self) -> dict[str, Kind]:
        """The columns that are needed, with their kinds."""
        needed: dict[str, Kind] = {}
        for feature in self._features():
            needed |= feature.columns
        return needed

    @property
    def number_columns(self) -> set[str]:
        """Those of the columns that are read as numbers, by some feature."""
        return {numbers.column for feature in self._features() for numbers in _raw(feature)}

    def _features(self) -> list[Feature]:
        return [*self.numbers, *self.categories]

    @classmethod
    def fit(
        cls, features: Sequence[FeatureSpec], kinds: Mapping[str, Kind], answer: Answer, *, classes: int = 0
    ) -> FeaturePlan:
        """`answer` measures and merges aggregates over the training rows; `check_kinds` has passed. `classes`: of a
        target with more than two."""
        fits = [fit for feature in features for fit in fit_feature(feature, kinds, classes)]
        fitted = [feature for made in run_fits(fits, answer) for feature in made]
        plan = cls(
            numbers=tuple(feature for feature in fitted if isinstance(feature, NumericFeature)),
            categories=tuple(feature for feature in fitted if isinstance(feature, CategoricalFeature)),
        )
        for names in (plan.numeric, [output.name for output in plan.categorical]):
            name, count = Counter(names).most_common(1)[0] if names else ("", 0)
            if count > 1:
                raise ColumnUnusable(
                    column=name, problem=f"{count} features are called {name!r}; rename a column"
                )
        return plan

    def transform(
        self, columns: Mapping[str, Column], fold_ids: npt.NDArray[np.int64] | None = None
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int32]]:
        """Returns num float32[n, k] and cat int32[n, m] on the device of the columns.

        `fold_ids`: of the training rows, which come first.
        """
        if any(column.xp is not np for column in columns.values()):
            return self._transform_on_gpu(columns, fold_ids)
        blocks = self.block_transform(columns, fold_ids)
        rows = len(next(iter(columns.values())))
        num = np.empty((rows, len(self.numbers)), np.float32)
        cat = np.empty((rows, len(self.categorical)), np.int32)
        blocks.fill(0, num, cat)
        return num, cat

    def block_transform(
        self, columns: Mapping[str, Column], fold_ids: npt.NDArray[np.int64] | None = None
    ) -> BlockTransform:
        """The same, for columns on the host, to fill arrays one piece at a time."""
        return BlockTransform(self.numbers, self.categories, columns, fold_ids)

    def _transform_on_gpu(
        self, columns: Mapping[str, Column], fold_ids: npt.NDArray[np.int64] | None
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int32]]:
        training = 0 if fold_ids is None else len(fold_ids)
        sample = Sample(columns=columns, fold_ids=fold_ids, training=training)
        xp = array_module(*(column.values for column in columns.values()))
        rows = len(sample)
        num = xp.empty((rows, len(self.numbers)), np.float32)
        made: Made = {}
        for index, number in enumerate(self.numbers):
            start = 0
            for values in number.numbers.blocks(sample, max(rows, 1), made):
                null = np.isnan(values)
                final = array_module(values).where(null, np.float32(0), values) if any_true(null) else values
                num[start : start + len(values), index] = xp.asarray(final)
                start += len(values)
        cat = xp.empty((rows, len(self.categorical)), np.int32)
        index = 0
        for feature in self.categories:
            for codes in feature.transform(sample):
                cat[:, index] = xp.asarray(codes)
                index += 1
        return num, cat

    def to_onnx(self, graph: GraphBuilder, inputs: Mapping[str, str]) -> tuple[str, str]:
        """num float32[batch, k] and cat int64[batch, m] from one rank-1 tensor in wire form per column."""
        codes = [code for feature in self.categories for code in feature.to_onnx(graph, inputs)]
        batch = graph.op("Shape", next(iter(inputs.values())))
        return self._numbers_to_onnx(graph, inputs, batch), _stack(graph, codes, batch, np.int64)

    def _numbers_to_onnx(self, graph: GraphBuilder, inputs: Mapping[str, str], batch: str) -> str:
        """Transforms columns with the same steps side by side: few nodes, however many columns."""
        groups: dict[tuple[tuple[str, ...], ...], list[int]] = {}
        for index, feature in enumerate(self.numbers):
            groups.setdefault(tuple(step.shape for step in feature.numbers.steps), []).append(index)
        made: Made = {}
        done = []
        for places in groups.values():
            group = [self.numbers[place].numbers for place in places]
            columns = [numbers.start_to_onnx(graph, inputs, made) for numbers in group]
            values = _stack(graph, columns, batch, np.float32)
            null: str | None = graph.op("IsNaN", values)
            for steps in zip(*(numbers.steps for numbers in group), strict=True):
                values, null = steps[0].to_onnx(graph, values, null, steps)
            if null is not None:
                values = graph.op("Where", null, graph.constant(np.float32(0), "zero"), values)
            done.append(values)
        if len(done) < 2:
            return done[0] if done else _stack(graph, [], batch, np.float32)
        order = np.argsort(np.concatenate([np.asarray(places) for places in groups.values()]))
        return graph.op(
            "Gather",
            graph.op("Concat", *done, axis=1),
            graph.constant(order.astype(np.int64), "order"),
            axis=1,
        )

    def describe(self) -> list[str]:
        """One line per feature, for people."""
        lines = []
        for number in self.numbers:
            filled = any(isinstance(step, Fill | Missing) for step in number.numbers.steps)
            end = "" if filled else "; null becomes 0"
            about = "numeric" if number.numbers.exact else "numeric, within 1 ulp"
            lines.append(f"{number.name} ({about}): {number.numbers.describe()}{end}")
        return lines + [f"{each.name} (categorical): {each.describe()}" for each in self.categories]

    def to_json(self, *, exact_only: bool = False) -> dict[str, Any]:
        """`exact_only`: without the numbers that may differ between machines, for digests; not to be read back."""
        writer = PlanWriter(exact_only=exact_only)
        features: list[dict[str, Any]] = [
            {"name": number.name, "makes": "numeric", **writer.numbers(number.numbers)}
            for number in self.numbers
        ]
        features += [{"makes": "categorical", **writer.codes(feature)} for feature in self.categories]
        return {"format": FORMAT, "version": VERSION, "features": features, "encodings": writer.encodings}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> FeaturePlan:
        """The plan, or ValueError with what is wrong."""
        if document.get("format") != FORMAT or document.get("version") != VERSION:
            raise ValueError(f"not a {FORMAT} version {VERSION} document")
        reader = PlanReader(document["encodings"])
        numeric = [entry for entry in document["features"] if entry["makes"] == "numeric"]
        return cls(
            numbers=tuple(
                NumericFeature(name=entry["name"], numbers=reader.numbers(entry)) for entry in numeric
            ),
            categories=tuple(
                reader.codes(entry) for entry in document["features"] if entry["makes"] == "categorical"
            ),
        )


def _raw(feature: Feature) -> Iterator[Numbers]:
    """Returns the numbers that a feature takes directly from a column."""
    todo: list[Any] = [feature.numbers]
    while todo:
        source = todo.pop()
        if isinstance(source, CategoricalFeature):
            todo.append(source.numbers)
        elif isinstance(source, Numbers):
            if source.encoding is None:
                yield source
            else:
                todo.append(source.encoding.inner)


def _stack(graph: GraphBuilder, columns: Sequence[str], batch: str, dtype: type[np.generic]) -> str:
    """Rank-1 tensors side by side as [batch, n]; also when n is 0."""
    if not columns:
        shape = graph.op("Concat", batch, graph.constant(np.asarray([0], np.int64), "none"), axis=0)
        import onnx

        value = onnx.numpy_helper.from_array(np.zeros(1, dtype))
        return graph.op("ConstantOfShape", shape, value=value)
    last = graph.constant(np.asarray([1], np.int64), "axis")
    return graph.op("Concat", *(graph.op("Unsqueeze", column, last) for column in columns), axis=1)


class PlanWriter:
    """`exact_only` leaves out every number that was fitted on, or is, the result of a function (class B)."""

    def __init__(self, *, exact_only: bool = False) -> None:
        self.encodings: list[dict[str, Any]] = []
        self._places: dict[int, int] = {}
        self._exact_only = exact_only

    def numbers(self, numbers: Numbers) -> dict[str, Any]:
        document: dict[str, Any] = {"column": numbers.column, "kind": numbers.kind}
        exact = True
        if numbers.encoding is not None:
            document |= {"encoding": self._encoding(numbers.encoding), "place": numbers.place}
            exact = numbers.encoding.exact
        document["steps"] = []
        for step in numbers.steps:
            exact = exact and step.exact
            fitted = {} if self._exact_only and not exact else step.to_json()
            document["steps"].append({"step": fitted_name(step), **fitted})
        return document

    def codes(self, feature: CategoricalFeature) -> dict[str, Any]:
        document: dict[str, Any] = {"column": feature.column, "kind": feature.kind}
        if feature.numbers is not None:
            document["numbers"] = self.numbers(feature.numbers)
        return document | {"steps": [{"step": fitted_name(feature.step), **feature.step.to_json()}]}

    def _encoding(self, encoding: Encoding) -> int:
        if id(encoding) not in self._places:
            document: dict[str, Any] = {"encoding": fitted_name(encoding)}
            if encoding.exact or not self._exact_only:
                document |= encoding.to_json()
            if isinstance(encoding.inner, Numbers):
                document["numbers"] = self.numbers(encoding.inner)
            elif encoding.inner is not None:
                document["codes"] = self.codes(encoding.inner)
            self.encodings.append(document)
            self._places[id(encoding)] = len(self.encodings) - 1
        return self._places[id(encoding)]


class PlanReader:
    def __init__(self, encodings: list[dict[str, Any]]) -> None:
        self._documents = encodings
        self._made: dict[int, Encoding] = {}

    def numbers(self, document: Mapping[str, Any]) -> Numbers:
        encoding = self._encoding(document["encoding"]) if "encoding" in document else None
        return Numbers(
            column=document["column"],
            kind=document["kind"],
            encoding=encoding,
            place=document.get("place", 0),
            steps=tuple(fitted_class("numeric", step["step"]).from_json(step) for step in document["steps"]),
        )

    def codes(self, document: Mapping[str, Any]) -> CategoricalFeature:
        (step,) = document["steps"]
        return CategoricalFeature(
            column=document["column"],
            kind=document["kind"],
            step=fitted_class("categorical", step["step"]).from_json(step),
            numbers=self.numbers(document["numbers"]) if "numbers" in document else None,
        )

    def _encoding(self, place: int) -> Encoding:
        if place not in self._made:
            document = self._documents[place]
            inner: Any = None
            if "numbers" in document:
                inner = self.numbers(document["numbers"])
            elif "codes" in document:
                inner = self.codes(document["codes"])
            kind = fitted_class("encoding", document["encoding"])
            self._made[place] = kind.from_json(document, inner)
        return self._made[place]


class BlockTransform:
    """Computes features a block of rows at a time, on the host; what depends on one value is computed once per distinct
    value. A block stays in the processor's cache from the first column to the last, and on its way to disk.

    `fold_ids`: of the rows that train; they come first.
    """

    def __init__(
        self,
        numbers: Sequence[NumericFeature],
        categories: Sequence[CategoricalFeature],
        columns: Mapping[str, Column],
        fold_ids: npt.NDArray[np.int64] | None = None,
    ) -> None:
        training = 0 if fold_ids is None else len(fold_ids)
        self._sample = Sample(columns=columns, fold_ids=fold_ids, training=training)
        self._made: Made = {}
        self._numbers = [self._number(feature.numbers) for feature in numbers]
        self._codes = [source for feature in categories for source in self._codes_of(feature)]

    def fill(self, start: int, num: Floats, cat: Codes) -> None:
        """Fills the two arrays with the features of the rows from `start` on."""
        for begin in range(0, len(num), BLOCK_ROWS):
            end = min(begin + BLOCK_ROWS, len(num))
            rows = slice(start + begin, start + end)
            for made, sources in ((num, self._numbers), (cat, self._codes)):
                for index, source in enumerate(sources):
                    made[begin:end, index] = source(rows)

    def _number(self, numbers: Numbers) -> _Rows:
        if numbers.encoding is not None:
            blocks = list(numbers.blocks(self._sample, max(len(self._sample), 1), self._made))
            return _cut(_without_null(blocks[0]) if blocks else np.empty(0, np.float32))
        column = self._sample.columns[numbers.column]
        if isinstance(column, CodedColumn):
            table = through(numbers.steps, column.of_entries().floats())
            return _looked_up(_without_null(table), column.places.rows)
        return lambda rows: _without_null(through(numbers.steps, column[rows].floats()))

    def _codes_of(self, feature: CategoricalFeature) -> Iterator[_Rows]:
        column = self._sample.columns[feature.column]
        encoded = feature.numbers is not None and feature.numbers.encoding is not None
        own = isinstance(feature.step, OwnCodes)  # it may read more than the value
        entries = None if own or encoded else _entries(column)
        if entries is None:
            yield from map(_cut, feature.transform(self._sample))
            return
        table, places = entries
        few = Sample(columns={feature.column: table})
        for codes in feature.transform(few):
            yield _looked_up(codes, places)


def _cut(values: npt.NDArray[Any]) -> _Rows:
    """A feature that was made of all rows at once."""
    return lambda rows: values[rows]


def _looked_up(table: npt.NDArray[Any], places: npt.NDArray[Any]) -> _Rows:
    """A feature that is looked up in a table: `places` has each row's entry; -1 is the last."""
    return lambda rows: np.take(table, places[rows], mode="wrap")


def _entries(column: Column) -> tuple[Column, npt.NDArray[Any]] | None:
    """The column's table and the rows' places in it, when it has one."""
    if isinstance(column, CodedColumn):
        return column.of_entries(), column.places.rows
    if column.dictionary is None:
        return None
    codes = np.append(np.arange(len(column.dictionary), dtype=np.int32), np.int32(-1))
    return Column(kind=column.kind, values=codes, dictionary=column.dictionary), column.values


def _without_null(values: Floats) -> Floats:
    """A number that is still null after its steps becomes 0: a network never sees NaN."""
    null = np.isnan(values)
    return np.where(null, np.float32(0), values) if any_true(null) else values
