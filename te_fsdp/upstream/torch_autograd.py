"""Private names of torch's autograd; torch 2.11 to 2.15."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.autograd.forward_ad

from te_fsdp.errors import OrderError


def refuse_hooks(named: Iterable[tuple[str, torch.Tensor]], *, sharded: bool = True) -> None:
    """Raise OrderError for gradient hooks that FSDP2 would never run, or would lose. Local operation.

    Before parameters are ``sharded``, post-accumulate hooks would be lost, too.
    """
    hooked = [
        name
        for name, p in named
        if p._backward_hooks or (not sharded and getattr(p, "_post_accumulate_grad_hooks", None))
    ]
    if hooked:
        raise OrderError(
            f"{hooked[0]}: a gradient hook on a parameter that {'is' if sharded else 'is about to be'} sharded",
            expected="register_post_accumulate_grad_hook, after fully_shard and te_fsdp.materialize",
            got=f"{len(hooked)} parameter(s) with hooks"
            + (" by register_hook" if sharded else " from before fully_shard"),
            why="FSDP2 replaces each parameter, and autograd accumulates gradients on the unsharded parameters, so "
            "the hook would never run",
            fix="parameter.register_post_accumulate_grad_hook(hook), which sees the reduced gradient in parameter.grad",
        )


def second_backward(module: str) -> OrderError:
    """Return the error for a second backward through modules of TransformerEngine."""
    return OrderError(
        f"{module}: second backward through one forward",
        expected="one backward for each forward through modules of TransformerEngine",
        got="a second backward, as by retain_graph=True or torch.autograd.functional.jacobian",
        why="TransformerEngine frees in the first one the tensors that its forward has saved",
        fix="add the losses and call backward() once, or run the forward again",
    )


def second_derivatives(unit: str) -> OrderError:
    """Return the error for a backward with ``create_graph=True`` that reaches a sharded unit."""
    return OrderError(
        f"{unit}: backward with create_graph=True through sharded weights",
        expected="first derivatives",
        got="a graph for second derivatives, as for a gradient penalty or a Hessian",
        why="FSDP2 releases the gathered weights after the first backward, and the second one reads them",
        fix="keep the weights that the penalty reaches unsharded: strategy='no_shard', or "
        "te_fsdp.fsdp_no_shard(module); compute the penalty with torch's own layers, because kernels of "
        "TransformerEngine have no second derivatives",
    )


def copy_gradient_settings(old: torch.Tensor, new: torch.Tensor) -> None:
    """Copy gradient hooks and ``grad_dtype`` of a leaf to its replacement, unless the replacement has its own.

    Local operation. Both leaves then share one dict of hooks (``Tensor._backward_hooks``,
    ``Tensor._post_accumulate_grad_hooks``), so the user's handles still remove them.
    """
    if old is new:
        return
    if old._backward_hooks and not new._backward_hooks and new.requires_grad:
        new._backward_hooks = old._backward_hooks
    if (hooks := getattr(old, "_post_accumulate_grad_hooks", None)) and new.requires_grad:
        new._post_accumulate_grad_hooks = getattr(new, "_post_accumulate_grad_hooks", None) or hooks  # type: ignore[missing-attribute]
    dtype = getattr(old, "grad_dtype", old.dtype)
    if dtype != old.dtype and new.grad is None and getattr(new, "grad_dtype", None) == new.dtype:
        new.grad_dtype = dtype


def suspend_accumulation_hooks(leaves: Iterable[Any]) -> list[tuple[Any, Any]]:
    """Return leaves with post-accumulate hooks, with the hooks. Autograd does not run them until they are set again."""
    suspended = [(leaf, hooks) for leaf in leaves if (hooks := leaf._post_accumulate_grad_hooks)]
    for leaf, _ in suspended:
        leaf._post_accumulate_grad_hooks = {}  # autograd would keep the previous ones for ``None``
    return suspended


def resume_accumulation_hooks(suspended: list[tuple[Any, Any]]) -> None:
    """Set the hooks that :func:`suspend_accumulation_hooks` has returned. Local operation."""
    for leaf, hooks in suspended:
        leaf._post_accumulate_grad_hooks = hooks
    suspended.clear()


def accumulation_hooks(leaves: Iterable[Any]) -> dict[int, list[Callable[[Any], None]]]:
    """Return the post-accumulate hooks of leaves that have some, by their index. Local operation."""
    return {
        index: list(hooks.values())
        for index, leaf in enumerate(leaves)
        if (hooks := leaf._post_accumulate_grad_hooks)
    }


def run_before_accumulation_hooks(leaves: Iterable[Any], first: Callable[[Any], None]) -> None:
    """Let a function run before the post-accumulate hooks of leaves that have some. Local operation."""
    for leaf in leaves:
        if hooks := leaf._post_accumulate_grad_hooks:
            hooks.setdefault(-1, first)
            hooks.move_to_end(-1, last=False)


def renew_hooks(tensor: torch.Tensor) -> None:
    """Reassign a leaf's hooks, which ``torch.utils.swap_tensors`` keeps on the object but unregisters from autograd."""
    for attribute in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        hooks = getattr(tensor, attribute, None)
        if hooks is not None:
            setattr(tensor, attribute, None)
            setattr(tensor, attribute, hooks or None)


# [Note: gradients of DTensor leaves] Autograd detaches a gradient before it assigns it to a leaf. Of a DTensor
# this operation takes some twenty calls of Python. An assignment in the node before gives the same ``.grad``.
# Autograd itself handles leaves with a gradient or hooks, frozen leaves, results of ``torch.autograd.grad``, and
# gradients that it casts or copies.
#
# Private names: ``AccumulateGrad.variable``, ``torch._C._will_engine_execute_node``.
def assign_to_leaves(node: Any, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Assign a running node's gradients to leaves without one. Return the others, for autograd. Local operation.

    ``gradients`` has one element for each tensor argument of the node.
    """
    unassigned = list(gradients)
    if torch.is_grad_enabled():
        return unassigned
    with without_subclasses():
        for index, ((edge, _), gradient) in enumerate(zip(node.next_functions, gradients, strict=True)):
            leaf = getattr(edge, "variable", None)
            if (
                gradient is None
                or leaf is None
                or leaf.grad is not None
                or not leaf.requires_grad  # frozen since the forward, so autograd drops the gradient
                or leaf._backward_hooks
                or leaf._post_accumulate_grad_hooks
                or gradient.dtype is not getattr(leaf, "grad_dtype", leaf.dtype)
                or gradient.stride() != leaf.stride()
                or gradient.shape != leaf.shape
            ):
                continue
            try:
                runs = torch._C._will_engine_execute_node(edge)
            except RuntimeError:  # the gradient is a result of torch.autograd.grad
                continue
            if runs:
                leaf.grad, unassigned[index] = gradient, None
    return unassigned


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Call ``call`` when the running backward has accumulated all gradients (``Engine.queue_callback``)."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


#: Context without ``__torch_function__`` of DTensor subclasses (``torch._C.DisableTorchFunctionSubclass``).
without_subclasses = torch._C.DisableTorchFunctionSubclass


def is_compiling() -> bool:
    """Return whether ``torch.compile`` is tracing a function (``torch._guards.TracingContext``)."""
    return torch._guards.TracingContext.try_get() is not None


def function_transform() -> str:
    """Return the transform of torch that runs on this thread, ``""`` for none (``torch._C._functorch``)."""
    if torch._C._functorch.maybe_current_level() is not None:
        return "torch.func"
    return "torch.autograd.forward_ad" if torch.autograd.forward_ad._current_level >= 0 else ""


def use_count(tensor: torch.Tensor) -> int:
    """Return the number of references to a tensor with those of graphs (``Tensor._use_count``), 0 if unavailable."""
    return tensor._use_count() if hasattr(tensor, "_use_count") else 0  # type: ignore[missing-attribute]


def graph_nodes(node: Any) -> Iterator[Any]:
    """Yield a node of an autograd graph and all nodes that its backward reaches, the nearest ones first."""
    # A queue, because graphs are deeper than Python's stack of calls.
    queue, seen = deque([node]), {node}
    while queue:
        node = queue.popleft()
        yield node
        following = {inner for inner, _ in getattr(node, "next_functions", ()) if inner is not None} - seen
        queue.extend(following)
        seen |= following


#: Node of the graph for whose output a hook runs (``torch._C._current_autograd_node``).
current_node: Callable[[], Any] = torch._C._current_autograd_node
