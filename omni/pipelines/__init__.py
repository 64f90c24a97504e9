"""Loading a YAML file into a checked graph of stages. Imports seeded, stages, engine."""
