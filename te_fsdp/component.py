"""``Component``: a feature of a sharded model, which the core calls in phases.

The core calls components by phase and imports none of them. :mod:`te_fsdp.components` lists them in order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch
    from torch.optim import Optimizer

ComponentT = TypeVar("ComponentT", bound="Component")


class Component:
    """A feature of one sharded model. Subclasses override the methods of their phases. No other method is called."""

    # ------------------------------------------------------------------------------------------ forward and backward

    def settle(self) -> bool:
        """Return whether a rank has abandoned a reduction of this component since the previous call."""
        return False

    def before_forward(self) -> None:
        """Run before a forward of the root or a registered method of it."""

    def before_unit(self, name: str) -> None:
        """Run before a unit's forward all-gathers it."""

    def after_forward(self, trained: Sequence[torch.Tensor]) -> None:
        """Run after a forward of the root, or a registered method of it, with gradients."""

    def before_recovery(self) -> None:
        """Run first when the model recovers from an exception."""

    def recover(self) -> bool:
        """Drop the results of a backward that raised. Return whether it has left gradients of some parameters only."""
        return False

    def set_gradient_sync(self, enabled: bool) -> None:
        """Set whether the next backwards reduce gradients when they end."""

    # ------------------------------------------------------------------------------------------------------ gradients

    def unreduced(self) -> Collection[str]:
        """Return the names of parameters with unreduced gradients."""
        return ()

    def reduced_parameters(self) -> Sequence[torch.Tensor]:
        """Return the parameters whose gradients this component reduces, in place of FSDP2."""
        return ()

    def drop_cleared(self) -> None:
        """Drop the unreduced gradients of parameters whose ``.grad`` was cleared."""

    def reduce_gradients(self) -> None:
        """Reduce unreduced gradients outside of backward."""

    def drop_unreduced(self) -> None:
        """Drop unreduced gradients."""

    def check_gradients(self) -> None:
        """Raise if complete gradients are unusable: before a step or a norm, and after each call of a closure."""

    def zero_grad(self, parameters: Collection[torch.Tensor]) -> None:
        """Forget everything derived from these parameters' gradients, before they are cleared."""

    # ----------------------------------------------------------------------------------------------------- parameters

    def before_conversion(self) -> None:
        """Run before ``Module._apply`` swaps parameters."""

    def after_materialize(self) -> None:
        """Run after parameters were materialized or replaced. Collective over the world."""

    # ------------------------------------------------------------------------------------------------- optimizer step

    def prepare_step(self, optimizer: Optimizer, parameters: list[torch.Tensor]) -> None:
        """Run before an optimizer step on these parameters, when their gradients are complete."""

    def undo_step(self) -> None:
        """Undo :meth:`prepare_step` after the step, or before the next forward if the step raised."""

    def finish_step(self) -> None:
        """Run after an optimizer step, when preparations are undone."""

    # --------------------------------------------------------------------------------------------------------- report

    def report_line(self) -> str:
        """Return a line for :func:`te_fsdp.report`, or an empty string."""
        return ""


_PHASES = tuple(name for name in vars(Component) if not name.startswith("_"))


class Components:
    """The components of one model, by class. Methods of a phase run in the order in which components were attached."""

    # Each phase is a tuple of bound methods of the components that override it, so that it costs one iteration.
    settle: tuple[Callable[[], bool], ...]
    before_forward: tuple[Callable[[], None], ...]
    before_unit: tuple[Callable[[str], None], ...]
    after_forward: tuple[Callable[[Sequence[torch.Tensor]], None], ...]
    before_recovery: tuple[Callable[[], None], ...]
    recover: tuple[Callable[[], bool], ...]
    set_gradient_sync: tuple[Callable[[bool], None], ...]
    unreduced: tuple[Callable[[], Collection[str]], ...]
    reduced_parameters: tuple[Callable[[], Sequence[torch.Tensor]], ...]
    drop_cleared: tuple[Callable[[], None], ...]
    reduce_gradients: tuple[Callable[[], None], ...]
    drop_unreduced: tuple[Callable[[], None], ...]
    check_gradients: tuple[Callable[[], None], ...]
    zero_grad: tuple[Callable[[Collection[torch.Tensor]], None], ...]
    before_conversion: tuple[Callable[[], None], ...]
    after_materialize: tuple[Callable[[], None], ...]
    prepare_step: tuple[Callable[[Optimizer, list[torch.Tensor]], None], ...]
    undo_step: tuple[Callable[[], None], ...]
    finish_step: tuple[Callable[[], None], ...]
    report_line: tuple[Callable[[], str], ...]

    def __init__(self, components: Iterable[Component] = ()) -> None:
        self.by_class: dict[type[Component], Component] = {type(item): item for item in components}
        self._bind()

    def attach(self, component: Component) -> None:
        """Add a component, or replace that of its class. Local operation."""
        self.by_class[type(component)] = component
        self._bind()

    def detach(self, component: Component) -> None:
        """Remove a component. Local operation."""
        if self.by_class.get(type(component)) is component:
            del self.by_class[type(component)]
            self._bind()

    def get(self, kind: type[ComponentT]) -> ComponentT | None:
        """Return the component of a class, ``None`` if the model has none."""
        component: Any = self.by_class.get(kind)
        return component

    def _bind(self) -> None:
        for phase in _PHASES:
            # Only methods that a component overrides, so that a phase without any costs a step one empty loop.
            overriding = [
                component
                for component in self.by_class.values()
                if getattr(type(component), phase) is not getattr(Component, phase)
            ]
            setattr(self, phase, tuple(getattr(component, phase) for component in overriding))
