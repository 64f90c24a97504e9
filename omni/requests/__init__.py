"""Request files in, output files out. Imports stages, engine."""
