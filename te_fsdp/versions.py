"""Tested versions of te_fsdp's requirements."""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import re
from typing import NamedTuple

import torch

_log = logging.getLogger("te_fsdp")


class Tested(NamedTuple):
    """Range of the (major, minor) releases that the tests ran with."""

    first: tuple[int, int]
    last: tuple[int, int]

    def __str__(self) -> str:
        """Return the range as text, such as ``2.11 to 2.15``."""
        return f"{self.first[0]}.{self.first[1]} to {self.last[0]}.{self.last[1]}"


# pip rejects versions before the first tested one. It accepts versions after the last one, because it would otherwise
# reject te_fsdp on the day of a new release. These versions are logged once and shown by ``te-fsdp env``.
PYTHON = Tested((3, 10), (3, 14))
TORCH = Tested((2, 11), (2, 15))
TRANSFORMER_ENGINE = Tested((2, 18), (2, 20))


def release_of(version: str) -> tuple[int, int]:
    """Return (2, 11) for ``2.11.0a0+git`` (as in NVIDIA's containers). (0, 0) if the version has no number."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def untested(torch_version: str, te_version: str) -> list[str]:
    """Return one sentence for each of the two libraries that is newer than its last tested release."""
    return [
        f"{name} {version} is newer than the tested versions ({tested})."
        for name, version, tested in (
            ("torch", torch_version, TORCH),
            ("TransformerEngine", te_version, TRANSFORMER_ENGINE),
        )
        if release_of(version) > tested.last
    ]


@functools.cache
def warn_if_untested() -> None:
    """Log a warning about a torch or TransformerEngine that is newer than the tested releases, once per process."""
    try:
        te_version = importlib.metadata.version("transformer_engine")
    except importlib.metadata.PackageNotFoundError:
        te_version = ""
    for sentence in untested(torch.__version__, te_version):
        _log.warning("%s If something fails, run te-fsdp env and report it.", sentence)
