"""The one private corner of torch.func that functitan reads: are we inside vmap, jvp or vjp?"""

from __future__ import annotations

from torch._C import _functorch


def inside_transform() -> bool:
    """True while a torch.func transform (vmap, grad, jvp, …) is running the current code.

    Its wrapped tensors cannot become autograd leaves (``requires_grad_`` fails), so ``value_and_grad`` and
    ``remat`` have to take another road there.
    """
    return _functorch.peek_interpreter_stack() is not None
