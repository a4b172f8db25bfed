"""The parts of a transformer, as pure functions of tensors."""

from functitan.nn.activations import gelu, silu, swiglu
from functitan.nn.attention import attention
from functitan.nn.dropout import dropout
from functitan.nn.embedding import embedding
from functitan.nn.linear import linear, linears
from functitan.nn.loss import cross_entropy
from functitan.nn.norm import layer_norm, rms_norm
from functitan.nn.positions import positions
from functitan.nn.rope import RopeScaling, RotaryTable, rotary, rotary_frequencies, rotary_table
from functitan.nn.visibility import Visibility, attention_mask, visibility

__all__ = [
    "RopeScaling",
    "RotaryTable",
    "Visibility",
    "attention",
    "attention_mask",
    "cross_entropy",
    "dropout",
    "embedding",
    "gelu",
    "layer_norm",
    "linear",
    "linears",
    "positions",
    "rms_norm",
    "rotary",
    "rotary_frequencies",
    "rotary_table",
    "silu",
    "swiglu",
    "visibility",
]
