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
from numba.extending import intrinsic, overload
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


# numba passes the typing context itself: callers in compiled code give the value alone, which pyright cannot know.
@intrinsic
def _float_of_bits(typing: Any, bits: Any = None) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.uint32), generate


@intrinsic
def _bits_of_float(typing: Any, value: Any = None) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(32))

    return types.uint32(types.float32), generate


def widen(value: Any) -> Any:
    """Working dtype to fp32."""
    raise NotImplementedError("compiled code only")


@overload(widen, inline="always", strict=False)
def _(value: Any) -> Any:
    if isinstance(value, types.Float):
        return lambda value: value
    return lambda value: _float_of_bits(np.uint32(np.uint32(value) << np.uint32(16)))


def narrow(like: Any, value: Any) -> Any:
    """fp32 to the dtype of array ``like``, to nearest, ties to even."""
    raise NotImplementedError("compiled code only")


@overload(narrow, inline="always", strict=False)
def _(like: Any, value: Any) -> Any:
    if isinstance(like.dtype, types.Float):
        return lambda like, value: value

    def rounded(like: Any, value: Any) -> Any:
        bits = _bits_of_float(np.float32(value))
        odd = np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(1))
        return np.uint16(np.uint32(bits + np.uint32(0x7FFF) + odd) >> np.uint32(16))

    return rounded


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
