"""What a request carries from stage to stage: a two-level map, section and name to a tensor, scalar, string or list."""

from __future__ import annotations

import json
import logging
import math
import struct
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from deltaic import _core

logger = logging.getLogger(__name__)

Array = npt.NDArray[Any]
Payload = dict[str, Any]  # section -> {name: value}, or a plain value
Key = tuple[str, str]  # section and name

_MAGIC = b"dlp1"
_NUMBER_KINDS = "biufc"  # of numpy's types


class PayloadBuffers:
    """The payload of each live request: one object a request, which everyone who asks is given.

    Tensors are copied on the way in, so that no state points into memory that a later step or a graph writes again.
    Those of `resident_keys` stay on their device; all others come to the host, contiguous.
    """

    def __init__(self, resident_keys: Iterable[Key] = ()) -> None:
        self._resident = frozenset(resident_keys)
        self._payloads: dict[str, Payload] = {}

    def add(self, req_id: str) -> Payload:
        """Return the payload of a request, an empty one if it is new."""
        return self._payloads.setdefault(req_id, {})

    def get(self, req_id: str) -> Payload | None:
        """Return the payload of a request; None for an unknown one."""
        return self._payloads.get(req_id)

    def __contains__(self, req_id: str) -> bool:
        return req_id in self._payloads

    def __iter__(self) -> Iterator[str]:
        return iter(self._payloads)

    def __len__(self) -> int:
        return len(self._payloads)

    def merge(self, req_id: str, update: Mapping[str, Any]) -> None:
        """Merge one level deep: a section gains and replaces names, anything else is overwritten.

        An empty update and an unknown request change nothing.
        """
        payload = self._payloads.get(req_id)
        if payload is None or not update:
            return
        for section, value in update.items():
            if isinstance(value, Mapping):
                held = payload.get(section)
                names = held if isinstance(held, dict) else {}
                names.update((name, self._own(item, (section, name))) for name, item in value.items())
                payload[section] = names
            else:
                payload[section] = self._own(value, (section, ""))

    def replace(self, req_id: str, content: Mapping[str, Any]) -> None:
        """Forget what a request carries and take `content` instead; the object stays the same."""
        payload = self._payloads.get(req_id)
        if payload is None:
            return
        payload.clear()
        self.merge(req_id, content)

    def remove(self, req_id: str) -> None:
        """Forget a request; unknown ones are ignored."""
        self._payloads.pop(req_id, None)

    def _own(self, value: Any, key: Key) -> Any:
        if not is_tensor(value):
            return value
        if hasattr(value, "detach"):
            value = value.detach()
        if key in self._resident:
            return value.clone() if hasattr(value, "clone") else value.copy()
        return to_host(value)


def is_tensor(value: object) -> bool:
    """Return whether a value is an array of some library, of any rank."""
    return hasattr(value, "shape") and hasattr(value, "dtype") and not isinstance(value, np.generic)


def to_host(value: Any) -> Array:
    """Return a contiguous copy in host memory."""
    if hasattr(value, "cpu"):
        value = value.cpu()
    return np.array(value, copy=True, order="C")


def hand_over(edge: _core.StageEdge, req_id: str, payload: Mapping[str, Any], request: Any = None) -> None:
    """Put what an edge carries of a payload into it; None is passed over.

    Tensors of rank 2 and more are rows, which are appended; of everything else, and of the keys that the edge replaces,
    the latest stays. Nothing is judged by its content: rows of zeros are rows. Where an edge has no room for more
    rows, the request ends in an error.
    """
    if request is not None:
        edge.set_request(req_id, request)
    for section, name, value in _leaves(payload):
        key = (section, name)
        if value is None or not edge.carries(key):
            continue
        if not is_tensor(value):
            edge.set(req_id, key, value)
        elif len(value.shape) < 2 or edge.replaces(key):
            edge.set(req_id, key, to_host(value))
        else:
            rows = value if isinstance(value, np.ndarray) else to_host(value)
            if not edge.put(req_id, key, rows):  # no room, or an end that is there already and stays
                edge.end(req_id, _core.EndStatus.error, f"there is no room for more rows of {section}.{name}")


def crop_codes(
    rows: npt.NDArray[Any], token_ids: npt.NDArray[Any], *, codebook_size: int = 2048
) -> npt.NDArray[np.int32]:
    """Return the frames of rows that belong to output tokens: the consumer's side of a hand-over.

    Of the last rows, one a token, those whose token is a code and whose codes are all in range.
    """
    count = min(len(rows), len(token_ids))
    frames = np.asarray(rows, dtype=np.int32)[len(rows) - count :]
    ids = np.asarray(token_ids, dtype=np.int64)[len(token_ids) - count :]
    keep = (ids >= 0) & (ids < codebook_size) & ((frames >= 0) & (frames < codebook_size)).all(axis=1)
    return frames[keep]


def serialize(payload: Mapping[str, Any] | None, keys: Iterable[Key]) -> bytes:
    """Return a payload as bytes: tensors only, of the declared keys only.

    Scalars and lists of numbers become tensors; what cannot become one is dropped with a warning. ValueError for a key
    that is not declared.
    """
    declared = frozenset(keys)
    header, chunks, end = [], [], 0
    for section, name, value in _leaves(payload or {}):
        if (section, name) not in declared:
            raise ValueError(f"the payload has {section}.{name}, which the edge does not declare")
        tensor = _as_tensor(value)
        if tensor is None:
            logger.warning("%s.%s of type %s is no tensor and stays behind", section, name, type(value).__name__)
            continue
        header.append([section, name, tensor.dtype.str, list(tensor.shape), end])
        chunks.append(tensor.tobytes())
        end += tensor.nbytes
    text = json.dumps(header).encode()
    return _MAGIC + struct.pack("<I", len(text)) + text + b"".join(chunks)


def deserialize(data: object, keys: Iterable[Key]) -> Payload:
    """Return the payload of bytes that serialize made; None is an empty one, and a mapping passes as it is.

    TypeError for anything else, ValueError for bytes of another kind and for a key that is not declared.
    """
    if data is None:
        return {}
    if isinstance(data, dict):
        return data
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise TypeError(f"a payload is bytes, a dict or None, got {type(data).__name__}")
    raw = bytes(data)
    if raw[:4] != _MAGIC:
        raise ValueError("the bytes are no payload")
    declared = frozenset(keys)
    payload: Payload = {}
    tensors, content = _split(raw)
    for section, name, dtype, shape, first in tensors:
        if (section, name) not in declared:
            raise ValueError(f"the payload has {section}.{name}, which the edge does not declare")
        payload.setdefault(section, {})[name] = _tensor_of(content, f"{section}.{name}", dtype, shape, first)
    return payload


def _split(raw: bytes) -> tuple[list[tuple[str, str, str, list[int], int]], bytes]:
    """Return section, name, dtype, shape and first byte of each tensor of serialized bytes, and the tensors' bytes."""
    try:
        (size,) = struct.unpack_from("<I", raw, len(_MAGIC))
        begin = len(_MAGIC) + 4 + size
        entries = [
            (str(section), str(name), str(dtype), [int(n) for n in shape], int(first))
            for section, name, dtype, shape, first in json.loads(raw[len(_MAGIC) + 4 : begin])
        ]
    except (struct.error, TypeError, ValueError) as error:
        raise ValueError(f"the header of the payload cannot be read: {error}") from error
    return entries, raw[begin:]


def _tensor_of(data: bytes, what: str, dtype: str, shape: list[int], first: int) -> Array:
    """Return a copy of the tensor that begins at byte `first`; ValueError where there is none."""
    try:
        kind = np.dtype(dtype)
    except TypeError as error:
        raise ValueError(f"{what} of the payload is of the unknown type {dtype}") from error
    end = first + math.prod(shape) * kind.itemsize
    if kind.kind not in _NUMBER_KINDS or min([first, *shape]) < 0 or end > len(data):
        raise ValueError(f"{what} of the payload is {dtype} of shape {shape} at byte {first} of {len(data)}")
    tensor: Array = np.frombuffer(data[first:end], dtype=kind).reshape(shape).copy()
    return tensor


def _leaves(payload: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    for section, value in payload.items():
        if isinstance(value, Mapping):
            for name, item in value.items():
                yield section, name, item
        else:
            yield section, "", value


def _as_tensor(value: Any) -> Array | None:
    """Return a value as a tensor, integers as int64 and other numbers as float32; None when it is no number."""
    if is_tensor(value):
        tensor = to_host(value)
        return tensor if tensor.dtype.kind in _NUMBER_KINDS else None
    if value is None or isinstance(value, (str, bytes)):
        return None
    try:
        tensor = np.asarray(value)
    except ValueError:
        return None
    if tensor.dtype.kind in "biu":
        return tensor.astype(np.int64)
    return tensor.astype(np.float32) if tensor.dtype.kind == "f" else None
