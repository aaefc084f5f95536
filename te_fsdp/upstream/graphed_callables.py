"""Private names that detect ``make_graphed_callables`` of torch and TransformerEngine."""

from __future__ import annotations

import sys
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn


class _BackwardHooks(OrderedDict[int, Any]):
    """Backward hooks of a module, which call a function when ``make_graphed_callables`` counts them."""

    def __init__(self, hooks: Any, call: Callable[[], None]) -> None:
        super().__init__(hooks)
        self._call = call

    def __bool__(self) -> bool:
        return next(iter(self), None) is not None

    def __len__(self) -> int:
        frame = sys._getframe(1)
        if frame.f_code.co_name.endswith("make_graphed_callables"):
            # By now TE has replaced ``__call__`` of the modules' classes, which it does not undo in an exception
            # (2.18-2.20). It has also set a flag of the process, with which no backward updates the scales of delayed
            # scaling.
            module, caller = frame.f_globals, frame.f_back
            if module.get("__name__") == "transformer_engine.pytorch.graph" and caller is not None:
                for cls, call in caller.f_locals.get("old_call_funcs", {}).items():
                    del cls.__call__
                    if cls.__call__ is not call:
                        cls.__call__ = call
                module["set_capture_end"]()
            self._call()
        return super().__len__()

    def __reduce__(self) -> Any:
        return OrderedDict, (list(self.items()),)


def before_graphed_callables(module: nn.Module, call: Callable[[], None]) -> None:
    """Call a function in ``make_graphed_callables`` of torch or TransformerEngine for this module."""
    # Both first check that ``len(module._backward_hooks)`` is 0. Calls of the module use ``bool`` instead.
    module._backward_hooks = _BackwardHooks(module._backward_hooks, call)
