"""The features of a TFDS dataset: parses features.json, and converts between arrays and the values of a record.

A step feature has one value per step. Tensors are lists of float32 or int64, or a byte string each; images are encoded
files in byte strings. float64 and uint64 have no exact list type, so they are written as byte strings. JPEGs are
decoded with libjpeg's accurate DCT; TensorFlow's faster default differs from it by a few levels of 255.
"""

from __future__ import annotations

import io
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import cv2
import numpy as np
from PIL import Image

from nightshift.data.formats.tf_example import Values
from nightshift.data.tensors import DTYPES, Column

_MODULE = "tensorflow_datasets.core.features"
_IN_LISTS = ("bool", "int64", "uint32", "float32")
"""Written as lists; other dtypes as raw bytes, which is exact, and shorter than lists of int64."""
_UNKNOWN = -1
_IMAGE_AXES = 3


class BadFeature(ValueError):
    """A feature or its values are invalid; the caller adds the location."""


@dataclass(frozen=True, kw_only=True)
class Feature:
    kind: Literal["tensor", "image", "text"]
    dtype: str = ""  # of tensors and images
    shape: tuple[int, ...] = ()  # -1 where the size of an image is not declared
    encoding: str = "none"  # of tensors: none, bytes or zlib


TEXT = Feature(kind="text")
_FORMATS = ("PNG", "JPEG", "BMP", "GIF")
"""The encodings of images in TFDS."""


def feature_of(column: Column) -> Feature:
    """The feature for a column [N, …]: an image (PNG) or a tensor."""
    dtype, shape = column.dtype.name, column.shape[1:]
    if dtype == "uint8" and len(shape) == _IMAGE_AXES and shape[-1] in (1, 3) and math.prod(shape):
        return Feature(kind="image", dtype=dtype, shape=shape)
    in_lists = dtype in _IN_LISTS and math.prod(shape)
    return Feature(kind="tensor", dtype=dtype, shape=shape, encoding="none" if in_lists else "bytes")


def encode(feature: Feature, values: Column | list[str]) -> Values:
    """Encode N values for a record."""
    if isinstance(values, list):
        return [text.encode() for text in values]
    if feature.kind == "image":
        return [_encode_png(image) for image in values]
    if feature.encoding == "bytes":
        return [value.tobytes() for value in values]
    return values.ravel().astype(np.float32 if values.dtype.kind == "f" else np.int64)


def decode(feature: Feature, values: Values, count: int) -> Column | list[str]:
    """Decode the `count` values of a feature: an array [count, …], or texts."""
    if feature.kind == "tensor" and feature.encoding == "none":
        return _from_list(feature, values, count)
    if not isinstance(values, list):
        raise BadFeature("holds numbers, not strings")
    if len(values) != count:
        raise BadFeature(f"has {len(values)} values, not {count}")
    if feature.kind == "text":
        return [_text(value) for value in values]
    if feature.kind == "image":
        return _images(feature, values)
    return _from_bytes(feature, values)


def nbytes(feature: Feature, values: Values, count: int) -> int:
    """What `count` values decode to, in bytes, without decoding them."""
    if feature.kind == "text":
        return 0  # texts are not compressed
    itemsize = np.dtype(feature.dtype).itemsize
    if feature.kind == "image" and _UNKNOWN in feature.shape and isinstance(values, list):
        return sum(math.prod(_image_size(value)) for value in values) * max(1, abs(feature.shape[-1])) * itemsize
    return count * math.prod(feature.shape) * itemsize


def parse(node: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Feature]]:
    """The features of a FeaturesDict by path ("observation/front"); KeyError, ValueError, … if it is invalid."""
    for name, child in node["featuresDict"].get("features", {}).items():
        where = f"{path}{name}"
        if "featuresDict" in child:
            yield from parse(child, f"{where}/")
        else:
            yield where, _leaf(child, where)


def to_json(features: Mapping[str, Feature]) -> dict[str, Any]:
    """The FeaturesDict of these features, which are given by path."""
    return features_dict(_nested((path.split("/"), _leaf_json(feature)) for path, feature in features.items()))


def features_dict(features: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "pythonClassName": f"{_MODULE}.features_dict.FeaturesDict",
        "featuresDict": {"features": dict(features)},
    }


def steps_json(features: Mapping[str, Feature]) -> dict[str, Any]:
    return {
        "pythonClassName": f"{_MODULE}.dataset_feature.Dataset",
        "sequence": {"feature": to_json(features), "length": str(_UNKNOWN)},
    }


def _leaf(node: Mapping[str, Any], where: str) -> Feature:
    kind = node["pythonClassName"].rpartition(".")[2]
    if kind == "Text":
        return TEXT
    if kind == "ClassLabel":
        return Feature(kind="tensor", dtype="int64")
    if kind not in ("Tensor", "Scalar", "Image"):
        raise BadFeature(f"{where} is a feature of kind {kind}; read are Tensor, Scalar, Image, Text and ClassLabel")
    content = node["image" if kind == "Image" else "tensor"]
    shape = tuple(map(int, content.get("shape", {}).get("dimensions", ())))
    dtype = content.get("dtype") or ("uint8" if kind == "Image" else "unknown")
    if dtype in ("string", "object") and not shape:
        return TEXT
    if dtype not in DTYPES:
        raise BadFeature(f"{where} is a tensor of {dtype} {list(shape)}; read are {', '.join(DTYPES)}")
    if kind == "Image":
        return Feature(kind="image", dtype=dtype, shape=_image_shape(shape or (_UNKNOWN, _UNKNOWN, 3), where))
    if any(size < 0 for size in shape):
        raise BadFeature(f"{where} has no fixed shape: {list(shape)}")
    return Feature(kind="tensor", dtype=dtype, shape=shape, encoding=content.get("encoding") or "none")


def _image_shape(shape: tuple[int, ...], where: str) -> tuple[int, ...]:
    if len(shape) != _IMAGE_AXES or any(size < 1 and size != _UNKNOWN for size in shape):
        raise BadFeature(f"{where} is an image of shape {list(shape)}, not of height, width and channels")
    return shape


def _leaf_json(feature: Feature) -> dict[str, Any]:
    shape = {"dimensions": [str(size) for size in feature.shape]} if feature.shape else {}
    content = {"shape": shape, "dtype": feature.dtype}
    if feature.kind == "text":
        return {"pythonClassName": f"{_MODULE}.text_feature.Text", "text": {}}
    if feature.kind == "image":
        image = {**content, "encodingFormat": "png"}
        return {"pythonClassName": f"{_MODULE}.image_feature.Image", "image": image}
    tensor = {**content, "encoding": feature.encoding}
    return {"pythonClassName": f"{_MODULE}.tensor_feature.Tensor", "tensor": tensor}


def _nested(leaves: Iterable[tuple[list[str], Any]]) -> dict[str, Any]:
    groups: dict[str, list[tuple[list[str], Any]]] = {}
    for (name, *rest), leaf in leaves:
        groups.setdefault(name, []).append((rest, leaf))
    nested = {}
    for name, members in groups.items():
        alone = not all(rest for rest, _ in members)
        if not name or (alone and len(members) > 1):
            raise BadFeature(f"no feature can be named {name!r}, as it is empty or the name of a group, too")
        nested[name] = members[0][1] if alone else features_dict(_nested(members))
    return nested


def _from_list(feature: Feature, values: Values, count: int) -> Column:
    flat = np.asarray(values, np.int64) if isinstance(values, list) and not values else values
    if isinstance(flat, list):
        raise BadFeature("holds strings, not numbers")
    if len(flat) != count * math.prod(feature.shape):
        raise BadFeature(f"has {len(flat)} numbers, not {count} times {list(feature.shape)}")
    if (flat.dtype.kind == "f") != (feature.dtype.startswith("float")) and len(flat):
        raise BadFeature(f"holds {flat.dtype}, but {feature.dtype} is declared")
    shaped = flat.reshape(count, *feature.shape)
    if feature.dtype == "uint64":
        return shaped.view(np.uint64)
    cast = shaped.astype(feature.dtype)
    if cast.dtype.kind != "f" and not np.array_equal(cast, shaped):
        raise BadFeature(f"holds numbers that do not fit into {feature.dtype}")
    return cast


def _from_bytes(feature: Feature, values: list[bytes]) -> Column:
    size = math.prod(feature.shape) * np.dtype(feature.dtype).itemsize
    raw = [_inflated(value, size) for value in values] if feature.encoding == "zlib" else values
    if wrong := [len(value) for value in raw if len(value) != size]:
        raise BadFeature(f"has a value of {wrong[0]} bytes, not of {size}")
    return np.frombuffer(b"".join(raw), feature.dtype).reshape(len(raw), *feature.shape)


def _inflated(value: bytes, size: int) -> bytes:
    try:
        return zlib.decompressobj().decompress(
            value, size + 1
        )  # at most size + 1 bytes, so a zip bomb cannot fill the memory
    except zlib.error as error:
        raise BadFeature(f"has a value that zlib cannot read: {error}") from None


def _text(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise BadFeature("holds bytes that are not UTF-8") from None


def _encode_png(image: Column) -> bytes:
    ok, content = cv2.imencode(".png", image[..., ::-1] if image.shape[-1] == _IMAGE_AXES else image)
    if not ok:
        raise BadFeature("holds an image that cannot be written as PNG")
    return content.tobytes()


_TO_RGB = {
    (1, 3): cv2.COLOR_GRAY2RGB,
    (3, 3): cv2.COLOR_BGR2RGB,
    (4, 3): cv2.COLOR_BGRA2RGB,
    (4, 4): cv2.COLOR_BGRA2RGBA,
}
"""Keys: channels in the file, channels of the feature."""


def _images(feature: Feature, values: list[bytes]) -> Column:
    images = [_decode_image(feature, value) for value in values]
    if len(sizes := {image.shape for image in images}) > 1:
        raise BadFeature(f"holds images of several sizes: {', '.join(str(list(size)) for size in sorted(sizes))}")
    return np.stack(images)


def _image_size(content: bytes) -> tuple[int, int]:
    """Height and width from the header of an image: a kilobyte of PNG can hold gigabytes of pixels."""
    try:
        with Image.open(io.BytesIO(content), formats=_FORMATS) as image:
            return image.height, image.width
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise BadFeature(f"holds an image that cannot be decoded: {error}") from None


def _decode_image(feature: Feature, content: bytes) -> Column:
    as_bytes = feature.dtype == "float32"  # TFDS stores the four bytes of a float as four channels
    channels = 4 if as_bytes else feature.shape[-1]
    height, width = _image_size(content)
    if feature.shape[0] not in (height, _UNKNOWN) or feature.shape[1] not in (width, _UNKNOWN):
        raise BadFeature(f"holds an image of {[height, width]}, but {list(feature.shape)} is declared")
    try:
        read: Column | None = cv2.imdecode(np.frombuffer(content, np.uint8), cv2.IMREAD_UNCHANGED)
    except cv2.error:
        read = None
    if read is None:
        raise BadFeature("holds an image that cannot be decoded")
    read = np.atleast_3d(read)
    if conversion := _TO_RGB.get((read.shape[-1], channels)):
        read = cv2.cvtColor(read, conversion)
    image = np.ascontiguousarray(read).view(np.float32) if as_bytes else read
    fits = image.ndim == len(feature.shape) and all(
        wanted in (found, _UNKNOWN) for found, wanted in zip(image.shape, feature.shape, strict=True)
    )
    if not fits or image.dtype.name != feature.dtype:
        declared = f"{feature.dtype} {list(feature.shape)}"
        raise BadFeature(f"holds an image of {image.dtype} {list(image.shape)}, but {declared} is declared")
    return image
