"""Reading a checkpoint's files without trusting them: nothing that they say is executed."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

__all__ = ["Reader", "unpickle_metadata"]

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


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        known = name in _KNOWN.get(module, ())
        if not known and module == "torch":
            known = isinstance(getattr(torch, name, None), torch.dtype)
        if not known:
            raise pickle.UnpicklingError(f"{module}.{name} has no place in the metadata of a checkpoint")
        return super().find_class(module, name)


def unpickle_metadata(path: Path) -> Metadata:
    """DCP's ``.metadata``, a pickle, read with its own classes alone.

    Raises:
        pickle.UnpicklingError: It names something else, or is damaged. Damaged files may raise anything.
    """
    with path.open("rb") as file:
        metadata = _Unpickler(file).load()
    if not isinstance(metadata, Metadata):
        raise pickle.UnpicklingError(f"a {type(metadata).__name__} instead of DCP's Metadata")
    return metadata


class Reader(dcp.FileSystemReader):
    """DCP's reader of files (tensors with ``weights_only=True``), with metadata that cannot execute anything."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The directory's metadata."""
        metadata = unpickle_metadata(Path(self.path) / ".metadata")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata
