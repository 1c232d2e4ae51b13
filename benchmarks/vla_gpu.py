"""A 7B policy with LoRA on one GPU: our decoder against plain transformers with peft, in one run, random weights.

Both have the size of Llama 2 7B in bfloat16, adapters of rank 32 on all linear layers of every block, and the sequence
of OpenVLA-OFT with one camera: 1 + 256 patches + 35 tokens of the prompt + 56 places of actions = 348 tokens. A
decision is one such sequence. Rollouts are a forward pass; an update is forward, backward and a step of AdamW on the
adapters. Both read the 256 action tokens from the places of actions alone, so the difference is in the blocks.

  plain         transformers' LlamaModel with peft
  plain+ckpt    the same with its gradient checkpointing
  ours          our Llama and adapters, compiled (machine.compile)
  ours+ckpt     the same with machine.gradient_checkpointing
  policy        the whole policy: images, both vision towers, projector, ours; log-probs and entropy of the actions
  policy+ckpt   the same with machine.gradient_checkpointing
  features      the policy on recorded features of the images (policy.reuse_vision_features); its forward pass is no
                rollout, but the one that recomputes log-probs before an update
  features+ckpt the same with machine.gradient_checkpointing

One JSON line for each way and batch size: decisions per second (median over rounds, least and most), gigabytes at the
peak, and the share of the matmul peak that the same run measures (MFU; recomputed work does not count). With --profile
also the shares of time that kernels take, by kind, and the longest that are of no kind.

Example: benchmarks/vla_gpu.py --ways plain ours --batches 16 32 --profile
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

from nightshift.policies import lora
from nightshift.policies.blocks import prepare_network
from nightshift.policies.openvla_oft.llama import Llama, LlamaSpec
from nightshift.policies.openvla_oft.network import ACTION_TOKENS, PAD
from nightshift.policies.openvla_oft.policy import OpenVlaOft
from nightshift.policies.openvla_oft.vit import TowerSpec
from nightshift.policies.published import VISION_FEATURES
from nightshift.types import INSTRUCTION

LLAMA_7B: LlamaSpec = {"width": 4096, "mlp": 11008, "depth": 32, "heads": 32, "vocabulary": 32064}
DINOV2: TowerSpec = {"width": 1024, "mlp": 4096, "depth": 23, "heads": 16, "registers": 4, "layer_scale": True}
SIGLIP: TowerSpec = {"width": 1152, "mlp": 4304, "depth": 26, "heads": 16, "registers": -1, "layer_scale": False}
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LORA: lora.LoraSpec = {"rank": 32, "alpha": 16.0, "targets": TARGETS}
CHUNK, ACTION_DIM, PATCHES, PROMPT = 8, 7, 256, 35
PLACES = CHUNK * ACTION_DIM
TOKENS = 1 + PATCHES + PROMPT + PLACES
ROUNDS = 5
SECONDS = 2.0
"""Of every round, at least."""
PEAK_SIZE = 8192
KERNELS = {
    "attention": ("flash", "fmha", "sdpa", "attention"),
    "products": ("gemm", "nvjet", "cutlass", "::mm", "::addmm", "::bmm"),
    "fused": ("triton",),
    "optimizer": ("adam", "multi_tensor"),
    "copies": ("memcpy", "memset", "copy"),
}
"""Kinds of kernels by a part of their names, in lower case; the first that fits counts."""
LONGEST = 3

Step = Callable[[], object]
Forward = Callable[[], Tensor]
"""One forward pass of a batch; the mean log-prob of its actions."""


def llama_flops(llama: LlamaSpec) -> float:
    """Of a forward pass of one decision, without adapters."""
    width, mlp = llama["width"], llama["mlp"]
    weights = 4 * width**2 + 3 * width * mlp
    return llama["depth"] * (2.0 * TOKENS * weights + 4.0 * TOKENS**2 * width)


class Decoder:
    """A language model on embeddings that stand for images, prompt and places of actions."""

    def __init__(self, model: nn.Module, hidden: Callable[[Tensor], Tensor], device: torch.device, width: int) -> None:
        self.model = model
        self._hidden = hidden
        self._device = device
        self._width = width
        self._head = (torch.randn(ACTION_TOKENS, width, device=device) / width**0.5).bfloat16()

    def batch(self, size: int) -> Forward:
        embedded = torch.randn(size, TOKENS, self._width, device=self._device).bfloat16()
        tokens = torch.randint(ACTION_TOKENS, (size, PLACES, 1), device=self._device)

        def forward() -> Tensor:
            logits = functional.linear(self._hidden(embedded)[:, -PLACES:], self._head).float()
            return logits.log_softmax(-1).gather(-1, tokens).mean()

        return forward


def plain(llama: LlamaSpec, device: torch.device, *, recomputed: bool) -> Decoder:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaModel

    sizes = {
        "hidden_size": llama["width"],
        "intermediate_size": llama["mlp"],
        "num_hidden_layers": llama["depth"],
        "num_attention_heads": llama["heads"],
        "vocab_size": llama["vocabulary"],
    }
    with device, default_dtype(torch.bfloat16):
        model = LlamaModel(LlamaConfig(**sizes, rms_norm_eps=1e-6, use_cache=False, attn_implementation="sdpa"))
    adapted = get_peft_model(model, LoraConfig(r=LORA["rank"], lora_alpha=16, target_modules=TARGETS)).train()
    if recomputed:
        adapted.enable_input_require_grads()
        adapted.gradient_checkpointing_enable({"use_reentrant": False})

    def hidden(embedded: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            found: Tensor = adapted(inputs_embeds=embedded).last_hidden_state
        return found

    return Decoder(adapted, hidden, device, llama["width"])


def ours(llama: LlamaSpec, device: torch.device, *, recomputed: bool) -> Decoder:
    with device, default_dtype(torch.bfloat16):
        model = Llama(llama)
    lora.adapt(model, LORA)
    blocks: Any = _Blocks(model)
    prepare_network(blocks, compiled=True, recomputed=recomputed)
    positions = torch.arange(TOKENS, device=device)[None]

    def hidden(embedded: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            found: Tensor = model(embedded, positions, None)
        return found

    return Decoder(model, hidden, device, llama["width"])


class _Blocks:
    """The one thing of a policy that compiling and recomputing look at."""

    def __init__(self, model: Llama) -> None:
        self.transformer_blocks = self.compiled_modules = list(model.layers)


class WholePolicy:
    """`OpenVlaOft` as the learner calls it."""

    def __init__(
        self, llama: LlamaSpec, device: torch.device, *, recomputed: bool, reuses_features: bool = False
    ) -> None:
        self._device = device
        self._reuses_features = reuses_features
        with device:
            self.model = OpenVlaOft(**policy_spec(llama, reuses_features=reuses_features))
        prepare_network(self.model, compiled=True, recomputed=recomputed)

    def batch(self, size: int) -> Forward:
        images = torch.randint(256, (size, 224, 224, 3), dtype=torch.uint8, device=self._device)
        prompt = torch.randint(3, PAD, (size, PROMPT), dtype=torch.int32, device=self._device)
        actions = 2 * torch.rand(size, CHUNK, ACTION_DIM, device=self._device) - 1
        inputs = {"agentview": images, INSTRUCTION: prompt}
        if self._reuses_features:
            with torch.no_grad():
                inputs = {VISION_FEATURES: self.model.see(inputs).bfloat16(), INSTRUCTION: prompt}

        def forward() -> Tensor:
            log_probs, _ = self.model.evaluate_actions(inputs, actions, 1.0)
            return log_probs.mean()

        return forward


def policy_spec(llama: LlamaSpec, *, reuses_features: bool) -> Any:
    network = {
        **{"image_size": 224, "dinov2": DINOV2, "siglip": SIGLIP, "llama": llama, "proprio": 0},
        **{"action_head": "tokens", "chunk": CHUNK, "action_dim": ACTION_DIM, "attention": "bidirectional"},
        **{"stop_token": True, "dtype": "bfloat16"},
    }
    return {
        "network": network,
        "inputs": {"agentview": (224, 224, 3), INSTRUCTION: ()},
        "published": None,
        "lora": LORA,
        "reuse_vision_features": reuses_features,
        "pixels": {"mean": [0.5] * 6, "std": [0.5] * 6},
        "images": "bicubic",
        "max_tokens": PROMPT,
        "augmentation": {"crop": 0, "jitter": 0.0},
    }


WAYS: dict[str, Callable[..., Any]] = {
    "plain": plain,
    "ours": ours,
    "policy": WholePolicy,
    "features": partial(WholePolicy, reuses_features=True),
}
RECOMPUTED = "+ckpt"


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def rollout(forward: Forward) -> Step:
    def step() -> None:
        with torch.inference_mode():
            forward()

    return step


def update(forward: Forward, model: nn.Module) -> Step:
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)

    def step() -> None:
        (-forward()).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    return step


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def seconds_per_step(step: Step, device: torch.device) -> list[float]:
    """Of every round; what is compiled or chosen at first is not timed."""
    for _ in range(3):
        step()
    wait_for(device)
    rounds = []
    for _ in range(ROUNDS):
        start, steps = time.perf_counter(), 0
        while not steps or time.perf_counter() - start < SECONDS:
            step()
            wait_for(device)
            steps += 1
        rounds.append((time.perf_counter() - start) / steps)
    return rounds


def kernel_shares(step: Step, device: torch.device) -> dict[str, Any]:
    """Of the time of all kernels of a step, which runs warm."""
    on_gpu = device.type == "cuda"
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    with profile(activities=[activity]) as profiled:
        step()
        wait_for(device)
    events = profiled.key_averages()
    times = {event.key: event.self_device_time_total if on_gpu else event.self_cpu_time_total for event in events}
    total = sum(times.values())
    shares = dict.fromkeys([*KERNELS, "other"], 0.0)
    for name, seconds in times.items():
        shares[kind_of(name)] += seconds / total
    other = sorted((name for name in times if kind_of(name) == "other"), key=times.__getitem__)
    return {**{kind: round(share, 3) for kind, share in shares.items()}, "longest_other": other[: -LONGEST - 1 : -1]}


def kind_of(kernel: str) -> str:
    return next((kind for kind, parts in KERNELS.items() if any(part in kernel.lower() for part in parts)), "other")


def peak_tflops(device: torch.device) -> float:
    """Of one large product of bfloat16 matrices."""
    size = PEAK_SIZE if device.type == "cuda" else 512
    left, right = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    return 2 * size**3 / min(seconds_per_step(lambda: torch.mm(left, right), device)) / 1e12


def measure(
    way: str, llama: LlamaSpec, batches: Sequence[int], device: torch.device, peak: float, *, profiled: bool
) -> None:
    name, recomputed = way.removesuffix(RECOMPUTED), way.endswith(RECOMPUTED)
    torch.manual_seed(0)
    made = WAYS[name](llama, device, recomputed=recomputed)
    for size in batches:
        forward = made.batch(size)
        steps = {"rollout": (rollout(forward), 1)} if not recomputed else {}
        for kind, (step, passes) in {**steps, "update": (update(forward, made.model), 2)}.items():
            found = timed(step, size, passes, llama, device, peak)
            if profiled and "error" not in found:
                found["kernels"] = kernel_shares(step, device)
            print(json.dumps({"way": way, "kind": kind, "batch": size, **found}), flush=True)


def timed(step: Step, size: int, passes: int, llama: LlamaSpec, device: torch.device, peak: float) -> dict[str, Any]:
    """`passes`: forward passes' worth of work; the weights' own gradients are not computed with LoRA."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    try:
        rates = [size / seconds for seconds in seconds_per_step(step, device)]
    except torch.OutOfMemoryError:
        return {"error": "out of memory"}
    rate = statistics.median(rates)
    return {
        "decisions_per_second": round(rate, 2),
        "least": round(min(rates), 2),
        "most": round(max(rates), 2),
        "gigabytes": round(torch.cuda.max_memory_allocated() / 2**30, 1) if device.type == "cuda" else None,
        "mfu": round(rate * passes * llama_flops(llama) / (peak * 1e12), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ways = [f"{name}{suffix}" for name in WAYS for suffix in ("", RECOMPUTED)]
    parser.add_argument("--ways", nargs="+", choices=ways, default=ways)
    parser.add_argument("--batches", nargs="+", type=int, default=[16, 32, 64])
    parser.add_argument("--depth", type=int, default=LLAMA_7B["depth"], help="blocks of the decoder")
    parser.add_argument("--width", type=int, default=LLAMA_7B["width"], help="of the decoder; its MLP goes with it")
    parser.add_argument("--profile", action="store_true", help="tell which kernels take the time")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    mlp = LLAMA_7B["mlp"] * arguments.width // LLAMA_7B["width"]
    llama: LlamaSpec = {**LLAMA_7B, "depth": arguments.depth, "width": arguments.width, "mlp": mlp}
    peak = peak_tflops(device)
    print(json.dumps({"matmul_peak_tflops": round(peak, 1), "device": device.type, "tokens": TOKENS}), flush=True)
    for way in arguments.ways:
        measure(way, llama, arguments.batches, device, peak, profiled=arguments.profile)
        gc.collect()
        torch.compiler.reset()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
