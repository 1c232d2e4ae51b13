"""The network of pi0 against that of transformers, with the same random weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from nightshift.policies.pi0 import gemma, network
from tests.policies import goldens
from tests.policies.oracles import embed_time
from tests.policies.pi0 import tiny

TOLERANCE = 5e-6
VISIBLE = 1e-4


def error(found: Tensor, golden: str) -> float:
    """The largest difference from what transformers computed (goldens/README.md)."""
    return float((found - goldens.tensor("pi0", golden)).abs().max())


def test_the_velocity_is_that_of_transformers() -> None:
    found = tiny.velocity(tiny.network(), tiny.batch())
    assert error(found, "velocity") < TOLERANCE
    assert found.std() > 0.1


def causal_prefix(patch: pytest.MonkeyPatch) -> None:
    plain = gemma.DecoderLayer.forward

    def forward(self: Any, tokens: Tensor, rotation: Any, mask: Tensor, memory: Any = None) -> Any:
        count = tokens.shape[1]
        return plain(self, tokens, rotation, mask if memory else mask & torch.ones(count, count).tril().bool(), memory)

    patch.setattr(gemma.DecoderLayer, "forward", forward)


def state_sees_actions(patch: pytest.MonkeyPatch) -> None:
    def mask(present: Tensor, count: int, states: int) -> Tensor:
        return torch.cat([present, torch.ones(len(present), count, dtype=torch.bool)], 1)[:, None, None]

    patch.setattr(network, "suffix_mask", mask)


def padding_is_seen(patch: pytest.MonkeyPatch) -> None:
    plain = network.suffix_mask
    patch.setattr(network, "suffix_mask", lambda present, *rest: plain(torch.ones_like(present), *rest))


def words_are_not_scaled(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(network, "embedding_scale", lambda width: 1.0)


def other_rotary_base(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(gemma, "_ROPE_BASE", 1_000_000.0)


def padding_takes_positions(patch: pytest.MonkeyPatch) -> None:
    plain = gemma.rotation_of
    later = lambda positions, *rest: plain(positions + 2 * (positions >= 4), *rest)  # noqa: E731
    patch.setattr(network, "rotation_of", later)


def rotated_the_other_way(patch: pytest.MonkeyPatch) -> None:
    """Keys alone: turning both is the same."""
    plain = gemma.Attention.keys_values
    other = lambda self, tokens, rotation: plain(self, tokens, (rotation[0], -rotation[1]))  # noqa: E731
    patch.setattr(gemma.Attention, "keys_values", other)


def exact_gelu(patch: pytest.MonkeyPatch) -> None:
    plain = torch.nn.functional.gelu
    patch.setattr(torch.nn.functional, "gelu", lambda tokens, approximate: plain(tokens))


def norms_are_not_relative_to_one(patch: pytest.MonkeyPatch) -> None:
    def forward(self: gemma.RmsNorm, tokens: Tensor) -> Tensor:
        return torch.nn.functional.rms_norm(tokens, tokens.shape[-1:], self.weight, 1e-6)

    patch.setattr(gemma.RmsNorm, "forward", forward)


@pytest.mark.parametrize(
    "wrong",
    [
        causal_prefix,
        state_sees_actions,
        padding_is_seen,
        words_are_not_scaled,
        other_rotary_base,
        padding_takes_positions,
        rotated_the_other_way,
        exact_gelu,
        norms_are_not_relative_to_one,
    ],
)
def test_what_is_computed_in_another_way_would_be_seen(
    monkeypatch: pytest.MonkeyPatch, wrong: Callable[[pytest.MonkeyPatch], None]
) -> None:
    wrong(monkeypatch)
    assert error(tiny.velocity(tiny.network(), tiny.batch()), "velocity") > VISIBLE


def test_eulers_chain_ends_where_that_of_transformers_does() -> None:
    made, given = tiny.network(), tiny.batch()
    noisy = given.noisy
    for step in range(tiny.STEPS):
        times = torch.full((tiny.ROWS,), 1 - step / tiny.STEPS)
        noisy = noisy - tiny.velocity(made, given._replace(noisy=noisy, times=times)) / tiny.STEPS
    assert error(noisy, "denoised") < TOLERANCE


def test_a_row_depends_neither_on_the_rows_beside_it_nor_on_padding() -> None:
    made, given = tiny.network(), tiny.batch()
    together = tiny.velocity(made, given)
    alone = torch.cat([tiny.velocity(made, tiny.Batch(*(t[i : i + 1] for t in given))) for i in range(tiny.ROWS)])
    torch.testing.assert_close(alone, together, rtol=0, atol=1e-5)
    more = given._replace(
        images=torch.cat([given.images, given.images[:, :1]], dim=1),
        cameras=torch.cat([given.cameras, torch.zeros(tiny.ROWS, 1, dtype=torch.bool)], dim=1),
        prompt=torch.cat([given.prompt, given.prompt], dim=1),
        words=torch.cat([given.words, torch.zeros_like(given.words)], dim=1),
    )
    torch.testing.assert_close(tiny.velocity(made, more), together, rtol=0, atol=1e-5)


def adaptive_norm(norm: torch.nn.Module, tokens: Tensor, condition: Tensor) -> tuple[Tensor, Tensor]:
    scale, shift, gate = linear(norm.dense, condition).reshape(len(tokens), 3, -1).unbind(1)
    size = (tokens**2).mean(-1, keepdim=True) + 1e-6
    return tokens / size**0.5 * (1 + scale[:, None]) + shift[:, None], gate[:, None]


def linear(layer: Any, values: Tensor) -> Tensor:
    product: Tensor = values @ layer.weight.T.double()
    return product if layer.bias is None else product + layer.bias.double()


def silu(values: Tensor) -> Tensor:
    return values / (1 + (-values).exp())


@torch.no_grad()
def transcribed(made: Any, given: tiny.Batch) -> Tensor:
    """pi0.5's expert written down a second time, in double precision and row by row of the attention, from the keys and
    values of the prefix, which pi0 has as well."""
    prefix = made.prefix(made.see(given.images), given.cameras, given.prompt, given.words)
    condition = silu(linear(made.time_mlp_out, silu(linear(made.time_mlp_in, embed_time(given.times).double()))))
    tokens = linear(made.action_in_proj, given.noisy.double())
    (batch, count, _), heads, width = tokens.shape, 4, 8
    positions = prefix.present.sum(1)[:, None] + torch.arange(count)
    angles = positions[..., None] / 10_000.0 ** (torch.arange(width // 2).double() * 2 / width)
    turn = torch.polar(torch.ones_like(angles), angles)[:, :, None]

    def rotate(values: Tensor) -> Tensor:
        turned = torch.complex(values[..., : width // 2], values[..., width // 2 :]) * turn
        return torch.cat([turned.real, turned.imag], dim=-1)

    for layer, (keys, values) in zip(made.expert.layers, prefix.memories, strict=True):
        normed, gate = adaptive_norm(layer.input_layernorm, tokens, condition)
        project = layer.self_attn
        queries = rotate(linear(project.q_proj, normed).reshape(batch, count, heads, width))
        own_keys = rotate(linear(project.k_proj, normed)[:, :, None])[:, :, 0]
        all_keys = torch.cat([keys[:, 0].double(), own_keys], dim=1)
        all_values = torch.cat([values[:, 0].double(), linear(project.v_proj, normed)], dim=1)
        scores = torch.einsum("bqhd,bkd->bhqk", queries, all_keys) / width**0.5
        seen = torch.cat([prefix.present, torch.ones(batch, count, dtype=torch.bool)], dim=1)
        weights = scores.masked_fill(~seen[:, None, None], -torch.inf).softmax(-1)
        attended = torch.einsum("bhqk,bkd->bqhd", weights, all_values).reshape(batch, count, -1)
        tokens = tokens + gate * linear(project.o_proj, attended)
        normed, gate = adaptive_norm(layer.post_attention_layernorm, tokens, condition)
        hidden = torch.nn.functional.gelu(linear(layer.mlp.gate_proj, normed), approximate="tanh")
        tokens = tokens + gate * linear(layer.mlp.down_proj, hidden * linear(layer.mlp.up_proj, normed))
    return linear(made.action_out_proj, adaptive_norm(made.expert.norm, tokens, condition)[0]).float()


PI05_TOLERANCE = 5e-5
"""Wider than TOLERANCE: the formulas are in double precision, and the network rounds to single precision."""


def pi05_batch() -> tiny.Batch:
    return tiny.batch()._replace(state=torch.zeros(tiny.ROWS, 0))


def pi05_error(made: network.Pi0Network) -> float:
    """The largest difference from what the formulas say."""
    return float((tiny.velocity(made, pi05_batch()) - transcribed(made, pi05_batch())).abs().max())


def test_the_expert_of_pi05_is_what_its_formulas_say() -> None:
    made, given = tiny.network(tiny.PI05), pi05_batch()
    assert pi05_error(made) < PI05_TOLERANCE
    found = tiny.velocity(made, given)
    assert found.std() > 0.1
    sooner = tiny.velocity(made, given._replace(times=given.times * 0.9))
    assert (sooner - found).abs().max() > 1e-2


Modulation = tuple[Tensor, Tensor, Tensor]
"""Scale, shift and gate."""


def modulate_by(patch: pytest.MonkeyPatch, change: Callable[[Tensor, Tensor, Tensor], Modulation]) -> None:
    """Adaptive norms that make something else of the projected condition."""

    def forward(self: gemma.AdaptiveRmsNorm, tokens: Tensor, condition: Tensor) -> tuple[Tensor, Tensor]:
        scale, shift, gate = change(*self.dense(condition)[:, None].chunk(3, dim=-1))
        return normed(tokens) * (1 + scale) + shift, gate

    patch.setattr(gemma.AdaptiveRmsNorm, "forward", forward)


def normed(tokens: Tensor) -> Tensor:
    return torch.nn.functional.rms_norm(tokens, tokens.shape[-1:], eps=1e-6)


def nothing_is_gated(patch: pytest.MonkeyPatch, made: Any) -> None:
    modulate_by(patch, lambda scale, shift, gate: (scale, shift, torch.ones_like(gate)))


def gates_are_relative_to_one(patch: pytest.MonkeyPatch, made: Any) -> None:
    modulate_by(patch, lambda scale, shift, gate: (scale, shift, 1 + gate))


def the_mlp_has_the_gate_of_the_attention(patch: pytest.MonkeyPatch, made: Any) -> None:
    def forward(self: Any, tokens: Tensor, rotation: Any, mask: Tensor, memory: Any, condition: Tensor) -> Tensor:
        normed, gate = self.input_layernorm(tokens, condition)
        attended = gemma.joined(memory, self.self_attn.keys_values(normed, rotation))
        tokens = tokens + gate * self.self_attn(normed, rotation, mask, attended)
        output: Tensor = tokens + gate * self.mlp(self.post_attention_layernorm(tokens, condition)[0])
        return output

    patch.setattr(gemma.AdaptiveDecoderLayer, "forward", forward)


def scale_and_shift_are_exchanged(patch: pytest.MonkeyPatch, made: Any) -> None:
    modulate_by(patch, lambda scale, shift, gate: (shift, scale, gate))


def the_final_norm_is_not_modulated(patch: pytest.MonkeyPatch, made: Any) -> None:
    patch.setattr(made.expert.norm, "forward", lambda tokens, condition: (normed(tokens), None))


@pytest.mark.parametrize(
    "wrong",
    [
        nothing_is_gated,
        gates_are_relative_to_one,
        the_mlp_has_the_gate_of_the_attention,
        scale_and_shift_are_exchanged,
        the_final_norm_is_not_modulated,
    ],
)
def test_adaptive_norms_that_modulate_in_another_way_would_be_seen(
    monkeypatch: pytest.MonkeyPatch, wrong: Callable[[pytest.MonkeyPatch, Any], None]
) -> None:
    made = tiny.network(tiny.PI05)
    wrong(monkeypatch, made)
    assert pi05_error(made) > 1


def test_what_would_be_seen_is_the_change_of_the_modulation_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    modulate_by(monkeypatch, lambda scale, shift, gate: (scale, shift, gate))
    assert pi05_error(tiny.network(tiny.PI05)) < PI05_TOLERANCE
