"""Split `algorithms` of params.yaml into a file per training stage: whether it is chosen.

A training stage depends on its own file and not on the list, so that choosing another one does not make it stale.
"""

from __future__ import annotations

from nightshift import config, files
from nightshift.pipeline.job import Job
from nightshift.project import paths


def run(job: Job, *, algorithms: config.Algorithms) -> None:
    for name in config.ALGORITHMS:
        files.write_json(paths.choice(name), {"chosen": name in algorithms})
