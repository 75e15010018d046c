"""One forward pass over the new tokens of many rows at once, without padding (continuous batching).

Rows that decode one token and rows that are fed a whole tool result share every matrix product: a step costs what
its tokens cost, not what its widest row costs (Orca, Yu et al. 2022, and Sarathi-Serve, Agrawal et al. 2024, mix
prefill and decode for the same reason). Only attention looks at rows one by one, see ``kernels``.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cadenza.inference import kernels
from cadenza.inference.cache import KVCache
from cadenza.model import block_kernels
from cadenza.model.compiled import array
from cadenza.model.transformer import Block, PolicyModel

# CPU kernels of matrix products are compiled once per shape: token counts are rounded up to keep shapes few.
TOKEN_STEP = 16
CAPACITY_STEP = 16


def _up(count: int, step: int) -> int:
    return -(-count // step) * step


class _Layer:
    """One block's weights as the kernels want them: fused, and fp32 where no matrix product needs them."""

    def __init__(self, block: Block) -> None:
        self.block = block  # ``refresh`` gives the rest

    def refresh(self) -> None:
        """Reads the block's weights again, after they changed."""
        b, a, m = self.block, self.block.self_attn, self.block.mlp
        self.input_norm, self.post_norm, self.q_norm, self.k_norm = (
            norm.weight.float().numpy()
            for norm in (b.input_layernorm, b.post_attention_layernorm, a.q_norm, a.k_norm)
        )
        width = self.input_norm.shape[0]
        taps = b.short_conv.weight_DP if b.short_conv is not None else torch.zeros(width, 0)
        self.taps_PD = taps.float().t().contiguous().numpy()
        self.qkv_DX = torch.cat((a.q_proj.weight, a.k_proj.weight, a.v_proj.weight)).t()
        self.o_XD = a.o_proj.weight.t()
        self.gate_ED = m.gate.weight.float().numpy()
        self.in_EDG, self.out_EFD = m.w_in_EGD.transpose(1, 2), m.w_out_EFD
        self.shared = (m.shared_in.weight.t(), m.shared_out.weight.t()) if m.d_shared else None


@dataclass(frozen=True)
class Rows:
    """The rows of a call, int64 (B,): cache slot, index of the first new token, how many, how many were cached."""

    slot_B: np.ndarray
    first_B: np.ndarray
    count_B: np.ndarray
    length_B: np.ndarray

    @classmethod
    def of(cls, slots: list[int], counts: list[int], lengths: list[int]) -> Rows:
        count_B = np.array(counts, np.int64)
        return cls(
            np.array(slots, np.int64), np.cumsum(count_B) - count_B, count_B, np.array(lengths, np.int64)
        )


class Forward:
    """The policy with its cache. Owned by the engine, called from its thread only.

    Args:
        model: its parameters, all of ``dtype``, are used in place; call ``refresh`` when they have changed.
        tokens: the most new tokens of one call.
    """

    def __init__(self, model: PolicyModel, slots: int, span: int, tokens: int, dtype: torch.dtype) -> None:
        c = self.config = model.config
        self.model = model
        self.cache = KVCache(c, slots, span, dtype)
        self.layers = [_Layer(block) for block in model.layers]  # type: ignore[arg-type]
        self.cos_SC, self.sin_SC = model.cos.numpy(), model.sin.numpy()
        self.refresh()
        self._watched: list[
            int
        ] = []  # rows of the present call whose convolution inputs are kept, see ``rewind``
        self._inputs: list[dict[int, np.ndarray]] = [{} for _ in self.layers]
        n = _up(tokens, TOKEN_STEP)
        heads = c.n_heads + 2 * c.n_kv_heads
        self.tokens = tokens
        self._x_ND, self._normed_ND = np.zeros((2, n, c.d_model), np.float32)
        self._q_NHC = np.zeros((n, c.n_heads, c.head_dim), np.float32)
        queries = max(kernels.QUERIES, c.n_heads // c.n_kv_heads)
        self._scores_MS = np.zeros((queries, _up(span, kernels.KEYS)), np.float32)
        self._weights_NJ = np.zeros((n, c.experts_per_token), np.float32)
        self._experts_NJ, self._place_NJ = np.zeros((2, n, c.experts_per_token), np.int64)
        self._load_E = np.zeros(c.n_experts, np.int64)
        places = c.n_experts * _up(n, CAPACITY_STEP)  # the worst case: every token wants the same expert
        new = functools.partial(torch.zeros, dtype=dtype)
        self._h, self._qkv = new(n, c.d_model), new(n, heads * c.head_dim)
        self._attended, self._delta = new(n, c.n_heads * c.head_dim), new(n, c.d_model)
        self._sent, self._answer = new(places, c.d_model), new(places, c.d_model)
        self._wide, self._narrow = new(places, 2 * c.d_expert), new(places, c.d_expert)
        self._shared_wide, self._shared_narrow = new(n, 2 * c.d_shared), new(n, c.d_shared)

    def refresh(self) -> None:
        """Derives what the kernels need from the model's present weights."""
        for layer in self.layers:
            layer.refresh()
        self._norm_D = self.model.norm.weight.float().numpy()
        self._table_VD = array(self.model.embed_tokens.weight.data)

    def __call__(
        self, ids: list[int], rows: Rows, wanted: list[int], watched: list[int] | None = None
    ) -> Tensor:
        """Appends ``ids``, the new tokens of all rows one after the other, to their rows' caches.

        ``watched``: rows that ``rewind`` may cut afterwards. Returns the logits (len(wanted), V) of the tokens with
        these indices. Raises ValueError where the kernels, which check no bounds, would leave their arrays.
        """
        n = len(ids)
        if (
            n > self.tokens
            or n != rows.count_B.sum()
            or (rows.length_B + rows.count_B).max() > self.cache.span
        ):
            raise ValueError(
                f"{n} new tokens do not fit a call of {self.tokens} or the cache's {self.cache.span}"
            )
        self._watched = watched or []
        x_ND = self._x_ND[:n]
        kernels.embed(np.array(ids, np.int64), self._table_VD, x_ND)
        slot_N = np.repeat(rows.slot_B, rows.count_B)
        place_N = np.arange(n) + np.repeat(rows.length_B - rows.first_B, rows.count_B)
        for i, layer in enumerate(self.layers):
            self._attention(layer, i, x_ND, rows)
            self._experts(layer, x_ND)
            self.cache.routes_RSLJ[slot_N, place_N, i] = self._experts_NJ[:n]
        h = self._h[: _up(len(wanted), TOKEN_STEP)]
        index_B = np.array(wanted, np.int64)
        kernels.norm(x_ND, index_B, self._norm_D, self.config.norm_eps, array(h))
        self.states_BD = h[: len(wanted)]  # what the logits were made of; until the next call
        return self.model.logits(h)[: len(wanted)]

    def rewind(self, row: int, rows: Rows, kept: int) -> None:
        """Takes back all but the first ``kept`` tokens that the last call fed to a watched row. Keys and values beyond
        them are overwritten by what comes next; the convolution's tail is put back."""
        slot = rows.slot_B[row]
        for tail_RPD, inputs in zip(self.cache.tail_RPD, self._inputs, strict=True):
            past = tail_RPD.shape[1]
            if past:
                tail_RPD[slot] = inputs[row][kept : kept + past]

    def _attention(self, layer: _Layer, i: int, x_ND: np.ndarray, rows: Rows) -> None:
        """Leaves the attention's answer in ``_delta``."""
        c, cache, padded = self.config, self.cache, _up(len(x_ND), TOKEN_STEP)
        r = (rows.slot_B, rows.first_B, rows.count_B)
        h, qkv, attended = self._h[:padded], self._qkv[:padded], self._attended[:padded]
        before = {row: cache.tail_RPD[i][rows.slot_B[row]].copy() for row in self._watched}
        kernels.norm_and_shift(
            x_ND,
            layer.input_norm,
            c.norm_eps,
            layer.taps_PD,
            cache.tail_RPD[i],
            *r,
            self._normed_ND,
            array(h),
        )
        for row, tail_PD in before.items():
            first = rows.first_B[row]
            self._inputs[i][row] = np.concatenate(
                (tail_PD, self._normed_ND[first : first + rows.count_B[row]])
            )
        torch.mm(h, layer.qkv_DX, out=qkv)
        kernels.place_heads(
            array(qkv), layer.q_norm, layer.k_norm, c.norm_eps, self.cos_SC, self.sin_SC, *r, rows.length_B,
            cache.k_RKGCS[i], cache.v_RKSC[i], self._q_NHC,
        )  # fmt: skip
        kernels.attend(
            self._q_NHC,
            cache.k_RKGCS[i],
            cache.v_RKSC[i],
            *r,
            rows.length_B,
            self._scores_MS,
            array(attended),
        )
        torch.mm(attended, layer.o_XD, out=self._delta[:padded])

    def _experts(self, layer: _Layer, x_ND: np.ndarray) -> None:
        """Adds the attention's answer, then that of the chosen experts and of the shared one."""
        c, n = self.config, len(x_ND)
        padded = _up(n, TOKEN_STEP)
        h, delta = self._h[:padded], self._delta[:padded]
        weights_NJ, experts_NJ, place_NJ = self._weights_NJ[:n], self._experts_NJ[:n], self._place_NJ[:n]
        kernels.add_norm_route(
            x_ND, array(delta), layer.post_norm, c.norm_eps, layer.gate_ED, array(h), weights_NJ, experts_NJ,
            self._load_E,
        )  # fmt: skip
        capacity = _up(int(self._load_E.max()), CAPACITY_STEP)
        places = c.n_experts * capacity
        sent, answer = self._sent[:places], self._answer[:places]
        wide, narrow = self._wide[:places], self._narrow[:places]
        kernels.dispatch(array(h)[:n], experts_NJ, capacity, place_NJ, array(sent))
        shape = (c.n_experts, capacity, -1)
        torch.bmm(sent.view(shape), layer.in_EDG, out=wide.view(shape))
        h_MG, out_MF = array(wide), array(narrow)
        for start, load in zip(range(0, places, capacity), self._load_E.tolist(), strict=True):
            block_kernels.swiglu(start, start + load, h_MG, out_MF)
        torch.bmm(narrow.view(shape), layer.out_EFD, out=answer.view(shape))
        shared = delta[:0]
        if layer.shared is not None:
            in_DG, out_FD = layer.shared
            wide, narrow = self._shared_wide[:padded], self._shared_narrow[:padded]
            torch.mm(h, in_DG, out=wide)
            block_kernels.swiglu(0, n, array(wide), array(narrow))
            shared = torch.mm(narrow, out_FD, out=delta)
        block_kernels.combine(0, n, x_ND, array(answer), place_NJ, weights_NJ, array(shared), x_ND)
