"""tf.train.Example without TensorFlow: named lists of bytes, float32 or int64, as protobuf.

The protobuf message is declared in its own descriptor pool, so it does not conflict with TensorFlow's declaration.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from nightshift.data.tensors import Column

Values = Column | list[bytes]
"""The values of one feature: float32 [n], int64 [n], or n byte strings."""


class NotAnExample(ValueError):
    """The bytes are not a tf.train.Example."""


def decode(record: bytes) -> dict[str, Values]:
    try:
        example = _Example.FromString(record)
    except DecodeError as error:
        raise NotAnExample(str(error)) from None
    return {name: _values(feature) for name, feature in example.features.feature.items()}


def encode(features: Mapping[str, Values]) -> bytes:
    """Deterministic: the same features give the same bytes."""
    example = _Example()
    for name, values in features.items():
        kind = "bytes_list" if isinstance(values, list) else _KINDS[values.dtype.name]
        plain = values if isinstance(values, list) else values.tolist()
        getattr(example.features.feature[name], kind).value.extend(plain)
    encoded: bytes = example.SerializeToString(deterministic=True)
    return encoded


_DTYPES = {"float_list": np.float32, "int64_list": np.int64}
_KINDS = {np.dtype(dtype).name: kind for kind, dtype in _DTYPES.items()}


def _values(feature: Any) -> Values:
    kind = feature.WhichOneof("kind")
    if kind is None:  # some writers omit empty lists
        return []
    found = getattr(feature, kind).value
    return list(found) if kind == "bytes_list" else np.array(found, _DTYPES[kind])


def _message(name: str, *fields: descriptor_pb2.FieldDescriptorProto) -> descriptor_pb2.DescriptorProto:
    return descriptor_pb2.DescriptorProto(name=name, field=fields)


def _field(name: str, number: int, kind: str, *, label: str = "OPTIONAL") -> descriptor_pb2.FieldDescriptorProto:
    """`kind` is a protobuf type or the name of a message."""
    of = descriptor_pb2.FieldDescriptorProto
    typed = {"type": of.TYPE_MESSAGE, "type_name": kind} if kind.startswith(".") else {"type": of.Type.Value(kind)}
    return of(name=name, number=number, label=of.Label.Value(f"LABEL_{label}"), **typed)


def _described() -> Any:
    entry = _message("FeatureEntry", _field("key", 1, "TYPE_STRING"), _field("value", 2, ".tensorflow.Feature"))
    entry.options.map_entry = True
    features = _message("Features", _field("feature", 1, ".tensorflow.Features.FeatureEntry", label="REPEATED"))
    features.nested_type.append(entry)
    lists = {"bytes_list": "BytesList", "float_list": "FloatList", "int64_list": "Int64List"}
    feature = _message("Feature", *(_field(n, i, f".tensorflow.{m}") for i, (n, m) in enumerate(lists.items(), 1)))
    feature.oneof_decl.add(name="kind")
    for choice in feature.field:
        choice.oneof_index = 0
    described = descriptor_pb2.FileDescriptorProto(
        name="nightshift/tf_example.proto",
        package="tensorflow",
        syntax="proto3",
        message_type=[
            *(_message(m, _field("value", 1, f"TYPE_{m[:-4].upper()}", label="REPEATED")) for m in lists.values()),
            feature,
            features,
            _message("Example", _field("features", 1, ".tensorflow.Features")),
        ],
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(described)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("tensorflow.Example"))


_Example = _described()
