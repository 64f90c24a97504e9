"""All stages of a pipeline by turns in one process beside its user's.

::

    the user's process                       the pipeline's own
    Omni ──► ApartRunner ──── Submit ────►  PipelineHost ──► Driver ──► Orchestrator ──► stages
      ▲          │  ▲                            │             │
      └─ sinks ◄─┘  └─────── Outputs ◄───────────┴── sinks ◄───┘

One interpreter has one lock, which who computes and who serves would take from each other; and what
crashes a stage here takes nothing else with it. Imports runtime, requests, pipelines, stages,
engine.
"""

__all__: tuple[str, ...] = ()
