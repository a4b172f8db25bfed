"""Which tokens see which: as a mask, and as a description from which each part of a mask can be made."""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from functitan._torch import is_distributed


@attrs.frozen(eq=False)
class Visibility:
    """Who sees whom in attention of sequences to themselves; made by :func:`visibility`, shared by all layers.

    Attributes:
        causal: no token sees a later one.
        window: a token sees at most this many tokens backwards, itself included (and forwards, if not causal).
        documents: int, [batch, seq]; a token sees only those of its own document.
        made: the mask of all this, where attention needs one and takes it whole.
    """

    causal: bool
    window: int | None = attrs.field(default=None)
    documents: Tensor | None = None
    made: Tensor | None = attrs.field(default=None, repr=False)

    @window.validator
    def _check_window(self, _: attrs.Attribute, window: int | None) -> None:
        if window is not None and window < 1:
            raise ValueError(f"attention: window={window} must be at least 1 (a token sees itself), or None")

    @property
    def only_causal(self) -> bool:
        """Whether a causal kernel, or one without a mask, does."""
        return self.window is None and self.documents is None

    def whole_mask(self, seq_len: int, device: torch.device) -> Tensor | None:
        """bool [1 or batch, 1, seq, seq], in natural order; None where no mask is needed."""
        if self.made is not None or self.only_causal:
            return self.made
        place = torch.arange(seq_len, device=device)
        return attention_mask(place, causal=self.causal, window=self.window, documents=self.documents)

    def combined(self, mask: Tensor | None, seq_len: int, device: torch.device) -> tuple[Tensor | None, bool]:
        """What attention of whole sequences takes: both restrictions as one mask, and whether a causal kernel does."""
        if self.only_causal and (mask is None or not self.causal):
            return mask, self.causal
        if self.only_causal:
            visible = attention_mask(torch.arange(seq_len, device=device), causal=True)
        else:
            visible = self.whole_mask(seq_len, device)
        return (visible if mask is None else mask & visible), False

    def with_documents(self, documents: Tensor | None) -> Visibility:
        """The same for another part of the batch, or another order of the tokens."""
        return Visibility(self.causal, self.window, documents)


def visibility(
    x: Tensor, *, causal: bool, window: int | None = None, documents: Tensor | None = None
) -> Visibility:
    """Who sees whom, said once for all layers: give it to :func:`attention` as ``mask``.

    The mask is made here, once, unless a causal kernel does or the sequence is split over ranks: there each part of
    attention makes its own part of it, and nothing of ``seq * seq`` elements is in memory.

    Args:
        x: [batch, seq, ...], such as the tokens.
        causal, window, documents: as for :func:`attention`.

    Raises:
        ValueError: window is less than 1, or documents are not [batch, seq].
    """
    if documents is not None and tuple(documents.shape) != tuple(x.shape[:2]):
        raise ValueError(
            f"visibility: documents {list(documents.shape)} must be [batch, seq] = {list(x.shape[:2])}"
        )
    sees = Visibility(causal, window, documents)
    if is_distributed(x):
        from functitan.sharding.context.order import axis_of

        if axis_of(x, 1) is not None:
            return sees
    return attrs.evolve(sees, made=sees.whole_mask(x.shape[1], x.device))


def attention_mask(
    positions: Tensor,
    kv_positions: Tensor | None = None,
    *,
    causal: bool,
    window: int | None = None,
    documents: Tensor | None = None,
    kv_documents: Tensor | None = None,
) -> Tensor:
    """True where a query may see a key.

    Args:
        positions: int, [seq] or [batch, seq]: places in the row. Places within a document serve as well, if
            ``documents`` is given, because only tokens of one document are compared.
        kv_positions: the keys' places, [kv_seq] or [batch, kv_seq]; None if they are the queries'.
        causal: a query sees no later key.
        window: a query sees keys less than ``window`` places away.
        documents: int, [batch, seq], the document of each query.
        kv_documents: the document of each key, [batch, kv_seq]; None if they are the queries'.

    Returns:
        bool, [batch, 1, seq, kv_seq]; batch is 1 where nothing depends on it.

    Raises:
        ValueError: window is less than 1, or documents do not have the length of the positions.
    """
    if window is not None and window < 1:
        raise ValueError(f"attention_mask: window={window} must be at least 1 (a token sees itself), or None")
    kv_positions = positions if kv_positions is None else kv_positions
    kv_documents = documents if kv_documents is None else kv_documents
    for what, ids, places in (("", documents, positions), ("kv_", kv_documents, kv_positions)):
        if ids is not None and ids.shape[-1] != places.shape[-1]:
            raise ValueError(
                f"attention_mask: {what}documents {list(ids.shape)} and {what}positions {list(places.shape)} must have "
                "one length"
            )
    distance = positions.unsqueeze(-1) - kv_positions.unsqueeze(-2)
    visible = None
    if causal:
        visible = distance >= 0
    if window is not None:
        visible = _both(visible, (distance if causal else distance.abs()) < window)
    if documents is not None:
        visible = _both(visible, documents.unsqueeze(-1) == kv_documents.unsqueeze(-2))
    if visible is None:
        visible = torch.ones_like(distance, dtype=torch.bool)
    return visible.unsqueeze(-3) if visible.ndim == 3 else visible[None, None]


def _both(a: Tensor | None, b: Tensor) -> Tensor:
    return b if a is None else a & b
