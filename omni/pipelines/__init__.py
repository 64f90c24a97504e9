"""From a YAML file to a checked graph of stages. Imports seeded, documents, stages, engine."""

__all__: tuple[str, ...] = ()
