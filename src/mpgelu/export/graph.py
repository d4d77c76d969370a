"""Construction of ONNX graphs from formulas: values with operators, each of which adds one node."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any

import numpy as np
import onnx
from numpy.typing import ArrayLike
from onnx import TensorProto, helper, numpy_helper

OPSET = 20
_IR_VERSION = 10  # that of opset 20; a newer one would lock out runtimes that could run the graph


class Graph:
    """The nodes and constants of an ONNX graph under construction.

    Args:
        outer: The surrounding graph if this is the body of a loop; it stores the constants.
    """

    def __init__(self, outer: Graph | None = None) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, onnx.TensorProto] = {} if outer is None else outer.constants
        self._numbers: Iterator[int] = count(1) if outer is None else outer._numbers

    def value(self, name: str) -> Value:
        """Return the value of a name: an input, or the output of a node that was added separately."""
        return Value(self, name)

    def constant(self, array: ArrayLike) -> Value:
        """Add a constant: floating-point values as float32, integers as int64, booleans unchanged."""
        array = np.asarray(array)
        kind = {"f": np.float32, "i": np.int64}.get(array.dtype.kind, array.dtype)
        name = self.new_name()
        self.constants[name] = numpy_helper.from_array(array.astype(kind), name)
        return Value(self, name)

    def op(self, kind: str, *inputs: Value | ArrayLike, **attributes: Any) -> Value:
        """Add a node with one output and return its value.

        Args:
            kind: Name of the ONNX operator.
            *inputs: Values, or arrays that become constants.
            **attributes: Attributes of the node.
        """
        return self.ops(kind, 1, *inputs, **attributes)[0]

    def ops(self, kind: str, count: int, *inputs: Value | ArrayLike, **attributes: Any) -> tuple[Value, ...]:
        """Add a node with several outputs and return their values; see :meth:`op`."""
        names = [part.name if isinstance(part, Value) else self.constant(part).name for part in inputs]
        outputs = [self.new_name() for _ in range(count)]
        self.nodes.append(helper.make_node(kind, names, outputs, **attributes))
        return tuple(Value(self, name) for name in outputs)

    def loop(
        self,
        body: Callable[[Graph, Value, Sequence[Value]], tuple[Value, Sequence[Value]]],
        most: int,
        begin: Value,
        start: Sequence[Value],
    ) -> tuple[Value, ...]:
        """Add a loop and return its final values.

        Args:
            body: Adds the nodes of one iteration to a given graph: from the iteration number and the current values to
                whether to continue and the new values.
            most: Largest number of iterations.
            begin: Whether to execute a first iteration.
            start: Initial values.
        """
        inner = Graph(self)
        count, go_on = inner.value(inner.new_name()), inner.new_name()
        inputs = [inner.value(inner.new_name()) for _ in start]
        condition, results = body(inner, count, inputs)
        subgraph = helper.make_graph(
            inner.nodes,
            "body",
            [
                helper.make_tensor_value_info(count.name, TensorProto.INT64, []),
                helper.make_tensor_value_info(go_on, TensorProto.BOOL, []),
                *(helper.make_tensor_value_info(value.name, TensorProto.FLOAT, None) for value in inputs),
            ],
            [
                helper.make_tensor_value_info(condition.name, TensorProto.BOOL, []),
                *(helper.make_tensor_value_info(value.name, TensorProto.FLOAT, None) for value in results),
            ],
        )
        return self.ops("Loop", len(start), most, begin, *start, body=subgraph)

    def include(self, model: onnx.ModelProto, *inputs: Value) -> list[Value]:
        """Copy all nodes of another model into the graph, applied to the given values, and return its outputs."""
        names = {part.name: value.name for part, value in zip(model.graph.input, inputs, strict=True)}

        def renamed(name: str) -> str:
            return names.setdefault(name, self.new_name()) if name else name

        for tensor in model.graph.initializer:
            copy = onnx.TensorProto()
            copy.CopyFrom(tensor)
            copy.name = renamed(tensor.name)
            self.constants[copy.name] = copy
        self.nodes += _renamed(model.graph.node, renamed)
        return [self.value(renamed(part.name)) for part in model.graph.output]

    def model(
        self,
        inputs: Mapping[str, Sequence[str | int]],
        outputs: Mapping[str, tuple[Value, Sequence[str | int]]],
        metadata: Mapping[str, str],
    ) -> onnx.ModelProto:
        """Return the finished and checked model, without unused nodes; all inputs and outputs are float32.

        Args:
            inputs: Shape of each input by name; a string stands for a size that is known when the graph runs.
            outputs: Value and shape of each output by name. Each value must be the output of a distinct node.
            metadata: Texts stored with the graph.
        """
        final = {name: value.name for name, (value, _) in outputs.items()}
        public = {value: name for name, value in final.items()}
        nodes = _renamed(_needed(self.nodes, final.values()), lambda name: public.get(name, name))
        used = {name for node in nodes for name in _inputs(node)}
        graph = helper.make_graph(
            nodes,
            "mpgelu",
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in inputs.items()],
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, (_, shape) in outputs.items()],
            [tensor for name, tensor in self.constants.items() if name in used],
        )
        model = helper.make_model(
            graph, producer_name="mpgelu", ir_version=_IR_VERSION, opset_imports=[helper.make_opsetid("", OPSET)]
        )
        helper.set_model_props(model, dict(metadata))
        onnx.checker.check_model(model, full_check=True)
        return model

    def new_name(self) -> str:
        """Return a name that is unique in the graph."""
        return f"v{next(self._numbers)}"


def _inputs(node: onnx.NodeProto) -> Iterator[str]:
    """Iterate over the names of the inputs of a node, including those of the nodes in its body."""
    yield from node.input
    for attribute in node.attribute:
        for inner in attribute.g.node:
            yield from _inputs(inner)


def _needed(nodes: Sequence[onnx.NodeProto], outputs: Iterable[str]) -> list[onnx.NodeProto]:
    """Return the nodes on which the outputs depend."""
    wanted, found = set(outputs), []
    for node in reversed(nodes):
        if wanted.intersection(node.output):
            wanted.update(_inputs(node))
            found.append(node)
    return found[::-1]


def _renamed(nodes: Iterable[onnx.NodeProto], new_name: Callable[[str], str]) -> list[onnx.NodeProto]:
    """Return copies of nodes with renamed values, also in their bodies, without names and notes.

    Args:
        nodes: The nodes to copy.
        new_name: Function from the name of a value to its new name.
    """
    copies = []
    for node in nodes:
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        for field in ("name", "doc_string", "metadata_props"):  # torch writes stack traces with paths of files there
            copy.ClearField(field)
        copy.input[:] = map(new_name, node.input)
        copy.output[:] = map(new_name, node.output)
        for body in (attribute.g for attribute in copy.attribute if attribute.HasField("g")):
            inner = _renamed(body.node, new_name)
            del body.node[:]
            body.node.extend(inner)
            for value in (*body.input, *body.output, *body.initializer):
                value.name = new_name(value.name)
        copies.append(copy)
    return copies


class Value:
    """The output of a node; operators and methods add further nodes.

    Args:
        graph: The graph of the node.
        name: Name of the value in the graph.
    """

    __array_ufunc__ = None  # lets an array on the left leave the operation to us

    def __init__(self, graph: Graph, name: str) -> None:
        self.graph, self.name = graph, name

    def op(self, kind: str, *others: Value | ArrayLike, **attributes: Any) -> Value:
        """Add a node with this value as its first input and return its value."""
        return self.graph.op(kind, self, *others, **attributes)

    def __add__(self, other: Value | ArrayLike) -> Value:
        """Return the sum."""
        return self.op("Add", other)

    def __sub__(self, other: Value | ArrayLike) -> Value:
        """Return the difference."""
        return self.op("Sub", other)

    def __rsub__(self, other: ArrayLike) -> Value:
        """Return the difference from a constant."""
        return self.graph.op("Sub", other, self)

    def __mul__(self, other: Value | ArrayLike) -> Value:
        """Return the elementwise product."""
        return self.op("Mul", other)

    def __truediv__(self, other: Value | ArrayLike) -> Value:
        """Return the quotient."""
        return self.op("Div", other)

    def __matmul__(self, other: Value | ArrayLike) -> Value:
        """Return the matrix product."""
        return self.op("MatMul", other)

    def square(self) -> Value:
        """Return the square."""
        return self * self

    def sqrt(self) -> Value:
        """Return the square root."""
        return self.op("Sqrt")

    def exp(self) -> Value:
        """Return the exponential."""
        return self.op("Exp")

    def reshape(self, *shape: int) -> Value:
        """Return the value in another shape; 0 keeps a dimension and -1 is inferred, as in ONNX."""
        return self.op("Reshape", shape)

    def take(self, index: int | Sequence[int]) -> Value:
        """Return some entries of the first dimension, or a single one, without that dimension."""
        return self.op("Gather", index, axis=0)
