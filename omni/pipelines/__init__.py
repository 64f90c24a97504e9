"""From a YAML file to a checked graph of stages. Imports seeded, stages, engine."""
