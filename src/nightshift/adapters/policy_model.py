"""The model code that MLflow stores beside the weights: loading it runs this file and unpickles nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from mlflow.models import set_model
from mlflow.pyfunc import PythonModel

from nightshift import policies
from nightshift.policies.base import Policy, observation_dtype
from nightshift.policies.modalities import observed


class _Acts:
    """Observations by name, each [B, …], to chunks of actions [B, C, A].

    Apart from the model, since MLflow asks a model that is made with a `predict` for type hints, and knows none for a
    dict of arrays. The signature that it is logged with says it all.
    """

    policy: Policy

    def predict(self, context, model_input, params=None):  # type: ignore[no-untyped-def]
        shapes = self.policy.shapes
        return self.policy.act(
            {name: np.asarray(observed(model_input, name), observation_dtype(shapes[name])) for name in shapes}
        )


class PolicyModel(_Acts, PythonModel):  # type: ignore[misc]
    def load_context(self, context: Any) -> None:
        self.policy = policies.load(Path(context.artifacts["policy"]))


set_model(PolicyModel())
