"""Peak arithmetic of an accelerator, and the share of it that a run uses (MFU).

A figure is given only for a device whose whole name is in the table: part of a name says too little ("L40" is in
"NVIDIA L40S", "H100" in "NVIDIA H100 PCIe", and a MIG slice ends its card's name with "MIG 1g.10gb"), and the wrong
card's figure makes an MFU that looks right. Everything else is None, which is printed "n/a".
"""

from __future__ import annotations

import re
from typing import Any

TERA = 1e12

# Device name (whole, case aside) -> dense bfloat16 tensor-core FLOP/s with float32 accumulation. The vendors' sheets
# often print the figure with 2:4 sparsity, twice this one.
BFLOAT16_PEAKS: tuple[tuple[str, float], ...] = (
    # NVIDIA A100 data sheet (SXM and PCIe alike: 312 TFLOPS). The 64 GB "A100-SXM-64GB" is a custom part: n/a.
    (r"A100([- ](SXM4-(40|80)GB|PCIE-(40|80)GB|80GB PCIe))?", 312 * TERA),
    (r"A800([- ](SXM4-(40|80)GB|PCIE-(40|80)GB|80GB PCIe))?", 312 * TERA),
    # NVIDIA A10, A30, A40, L4, L40, L40S data sheets.
    (r"A10", 125 * TERA),
    (r"A30", 165 * TERA),
    (r"A40", 149.7 * TERA),
    (r"L4", 121 * TERA),
    (r"L40", 181.05 * TERA),
    (r"L40S", 362.05 * TERA),
    # NVIDIA H100 data sheet: 1,979 (SXM), 1,671 (NVL) with sparsity; H100 white paper: 756 dense (PCIe).
    (r"H100( SXM5?)?( 80GB)? HBM3|H100 SXM5?( 80GB)?", 989.5 * TERA),
    (r"H100 PCIe", 756 * TERA),
    (r"H100 NVL", 835.5 * TERA),
    # NVIDIA H200 data sheet: 1,979 (SXM), 1,671 (NVL) with sparsity. GH200 data sheet: 990 dense.
    (r"H200( SXM)?", 989.5 * TERA),
    (r"H200 NVL", 835.5 * TERA),
    (r"GH200( (96|144|480)GB| 144G HBM3e)?", 990 * TERA),
    (r"H20", 148 * TERA),
    # NVIDIA HGX B200 data sheet: 36 PFLOPS with sparsity for 8. GB200 data sheet: 5 PFLOPS with sparsity a GPU.
    (r"B200", 2250 * TERA),
    (r"GB200", 2500 * TERA),
    # AMD Instinct data sheets. A MI250X is two devices to PyTorch, each with half of its 383 TFLOPS.
    (r"MI250X", 191.5 * TERA),
    (r"MI300A", 980.6 * TERA),
    (r"MI300X( OAM)?", 1307.4 * TERA),
    (r"MI325X( OAM)?", 1307.4 * TERA),
    (r"MI350X( OAM)?", 2306.9 * TERA),
    (r"MI355X( OAM)?", 2516.6 * TERA),
)


def peak_flops(device_name: str, dtype: str = "bfloat16") -> float | None:
    """Dense peak of a device in FLOP/s, by the name that ``torch.cuda.get_device_name`` gives it.

    Args:
        device_name: the whole name, such as "NVIDIA L40S" or "AMD Instinct MI355X"; a CPU's name is in no table.
        dtype: what the matrix products are computed in; there are figures for "bfloat16" (and "float16", which
            all of these devices run at the same rate). Others give None.

    Returns:
        The figure of exactly this device, or None where there is none.
    """
    if dtype not in ("bfloat16", "float16"):
        return None
    name = re.sub(r"^(NVIDIA|AMD Instinct)\s+", "", device_name.strip(), flags=re.IGNORECASE)
    for pattern, flops in BFLOAT16_PEAKS:
        if re.fullmatch(pattern, name, flags=re.IGNORECASE):
            return flops
    return None


def default_device() -> Any:
    """The ``torch.device`` that runs use: the GPU where there is one."""
    import torch  # here, so that a table lookup does not load torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def device_peak_flops(device: Any, dtype: str = "bfloat16") -> float | None:
    """:func:`peak_flops` of a ``torch.device`` (or its name, "cuda:0"); None for a CPU."""
    import torch  # here, so that a table lookup does not load torch

    device = torch.device(device)
    return peak_flops(torch.cuda.get_device_name(device), dtype) if device.type == "cuda" else None


def mfu(tokens_per_s: float, flops_per_token: float, peak: float | None) -> float | None:
    """Model FLOP utilisation (PaLM, Chowdhery et al. 2022, appendix B) as a fraction of the peak.

    Args:
        tokens_per_s: tokens trained in a second, by all devices that ``peak`` counts.
        flops_per_token: FLOPs of forward and backward for a token, without recomputation.
        peak: FLOP/s of these devices together, or None where it is not known.
    """
    if peak is None or peak <= 0:
        return None
    return tokens_per_s * flops_per_token / peak


def format_mfu(value: float | None) -> str:
    """``"41.3%"``, or ``"n/a"`` where the peak of the device is not known."""
    return "n/a" if value is None else f"{100 * value:.1f}%"
