"""Perturbations of what the policy is told."""

from __future__ import annotations

from nightshift.envs.perturbations.base import Perturbation


class LanguageInstructions(Perturbation):
    """The instruction in other words; the strength says which paraphrase of the task (paraphrases.py)."""

    name = "language_instructions"
    kind = "instruction"
    sense = "instruction"
    is_whole = True
    source = "LIBERO-Plus; Semantic in LIBERO-Pro"
    summary = "the first paraphrase of the task's instruction; higher ones are further from it"

    def change_instruction(self, instruction: str) -> str:
        return self.spec.instruction
