"""Who overrides a policy's actions while an episode is played: a person with an input device, or a scripted expert."""
