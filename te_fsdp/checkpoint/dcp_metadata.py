"""DCP's ``.metadata``: a pickle, read with its own classes alone, and never with more memory than it is worth.

Directories that te_fsdp has not written have no checksum of it. What is damaged is not believed: names that metadata
does not have are refused, and so are numbers under which the pickle keeps objects, where they are larger than the file.
Python's unpickler makes a table of that length, of tens of GiB where a damaged string is taken for instructions.
"""

from __future__ import annotations

import functools
import io
import pickle
import pickletools
from types import FunctionType
from typing import IO, Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties

from te_fsdp.checkpoint.sums import without_collector

#: Bytes of the argument of each of pickle's instructions; negative: as pickletools says it of lengths that are written.
_ARGUMENTS = {ord(code.code): 0 if code.arg is None else code.arg.n for code in pickletools.opcodes}
#: Bytes of a written length, by pickletools' number for it.
_LENGTHS = {
    pickletools.TAKEN_FROM_ARGUMENT1: 1,
    pickletools.TAKEN_FROM_ARGUMENT4: 4,
    pickletools.TAKEN_FROM_ARGUMENT4U: 4,
    pickletools.TAKEN_FROM_ARGUMENT8U: 8,
}
_PUT, _LONG_PUT, _TWO_LINES = ord(pickle.PUT), ord(pickle.LONG_BINPUT), (ord(pickle.GLOBAL), ord(pickle.INST))

#: All that DCP's metadata is made of, besides dtypes.
_KNOWN = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "collections": {"OrderedDict"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
}


class _Properties(TensorProperties):
    """As another torch wrote them: 2.15 added strides at the end, on which earlier ones fail. We read none."""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        made: Any = self
        made.__class__ = TensorProperties  # dataclasses of two classes are never equal
        made.__setstate__(state[: _fields_of_properties()])


@functools.cache
def _fields_of_properties() -> int:
    return len(TensorProperties().__getstate__())


class _Unpickler(pickle.Unpickler):
    """Knows the names above. A pickle may also set attributes of the classes that it names: that is undone."""

    def __init__(self, stream: IO[bytes]) -> None:
        super().__init__(stream)
        self._named: dict[type, dict[str, Any]] = {}

    def find_class(self, module: str, name: str) -> Any:
        known = name in _KNOWN.get(module, ())
        if not known and module == "torch":
            known = isinstance(getattr(torch, name, None), torch.dtype)
        if not known:
            raise pickle.UnpicklingError(f"{module}.{name} has no place in the metadata of a checkpoint")
        found = _Properties if name == "TensorProperties" else super().find_class(module, name)
        if isinstance(found, type):
            self._named.setdefault(found, dict(vars(found)))
        elif isinstance(found, FunctionType):
            found = functools.partial(found)  # attributes are set on this one, then
        return found

    def restore(self) -> list[str]:
        """Put back what the pickle has set on classes; which attributes of which."""
        changed = []
        for one, before in self._named.items():
            for name in [n for n, value in vars(one).items() if before.get(n, _NOTHING) is not value]:
                changed.append(f"{one.__name__}.{name}")
                if name in before:
                    setattr(one, name, before[name])
                else:
                    delattr(one, name)
        return changed


_NOTHING = object()


def unpickle_metadata(data: bytes) -> Metadata:
    """DCP's ``.metadata``, a pickle, read with its own classes alone.

    Raises:
        pickle.UnpicklingError: It names something else, sets attributes of classes, or is damaged. Damaged ones may
            raise anything.
    """
    _refuse_large_numbers(data)
    unpickler = _Unpickler(io.BytesIO(data))
    try:
        with without_collector():
            metadata = unpickler.load()
    finally:
        changed = unpickler.restore()
    if changed:
        raise pickle.UnpicklingError(f"it sets {', '.join(changed)}, which metadata never does")
    if not isinstance(metadata, Metadata):
        raise pickle.UnpicklingError(f"a {type(metadata).__name__} instead of DCP's Metadata")
    if absent := {"state_dict_metadata", "planner_data", "storage_data"} - vars(metadata).keys():
        raise pickle.UnpicklingError(f"no {', '.join(sorted(absent))} in it")
    return metadata


def _refuse_large_numbers(data: bytes) -> None:
    """Raise for objects kept under a number that is larger than the pickle. Other damage the unpickler sees."""
    at, end = 0, len(data)
    while at < end:
        instruction = data[at]
        at += 1
        size = _ARGUMENTS.get(instruction)
        if size is None:
            return
        first = at
        if size >= 0:
            at += size
        elif size in _LENGTHS:
            at += _LENGTHS[size]
            at += int.from_bytes(data[first:at], "little")
        else:
            for _ in range(2 if instruction in _TWO_LINES else 1):
                at = data.find(b"\n", at) + 1 or end
        if instruction in (_PUT, _LONG_PUT):
            written = data[first:at]
            number = int.from_bytes(written, "little") if instruction == _LONG_PUT else int(written or b"0")
            if number > end:
                raise pickle.UnpicklingError(f"object number {number:,} in a pickle of {end:,} bytes")
