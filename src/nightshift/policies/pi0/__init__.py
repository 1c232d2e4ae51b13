"""pi0 (Physical Intelligence): PaliGemma with an action expert that denoises a chunk of actions."""
