"""Check that FSDP2's hooks run without torch's no-op contexts."""

import pytest
import torch

from te_fsdp.upstream import fsdp2_hooks

entered: list[str] = []


def _spmd_no_typecheck():
    """Stand in for the function that FSDP2's hooks of torch 2.14 call."""
    entered.append("no_typecheck")
    return torch.no_grad()


def hook():
    with _spmd_no_typecheck():
        return torch.is_grad_enabled()


@pytest.fixture(autouse=True)
def _no_cached_hooks():
    for function in (fsdp2_hooks._shortened, fsdp2_hooks._substitutes):
        function.cache_clear()
    entered.clear()
    yield
    fsdp2_hooks._shortened.cache_clear()
    fsdp2_hooks._substitutes.cache_clear()


@pytest.mark.parametrize("is_installed", [False, True])
def test_spmd_type_checks_are_disabled_if_installed(monkeypatch, is_installed):
    monkeypatch.setattr(torch.distributed, "_is_spmd_types_available", lambda: is_installed, raising=False)
    assert fsdp2_hooks._shortened(hook)() is not is_installed
    assert entered == ["no_typecheck"] * is_installed
