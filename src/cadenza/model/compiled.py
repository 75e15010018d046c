"""Scalar building blocks of the kernels that numba compiles for the CPU at hand, for trainer and engine.

Arrays have the working dtype, float32 or bfloat16 seen as uint16 (numpy has no bfloat16); arithmetic is fp32.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.core import config as numba_config
from numba.extending import intrinsic
from torch import Tensor


def array(tensor: Tensor) -> np.ndarray:
    """The same memory as numpy sees it: bfloat16 as uint16, every other dtype as it is."""
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def _keep_machine_code() -> bool:
    """Chooses where compiled kernels are kept between processes; False where nothing can be written.

    numba looks for changes in a kernel's own file only. What is defined here is compiled into kernels of other files,
    so the folder's name has a digest of this one.
    """
    if getattr(numba_config, "CACHE_DIR", ""):
        return True  # the user's choice, NUMBA_CACHE_DIR
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    digest = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    folder = os.path.join(home, "cadenza", f"kernels-{digest}")
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError:
        return False
    if not os.access(folder, os.W_OK):
        return False
    setattr(numba_config, "CACHE_DIR", folder)  # noqa: B010 - pyright does not know the attribute
    return True


# Reassociation lets sums use vector registers; nothing here makes or tests for infinities.
compiled = njit(cache=_keep_machine_code(), nogil=True, fastmath=True, error_model="numpy")


# numba passes the typing context itself: callers in compiled code give the values alone, which pyright cannot know.
@intrinsic
def _float_of_bits(typing: Any, bits: Any = None) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.uint32), generate


@intrinsic
def widen(typing: Any, value: Any = None) -> Any:
    """Working dtype to fp32: bfloat16 is the upper half of its bits."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if isinstance(value, types.Float):
            return context.cast(builder, args[0], value, types.float32)
        bits = builder.shl(builder.zext(args[0], ir.IntType(32)), ir.Constant(ir.IntType(32), 16))
        return builder.bitcast(bits, ir.FloatType())

    return types.float32(value), generate


@intrinsic
def narrow(typing: Any, like: Any = None, value: Any = None) -> Any:
    """fp32 to the dtype of array ``like``, to nearest, ties to even."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        number = context.cast(builder, args[1], value, types.float32)
        if isinstance(like.dtype, types.Float):
            return number
        bits = builder.bitcast(number, ir.IntType(32))
        sixteen, one, half = (ir.Constant(ir.IntType(32), n) for n in (16, 1, 0x7FFF))
        odd = builder.and_(builder.lshr(bits, sixteen), one)
        rounded = builder.lshr(builder.add(bits, builder.add(half, odd)), sixteen)
        return builder.trunc(rounded, ir.IntType(16))

    result = types.float32 if isinstance(like.dtype, types.Float) else types.uint16
    return result(like, value), generate


@njit(inline="always")
def exp(x: Any) -> Any:
    """e**x for x <= 0 in straight-line code that compilers can vectorize (relative error < 3e-7).

    2**y = 2**i * 2**f with i = floor(y); 2**f by its Taylor polynomial around 1/2, which six terms settle.
    """
    y = max(x * np.float32(1.4426950408889634), np.float32(-126.0))
    i = np.floor(y)
    g = (y - i - np.float32(0.5)) * np.float32(0.6931471805599453)
    p = np.float32(1 / 720)
    p = p * g + np.float32(1 / 120)
    p = p * g + np.float32(1 / 24)
    p = p * g + np.float32(1 / 6)
    p = p * g + np.float32(0.5)
    p = p * g + np.float32(1.0)
    p = p * g + np.float32(1.0)
    scale = _float_of_bits(np.uint32(np.uint32(np.int32(i) + np.int32(127)) << np.uint32(23)))
    return p * scale * np.float32(1.4142135623730951)


@njit(inline="always")
def inverse_rms(row_D: Any, eps: Any) -> Any:
    total = np.float32(0.0)
    for d in range(row_D.shape[0]):
        total += row_D[d] * row_D[d]
    return np.float32(1.0) / np.sqrt(total / np.float32(row_D.shape[0]) + np.float32(eps))


@njit(inline="always")
def softmax(scores: Any, length: Any) -> Any:
    """Exponentials of the first ``length`` scores in place; returns one over their sum."""
    top = scores[0]
    for s in range(1, length):
        top = max(top, scores[s])
    total = np.float32(0.0)
    for s in range(length):
        value = exp(scores[s] - top)
        scores[s] = value
        total += value
    return np.float32(1.0) / total


@njit(inline="always")
def logistic(x: Any) -> Any:
    """1 / (1 + e**-x), from the side that cannot overflow."""
    small = exp(-abs(x))
    return (np.float32(1.0) if x >= 0 else small) / (np.float32(1.0) + small)


@njit(inline="always")
def normed_head(
    source_C: Any, weight_C: Any, eps: Any, cos_c: Any, sin_c: Any, scale: Any, like: Any, out_C: Any
) -> Any:
    """QK norm, rotation and scale of one head, each rounded to the dtype of ``like`` as tensor operations would be;
    ``out_C`` is fp32. Returns 1 / rms."""
    half = cos_c.shape[0]
    total = np.float32(0.0)
    for c in range(2 * half):
        value = widen(source_C[c])
        total += value * value
    inverse = np.float32(1.0) / np.sqrt(total / np.float32(2 * half) + np.float32(eps))
    for c in range(half):
        first = widen(narrow(like, widen(source_C[c]) * inverse * weight_C[c]))
        second = widen(narrow(like, widen(source_C[c + half]) * inverse * weight_C[c + half]))
        turned = widen(narrow(like, first * cos_c[c] - second * sin_c[c]))
        other = widen(narrow(like, second * cos_c[c] + first * sin_c[c]))
        out_C[c] = widen(narrow(like, turned * scale))
        out_C[c + half] = widen(narrow(like, other * scale))
    return inverse
