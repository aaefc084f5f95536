"""Read pickles of every supported Python version, with enum members by name or by value.

The kind: whatever te_fsdp unpickles through a table of names, and has enums in it. These are DCP's ``.metadata``
and the ``_extra_state`` of delayed scaling. The bytes below were recorded.
"""

from __future__ import annotations

import base64
import enum
import pickle
import pickletools
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import metadata as dcp_metadata

from te_fsdp import checkpoint
from te_fsdp.checkpoint.index import unpickle_metadata
from te_fsdp.unpickling import TableUnpickler
from te_fsdp.upstream.te_modules import ENTRIES, read_extra_state

#: ``.metadata`` of ``dcp.save({"w": torch.arange(3.0), "n": {"step": 4}})``, torch 2.13.
METADATA = {
    "by name, Python 3.11.2": (
        "eNp9Ustu2kAUBfFwWhKpUlL1Bxo1WeBCAnksW5IShAwUyLIaje0xM8LYrmechkiV2gWpKs0u00/q5/QfeseYgNSHF5Z955xzzz1z"
        "vxR//Czk0kfuizB2qOkyLmJmJ4K4pkOJM41CFghzRgR2scBKblmrzwd1+FV9VgdylwssCHKZI9AjUB/kPymak8/HJOBhPIIGeEL+"
        "pD+N4jAisWCEa/izJXywLqbIA1lKHSppeH6IxfER1OXu0jUnMcM+u8OChYGSFTQhAvl4HiZCo3YyFEzmElct1FB9l1t2wnzBAg6K"
        "AMdCxIAFA3vIurTQu/7QejNGl71W/6LTa2uZF+P+sHWFWv3euNO+7l+PMpC614JC2bLI2R1Rj06LI/37oLqFRdpUlh2aBFOuPqR9"
        "Wvrnn7EYoedxIiCT/W4u45e0flrJFBMbJ7YsBzAbiVLRt3NB+F9FE7kd+TgISIxWN0QNaiwUPZV5SK2YatxrHF/y17ic3FmJdQKX"
        "3K5tFryPgVYosbTeAzuv/rtKHvMJn0OvmZLbKHPaCbxwrbkTEx+u8oagCAuqYaiGaqmgE0GKy2RUNyfLPgkmALF+FRObXiz5tA1z"
        "XXVzdLCODk672WmP9ukACPS9dVhO7I1x9fLqECsb+W24Wg+BmAtbo835zFbyySDk7HagvcKa5F8rWRAzMFqB93TqscaZM1Xf9AUa"
        "HMNUmv2yWT85x03HqXqNulttnJyeVc+P3Ga14WDvuFGvwWENCLDrrib0pDEL3QSyg+2BkI0bEvN020t1s2bWoGb+Bhzue/U="
    ),
    "by value, Python 3.11.7": (
        "eNp9Ul1v0zAUbdWPAN0kpI0fgARie2hI25V2b0A3ptKlq7a9IsuJndpamoTYGeskJHgoCMlvGP4l/4HrtF0q8ZGHKL4+59xzT+6n"
        "6o+flVL+qKcyTn1mEy5kyr1MUmL7jPpXScwjac+oxARLrNU9d/35Xe9/1h/1ntoREkuKCPclugOai/IHzUrq0SWNRJxeQAM8pX/S"
        "HyRpnNBUcioM/OESPimKOXJP1XKHWllBGGPZaUNd7SxdC5pyHPJbLHkcadVAUypRiOdxJg1qe4WCyQgleqHP9TfotIvcYxe9OTt3"
        "X12i4/Hg7Gg4PgH8qJQjpPZUVfBbqu9aVy/MERCVRa6i6j7Loiuh3xnnuwNz+OecVhwEgkoY8rHpkPNrRj+vrBQzD2eeqkdglia5"
        "6Ou5pOKvopnaSkIcRTRF68iZxayFZh1VhhiqucYXgxNLfoErqe212DAi9KawWQneR0ahxvP6GOw8++9uBDykYg69ZlptoZXTYRTE"
        "heZ2SkP4N9cUJVgyA0MOcnJBP4EUl8lA8Koe0mgKEPdXNfPYyyWfDWCuo1GJnRbRwe3J6vYtG7FTIDDX3a9n3sa4ZhtNiI2N/DZc"
        "FUMgTmCxjLmQe1rdn8SC30yMV1if8nOtKnIGRhvwbrfaJElpR381P9ASGKYy7Ccepv1+cNhttv2e1zxo+QfN/ot20Oz7XdIjXcfp"
        "HvaAAMtLDGGsrFlMMsgOtgdCtq5pKvL1rbVsx3agZv8GsW9phg=="
    ),
}
#: ``.metadata`` of ``dcp.save({"w": torch.zeros(3)}, checkpoint_id=Path("a"))``, Python 3.13, torch 2.13.
WITH_A_PATH = (
    "eNp9Uk1v1DAUTLUfAdpFSC0/AAnU9rBR2nRpuSChUtCqynbV9oosO37ZWM3GIXZKW6kSHPaA5Bvm/2I7+yUhyCkez5t5856/t3/v"
    "tjz3qTeSV0kWUCZkxUgtgQZJBslNyVkhgylITLHEWj2JF7+/9P4P/aj31LaQWAKiLJFoSXzUauObzjz18hoKwasro48n8Hf1s7Li"
    "JVSSgbD0Fw19vAIdc091XINa+WnOsYwODa62m6YFVAzn7AFLxgutNtEEJMrxPa+lZfXmLBOMAtUzfal/GqcdFJ/F6NPFZfzhGp2N"
    "Ti8+DkefDf/ccwypiWoL9gB6ad2+skfDaM2ciuomWV3cCP3Fdr5zag//zOnzNBUgTchX1sHVd6y+Q+aKNcE1EWqrzHFRQIXmo8z8"
    "zJ9pg4tGfYl7qrdwGhYU7lZ2rfRrYepUhzn83FPdpoE1/5qo3f+uPWU5iHshYarVFppHGxYpX/n0KsjN3G8BlVhmloZCFDrBpNTZ"
    "e2ucQzExd/F+14VbhLBvxUbYXJvZmvCqD8SoVs+tfs5IgHKe4Fyrp2Mu2N3Yupolb+BmpL7Aphdb8Prd20NIIzroU5IM+kcRIf2T"
    "4yjtnxyRMBpE4XFIDkyBeU7UFoyUP+W0NonNPs1o/FuohHtQnYMgDEKDBX8AutU+wQ=="
)
#: ``_extra_state`` of ``te.Linear(16, 16)`` after a step with delayed scaling, HYBRID, a history of 2. TE 2.20.2.
EXTRA_STATE = {
    "by name, Python 3.11.2": (
        "eNrVld1OE0EUx7e7S2vLR0CvjImpdyUhDWARuGhIAKtkAyp4US/MON2ddlf2c3YWqAlJvYCAmUQTxjvjrT6AD+Az+ATc+ggkmnim"
        "S5FCX4C9aGZOz5z9n9/8d6ajf17LKd1nX5R4lhLTCYngRUaxHzcD6hGKiN9yfFI2A88L/HIvZWyVuLhNrC0Tu47fEidi8r3oFvEw"
        "hQXCUHihGS4gWQUzwW81Esdljh8LnmsRhhmjsMhWebaWZpwInn36anlzbVUcik3Bx7GH95DtxCygbeQSKKnyiW4QtIQJIwi7rUBw"
        "DUKC34tTJaiJTVjRn7PBhymxEhOmMvmI56Q0K8TiOB16thxONLC5vYuphYIdQqljEVg5gkxs2sRClIRU8I8pAcTaIan2Q5gqpr1X"
        "p6eKadvVtKGp4tVeqrNTxUuKqi9pQmBRKqpaw258PgVhvek1cdWNwCciafC87J2g5q4l+Ai8wrTLKGGOC6xvg2xJ3kKM+DFw2ZkF"
        "0iU+mqZJQbgF+zmO3ABbqEkDDzXajMSQtfK3o34ouH++1M6Kb78/v1vuqOu/Nfjdj5RSfRxcE9KABWbgIlAUO4EfZSChPgr/uA5j"
        "IIn4loP9SD2qFyAomaHYeUfiSNuP9FJ9CIKxHVAWDRlqXYOZ47Moa+h1XdYI/FaUM/QkgXeW6tKp53ojxezqL9RANdtKg4UoU89D"
        "zkxlfnFubvHhoygtaYZJpBnaBov0F1DodaRcScvgsqb0ntOVb79+PFaUzpI4ABsaiqEdCCNzAPYYhk5dYjJoFMgOP6MWgT1cdUxp"
        "3slNwa7bVm6Jfb9kP1jOZ6DmjcU5X5mf7cOZHYizmwY4s8qgp7NkffpalaMeWtXQDoWhGZlDcWxP9hCe27nRY7dydmPBVWZmF6b7"
        "wKmDwKVpAE69gPXmyWUPquce/A+p32cXrJYzN9pnlcp0Py59oM+6aYBLH+Cxfn+p4C/1ir/ukD244JA8XncwdXDDheNO3l1jMgRn"
        "vbkdBtAR3BN5P/FQi3heDPz5cPdEBuzys17/eSkg+a8rp9DyP21RUy8="
    ),
    "by value, Python 3.11.7": (
        "eNrVlc9OE0Ecx7e7pQ0tEJCTMTH1VpKmKS1IPWxIECtmAyp4qAczTnen3ZX9OzsL1ISkHCBg1nhgvPkAPoAP4NnEd+DqI5hw8Dfd"
        "FijCA7CHZubX3/z2+/vMd2d66a9RVuo/+7wYZyjRLZ/wuMAodsO2Rx1CEXE7lkvKuuc4nlsepkytEht3ibGlY9tyO/yUzx3wfhEH"
        "U1jANSnOtf06ElUw46YcZxrJ8FRMJlEyWyO2TyjE1n+m1qWzI37AD/kmj6exg/eQaYXMo11kEygoxzP9ICjxI0YQtjsejxUI8fhB"
        "mOhAbazDitGcjThPiRHpMBXJx3FWCDN8zE+SoWOK4UwL69u7mBrI2yGUWgaBlRNIx7pJDESJT3n8Jekfsa5P1FEEpULSuVopFZKm"
        "1bW3K5svVkuF672o1VLhiiL1DY0ILEpEqQ1sh4MpCBtO/xOnbngu4VErHhe9E9TeNXg8Aa/QzTKKmGWHPL4HsluRZRuIETcELjtV"
        "QF2MJ5M0IQh3YDenke1hA7Wp56BWl5EQslayKUnqyZ9y9vm3xt/Ch++v7pd78vofBX73A6nYnAbb+NRjnu7ZCESFlucGKUhoTsI/"
        "tsUYqCKuYWE3kI+bOQgKbCi0PpIwUPaDdLE5BsHQ9CgLxjS5qcDMclmQ0dLNtKjhuZ0gq6WjCN5ZbAqrDiQHkt5vIdcA4WwrCeaC"
        "VHMKcp4sVOtLtcXFWmWpUq8HSV3djwJFUzZYkH4N1d4F0k25KVxWpOFz9vR8/tczgLDc96Qmacoh11KH4JU89GwTnUHLgDn/khoE"
        "NnTV0oW95zY5+9/DYn/Mh0Xz0crsnQdbXZqvPR4Bm7kVbJILYDPSTU9v+cfvz6oYDSHLmnLENUVLHfETc24Ic+Dy1gVF5e5TXKxU"
        "F0YoyrdT7OcCRfmC3PvnV60pD6x5SWzUfpfg8ncfXG2+MgoufTu4fi6AS99gvVHbyWA7+ZrtZskeXIZIHMY7mFq4ZcPhKO65KRGC"
        "m0Hf9j3oDW6VcTdyUIc4Tgg7Eef75zdsgPju4XK7DIidgKsOmv8HpXVZpQ=="
    ),
}
KINDS = list(METADATA)


def recorded(text: str) -> bytes:
    return zlib.decompress(base64.b64decode(text))


def names_in(data: bytes) -> set[str]:
    return {value for _, value, _ in pickletools.genops(data) if isinstance(value, str)}


def by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let enums pickle as Python 3.11.0 to 3.11.4 do."""
    monkeypatch.setattr(enum.Enum, "__reduce_ex__", lambda self, _: (getattr, (type(self), self.name)))


def by_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let enums pickle as all other releases do."""
    monkeypatch.setattr(enum.Enum, "__reduce_ex__", lambda self, _: (type(self), (self.value,)))


def test_control_recorded_pickles_differ_in_getattr() -> None:
    """Control of this file: one kind of pickle contains ``getattr``, the other does not."""
    for texts in (METADATA, EXTRA_STATE):
        assert ["getattr" in names_in(recorded(text)) for text in texts.values()] == [True, False]


@pytest.mark.parametrize("kind", KINDS)
def test_metadata_of_every_python_release_is_readable(kind: str) -> None:
    data = recorded(METADATA[kind])
    result = unpickle_metadata(data)
    assert result == pickle.loads(data), "plain DCP reads the same"
    assert result.state_dict_metadata["w"].properties.memory_format == torch.contiguous_format
    assert result.state_dict_metadata["w"].size == torch.Size([3])


def test_metadata_with_a_python_3_13_path_is_readable() -> None:
    """The pickle names a module that other Python versions do not have, so plain DCP cannot read it there."""
    data = recorded(WITH_A_PATH)
    assert "pathlib._local" in names_in(data)
    result = unpickle_metadata(data)
    assert result.storage_meta is not None and result.storage_meta.checkpoint_id == Path("a")
    assert result.state_dict_metadata["w"].size == torch.Size([3])


@pytest.mark.parametrize("kind", KINDS)
def test_delayed_scaling_state_of_every_python_release_is_readable(kind: str) -> None:
    described, tensors = read_extra_state(recorded(EXTRA_STATE[kind]), "fc._extra_state") or ({}, {})
    assert described["fp8_format"] == "HYBRID" and described["amax_history_len"] == 2
    other = read_extra_state(recorded(EXTRA_STATE[KINDS[1]]), "fc._extra_state")
    assert other is not None and described == other[0]
    assert tensors["scaling_fwd.scale"].shape == (3,) and tensors["scaling_bwd.scale"].shape == (2,)


@pytest.mark.parametrize("release", [by_name, by_value], ids=["3.11.2", "3.11.7"])
def test_save_pickles_enums_by_value_on_every_python_release(
    release: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier versions of te_fsdp read by-value pickles only, so every Python version must write these."""
    saved = nn.Linear(2, 2)
    with monkeypatch.context() as other:
        release(other)
        assert ("getattr" in names_in(pickle.dumps(dcp_metadata._MEM_FORMAT_ENCODING(0)))) == (
            release is by_name
        ), "the control: without the save's own pickler the release decides"
        checkpoint.save(tmp_path / "a", saved)
        data = (tmp_path / "a" / ".metadata").read_bytes()
    assert "getattr" not in names_in(data)
    assert set(unpickle_metadata(data).state_dict_metadata) == {"model.weight", "model.bias"}


ENUM = f"c{dcp_metadata.__name__}\n_MEM_FORMAT_ENCODING\n".encode()
OTHER = f"c{dcp_metadata.__name__}\nMetadata\n".encode()


@pytest.mark.parametrize(
    "arguments",
    [
        ENUM + b"V__class__\n",
        ENUM + b"V__init_subclass__\n",
        ENUM + b"VTORCH_NOT_THERE\n",
        ENUM + b"I0\n",
        ENUM + b"(tR" + b"Vname\n",
        OTHER + b"V__init__\n",
        b"ctorch\nfloat32\n" + b"Vitemsize\n",
        b"}" + b"Vclear\n",
        ENUM + b"VTORCH_CHANNELS_LAST\nN",
    ],
)
def test_pickled_getattr_returns_members_of_listed_enums_only(arguments: bytes) -> None:
    """Any other ``getattr`` is rejected by name, because it could give access to code."""
    call = b"cbuiltins\ngetattr\n(" + arguments + b"tR."
    with pytest.raises((pickle.UnpicklingError, TypeError, ValueError)) as refused:
        unpickle_metadata(call)
    assert "instead of DCP's Metadata" not in str(refused.value)
    with pytest.raises((pickle.UnpicklingError, TypeError, ValueError)):
        TableUnpickler(call, ENTRIES, "a pickle").load()


def test_control_pickled_getattr_returns_an_enum_member() -> None:
    """Control: an enum member is returned, so the errors above are caused by the arguments of ``getattr``."""
    good = b"cbuiltins\ngetattr\n(" + ENUM + b"VTORCH_CHANNELS_LAST\ntR."
    with pytest.raises(pickle.UnpicklingError, match="a _MEM_FORMAT_ENCODING instead of DCP's Metadata"):
        unpickle_metadata(good)
