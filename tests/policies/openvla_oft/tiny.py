"""params.yaml's section policy of a tiny openvla-oft with random weights."""

from __future__ import annotations

from typing import Any

TRANSFORMER = {"width": 16, "mlp": 32, "depth": 1, "heads": 2}


def section(**changes: Any) -> dict[str, Any]:
    return {
        "family": "openvla-oft",
        "inputs": ["agentview", "instruction"],
        "variant": "simplevla-rl",
        "checkpoint": None,
        "size": {"image_size": 28, "dinov2": TRANSFORMER, "siglip": TRANSFORMER, "llama": TRANSFORMER},
        "max_tokens": 16,
        "chunk": 4,
        "head": "tokens",
        "dtype": "float32",
        "lora": None,
        "reuse_vision_features": False,
        "augmentation": {"crop": 2, "jitter": 0.1},
        **changes,
    }
